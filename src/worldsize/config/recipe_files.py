"""Recipes as files: the named ones that ship with the package, and the user's YAML files."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from worldsize.config.recipe import Recipe
from worldsize.config.wording import quoted
from worldsize.errors import UserError, did_you_mean, of_system

# Far more than any recipe has: a few lines of aliases of aliases can stand for billions of values.
_MOST_NODES = 100_000


def names() -> list[str]:
    """The shipped recipes, sorted."""
    folder = resources.files("worldsize") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load(name_or_path: str) -> Recipe:
    """The recipe of that name, or in that YAML file.

    A file may begin with ``base: NAME``; it then lists only what differs from that recipe.

    Raises:
        UserError: no such recipe, not YAML, unknown keys, wrong types, or settings that contradict each other.
    """
    values, where = _values(name_or_path)
    return validate(values, where)


def refuse_shipped_name(flag: str, path: Path) -> None:
    """Refuse a new recipe at ``path``, which the option ``flag`` names, if that is the name of a shipped one.

    Raises:
        UserError: it is.
    """
    if str(path) in names():
        raise UserError(f"{flag} {path} is the name of a shipped recipe, which worldsize train would take: pass {path}.yaml")


def missing(command: str) -> UserError:
    """The error of a command line without RECIPE."""
    return UserError(
        f"RECIPE is required as the first argument: worldsize {command} RECIPE, a YAML file or one of: {', '.join(names())}"
    )


def validate(values: Mapping[str, Any], where: str) -> Recipe:
    """``values`` as a recipe; ``where`` names their origin in errors."""
    try:
        return Recipe.model_validate(dict(values))
    except ValidationError as error:
        raise UserError(f"{where}:\n{explain(error)}") from None


def to_yaml(recipe: Recipe) -> str:
    """The complete recipe, every field in declaration order; `load` reads it back unchanged."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as it is, if YAML can."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def parse(text: str, where: str) -> Any:
    """The value of a YAML document; ``where`` names its origin in errors.

    Raises:
        UserError: it is not YAML, or a key stands twice, of which YAML would use the last in silence. Names all lines. Or
            its aliases stand for more than can be shown.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if _size(node, {}) > _MOST_NODES:
            many = f"more than {_MOST_NODES:,} values"
            raise UserError(f"{where} has aliases (*NAME) that stand for {many}, or for themselves")
        if repeated := list(_repeated(node, "", set())):
            raise UserError(f"{where}:\n" + "\n".join(repeated))
        return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date such as 2024-02-30
        raise UserError(f"{where} is not valid YAML: {error}") from None


def _size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """How many values the node stands for, each alias counted as often as it occurs; infinite if it contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is complete
        inside = itertools.chain(*node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_size(item, known) for item in inside)
    return known[id(node)]


def _repeated(node: yaml.Node | None, prefix: str, seen: set[int]) -> Iterator[str]:
    """One line for each key that stands more than once in a mapping, at any depth."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:  # an alias leads to the same node
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item, prefix, seen)
        return
    lines: dict[str, list[int]] = {}
    for key, value in node.value:
        name = f"{prefix}{key.value}" if isinstance(key, yaml.ScalarNode) else f"{prefix}?"
        if isinstance(key, yaml.ScalarNode):
            lines.setdefault(name, []).append(key.start_mark.line + 1)
        yield from _repeated(value, f"{name}.", seen)
    for name, where in lines.items():
        if len(where) > 1:
            yield f"  {name} appears in lines {', '.join(map(str, where[:-1]))} and {where[-1]}: keep one of them"


def explain(error: ValidationError) -> str:
    """A validation error of a recipe or one of its sections: one line per fault, each with its dotted name."""
    return "\n".join(_fault((*_section(error.title), *e["loc"]), e) for e in error.errors())


def _section(title: str) -> tuple[str, ...]:
    """The recipe's section that has this class; nothing for the recipe itself."""
    fields = Recipe.model_fields.items()
    return next(((name,) for name, field in fields if getattr(field.annotation, "__name__", "") == title), ())


def _fault(path: tuple[int | str, ...], error: ErrorDetails) -> str:
    dotted = ".".join(str(part) for part in path)
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(dotted, flat_keys(Recipe), n=1, cutoff=0.5)
        return f"  unknown setting {dotted!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] == "value_error":  # from a validator of ours, which names the settings and their values
        message = error["msg"].removeprefix("Value error, ")
        return f"  {dotted}: {message}" if dotted else f"  {message}"
    given = f" (got {error['input']!r})" if isinstance(error["input"], (str, int, float, bool)) else ""
    return f"  {dotted}: {error['msg']}{given}"


def is_class(hint: Any) -> TypeGuard[type[Any]]:
    """Whether a type hint is a class. `isinstance(hint, type)` is true for ``tuple[int, int]`` too in Python 3.10."""
    return isinstance(hint, type) and get_origin(hint) is None


def flat_keys(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """All dotted names of a settings class, e.g. ``data.root``."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if is_class(field.annotation) and issubclass(field.annotation, BaseModel):
            keys.extend(flat_keys(field.annotation, prefix + name + "."))
    return keys


def _values(name_or_path: str, seen: tuple[str, ...] = ()) -> tuple[dict[str, Any], str]:
    here = name_or_path if name_or_path in names() else str(Path(name_or_path).expanduser().resolve())
    if here in seen:
        raise UserError(f"recipe {name_or_path}: its `base` refers back to itself ({' -> '.join(seen)})")
    if name_or_path in names():
        text = (resources.files("worldsize") / "recipes" / f"{name_or_path}.yaml").read_text("utf-8")
        where = f"recipe {name_or_path}"
    else:
        text, where = _read_file(name_or_path), name_or_path
    values = parse(text, where)
    if not isinstance(values, dict):
        what = "nothing" if values is None else type(values).__name__
        raise UserError(f"{where} contains {what}, not settings: write `key: value` lines")
    base = values.pop("base", None)
    if base is None:
        return values, where
    sibling = Path(name_or_path).parent / str(base)
    origin = str(sibling) if str(base) not in names() and sibling.is_file() else str(base)
    return merge(_values(origin, (*seen, here))[0], values), where


def _read_file(path: str) -> str:
    if Path(path).suffix in (".yaml", ".yml") or Path(path).is_file():
        try:
            return Path(path).expanduser().read_text("utf-8")
        except OSError as error:
            raise of_system(f"cannot read the recipe {path}: {error.strerror}", error) from None
        except UnicodeDecodeError:
            raise UserError(f"the recipe {path} is not a text file") from None
    if (Path(path).expanduser() / "recipe.yaml").is_file():
        continued, recipe = quoted(path), quoted(Path(path) / "recipe.yaml")
        raise UserError(
            f"{path} is a run, not a recipe: continue it with --resume {continued}, or pass its recipe, {recipe}"
        )
    hint = did_you_mean(path, names()) or "."
    raise UserError(f"no recipe is called {path!r}{hint} Pass one of {', '.join(names())}, or a YAML file.")


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``changes``; a section keeps the settings that ``changes`` does not list."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
