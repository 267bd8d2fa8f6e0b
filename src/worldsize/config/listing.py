"""``worldsize recipes``: list the recipes, print one, compare two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from worldsize.config import recipe_files
from worldsize.config.command_line import asks_help, value_of, without
from worldsize.config.recipe import Recipe
from worldsize.config.wording import count
from worldsize.errors import UserError

_USAGE = """usage: worldsize recipes [NAME [--against OTHER]]
       worldsize recipes import FILE [--world-size N]

Lists the recipes by dataset, with the top-1 accuracy that their source reports.
With NAME (or a YAML file), prints its YAML with every setting; with --against, the settings that differ.

import converts the args.yaml of a timm run, or a YAML file of ffcv-imagenet, and prints the recipe; redirect it to a file.
What has no equivalent here is listed. --world-size: on how many GPUs it ran, because these files have the batch per GPU.
If the recipe is not valid, it is printed nevertheless, import says what to change in it by hand, and the exit code is 64.
"""


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if asks_help(argv):
        print(_USAGE, end="")
        return 0
    if argv[:1] == ["import"]:
        return _import(argv[1:])
    other, names = value_of("--against", argv), without("--against", argv)
    if len(names) > 1 or any(name.startswith("-") for name in names) or (other is not None and not names):
        raise UserError(f"unexpected arguments: {' '.join(argv)}\n{_USAGE.rstrip()}")
    if other is not None:
        _compare(names[0], other)
    elif names:
        print(recipe_files.to_yaml(recipe_files.load(names[0])), end="")
    else:
        _list()
    return 0


def _list() -> None:

    from worldsize.config import tables

    table = tables.table("recipe", "epochs", "top-1 of source", "what it trains")
    recipes = [(name, recipe_files.load(name)) for name in recipe_files.names()]
    for dataset in sorted({recipe.data.name for _, recipe in recipes}):
        table.add_row(f"\n[bold]{dataset}[/]", "", "")
        for name, recipe in recipes:
            if recipe.data.name == dataset:
                claim = "" if recipe.claimed_top1 is None else f"{recipe.claimed_top1:.2f} %"
                table.add_row(name, str(recipe.epochs), claim, _summary(recipe))
    tables.console().print(table)
    print("\nworldsize recipes NAME prints a recipe, NAME --against OTHER what differs; worldsize train NAME trains it.")


def _summary(recipe: Recipe) -> str:
    about = recipe.about.split(". ")[0].rstrip(".")
    return f"{about}; [green]reproduced: {recipe.reproduced}[/]" if recipe.reproduced else about


def _import(argv: list[str]) -> int:
    from worldsize.config.importing.convert import convert

    size, files = value_of("--world-size", argv), without("--world-size", argv)
    if len(files) != 1 or files[0].startswith("-"):
        raise UserError(f"worldsize recipes import needs one file\n{_USAGE.rstrip()}")
    if size is not None and not (size.isdigit() and int(size)):
        raise UserError(f"--world-size {size}: pass the number of GPUs, at least 1")
    path = Path(files[0])
    conversion = convert(path, None if size is None else int(size))
    given = {key: " ".join(str(value).splitlines()) for key, value in conversion.given.items()}
    lines = [f"  {key}: {given[key]}  ({why})" for key, why in conversion.left.items()]
    faults = conversion.faults()
    about = {"about": f"Converted from {path.name}.", "source": str(path)}
    print(f"# Converted from {path} for {count(conversion.world_size, 'GPU')}.")
    if lines:
        print("\n".join(["# Not converted:", *(f"#{line}" for line in lines)]))
        print("\n".join(["not converted:", *lines]), file=sys.stderr)
    if faults:
        print("\n".join(["# No valid recipe until this is changed:", *(f"#{line}" for line in faults)]))
    print(yaml.safe_dump(about | conversion.nested(), sort_keys=False, allow_unicode=True, width=100), end="")
    if faults:
        changes = "\n".join(faults)
        raise UserError(
            f"the printed recipe is not valid until you change it by hand:\n{changes}\n"
            "worldsize recipes FILE checks it; it reports some faults only after others are corrected"
        )
    return 0


def _compare(name: str, other: str) -> None:
    from rich.text import Text

    from worldsize.config import tables

    ours, theirs = (flat(recipe_files.load(which).model_dump(mode="json")) for which in (name, other))
    table = tables.table("setting", name, other)
    for setting in ours:
        if ours[setting] != theirs[setting] and setting not in PROSE:
            table.add_row(setting, Text(shown(ours[setting])), Text(shown(theirs[setting])))
    if table.row_count:
        tables.console().print(table)
    else:
        print(f"{name} and {other} have the same settings.")


# Texts, which a comparison leaves out; the name of a user's own network has the digest of its code.
PROSE = {"about", "claimed_top1", "reaches", "source", "differs", "reproduced", "model.source"}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dictionary with dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(shown, value)) or "none"
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)
