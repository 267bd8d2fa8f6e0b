"""Recipes as files: the named ones that ship with the package, and anybody's YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from worldsize.errors import UserError
from worldsize.recipe import Recipe


def names() -> list[str]:
    """The shipped recipes, sorted."""
    folder = resources.files("worldsize") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load(name_or_path: str) -> Recipe:
    """The recipe of that name, or in that YAML file.

    A file may begin with ``base: NAME``: it then states only what differs from that recipe.

    Raises:
        UserError: no such recipe, not YAML, unknown keys, wrong types, or settings that do not fit together.
    """
    values, where = _values(name_or_path)
    return validate(values, where)


def validate(values: Mapping[str, Any], where: str) -> Recipe:
    """``values`` as a recipe; ``where`` names their origin in the error."""
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(f"{where}:\n{explain(error)}") from None


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe, every field, in the order of its declaration; `load` reads it back unchanged."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)


def explain(error: ValidationError) -> str:
    """A validation error in one line per fault, each named by its dotted flag."""
    return "\n".join(_fault(e["loc"], e["msg"], e["type"]) for e in error.errors())


def _fault(loc: tuple[int | str, ...], message: str, kind: str) -> str:
    dotted = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(dotted, flat_keys(Recipe), n=1, cutoff=0.5)
        return f"  unknown setting {dotted!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    message = message.removeprefix("Value error, ")
    return f"  {dotted}: {message}" if dotted else f"  {message}"


def flat_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """All dotted names of a settings class, e.g. ``data.root``."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(flat_keys(field.annotation, prefix + name + "."))
    return keys


def _values(name_or_path: str, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    if name_or_path in seen:
        raise UserError(f"recipe {name_or_path}: its `base` leads back to itself ({' -> '.join(seen)})")
    if name_or_path in names():
        text = (resources.files("worldsize") / "recipes" / f"{name_or_path}.yaml").read_text("utf-8")
        where = f"recipe {name_or_path}"
    else:
        text, where = _read_file(name_or_path), name_or_path
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        what = "nothing" if values is None else type(values).__name__
        raise UserError(f"{where} holds {what}, not settings: write `key: value` lines")
    base = values.pop("base", None)
    if base is None:
        return values, where
    beside = Path(name_or_path).parent / str(base)
    origin = str(beside) if str(base) not in names() and beside.is_file() else str(base)
    return _merge(_values(origin, (*seen, name_or_path))[0], values), where


def _read_file(path: str) -> str:
    if Path(path).suffix in (".yaml", ".yml") or Path(path).is_file():
        try:
            return Path(path).expanduser().read_text("utf-8")
        except OSError as error:
            raise UserError(f"cannot read the recipe {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"the recipe {path} is not a text file") from None
    near = difflib.get_close_matches(path, names(), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"no recipe is called {path!r}{hint} There are: {', '.join(names())}; or give a YAML file.")


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
