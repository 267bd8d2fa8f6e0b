"""Writes docs/recipe.md from the recipe's own definition: ``python docs/make_recipe_reference.py``."""

from __future__ import annotations

import typing
from pathlib import Path

from pydantic import BaseModel

from worldsize.recipe import Recipe, Settings

HEAD = """# The recipe, setting by setting

Made by `python docs/make_recipe_reference.py` from `src/worldsize/recipe.py`; do not edit.

Write them as YAML (`data:` then `root: ...`) or on the command line (`--data.root ...`). A file may begin with
`base: NAME` and state only what differs from that recipe. Settings marked * say where and how a run happens; all others
make up its identity and must not change when it goes on. A strategy whose numbers are its own belongs to the identity
too, with the settings that it reads ([strategies.md](strategies.md)).
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_section(Recipe, "", "The run")])


def _section(model: type[BaseModel], prefix: str, title: str) -> list[str]:
    lines = [f"## {title}", "", "| setting | default | what it is |", "| --- | --- | --- |"]
    below: list[str] = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            below += ["", *_section(field.annotation, f"{name}.", f"`{name}`: {_first_line(field.annotation)}")]
            continue
        extra = field.json_schema_extra
        star = "*" if isinstance(extra, dict) and extra.get("operational") else ""
        choices = _choices(field.annotation)
        what = f"{field.description or ''}{f' ({choices})' if choices else ''}"
        lines.append(f"| `{prefix}{name}`{star} | {_default(field.default)} | {what} |")
    return lines + below


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0].rstrip(".").lower()


def _choices(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(str(a) for a in typing.get_args(annotation))
    return ""


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in value) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else ""


if __name__ == "__main__":
    (Path(__file__).parent / "recipe.md").write_text(reference())
