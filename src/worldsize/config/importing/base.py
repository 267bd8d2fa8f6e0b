"""A file of another trainer on its way to a recipe, and the usual ways to convert one of its keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError


@dataclass
class Conversion:
    """A file on its way to a recipe.

    ``settings`` are the recipe's, by dotted name; ``left`` says of each line that was not converted why.
    """

    given: Mapping[str, Any]
    world_size: int
    settings: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def recipe(self) -> Recipe:
        """The converted settings as a recipe.

        Raises:
            UserError: a value is out of range.
        """
        return recipe_files.validate(self.nested(), "the converted recipe")

    def faults(self) -> list[str]:
        """Why the settings are no valid recipe, a line for each fault, in terms of the recipe's file."""
        try:
            self.recipe()
        except UserError as error:
            _, *faults = str(error).splitlines()
            return [_of_file(fault) for fault in faults]
        return []

    def nested(self) -> dict[str, Any]:
        """The settings as nested values, as in YAML."""
        found: dict[str, Any] = {}
        for name, value in self.settings.items():
            *sections, last = name.split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = value
        return found


def _of_file(fault: str) -> str:
    """The fault with settings as a recipe's file has them, where it names options of a command line."""
    fault = re.sub(r"\b(pass|add) (?=--)", "set ", fault)
    return re.sub(r"--((?:[a-z]+\.)?)(no-)?([a-z]+(?:-[a-z]+)*)", _setting, fault)


def _setting(option: re.Match[str]) -> str:
    section, off, name = option.groups()
    return section + name.replace("-", "_") + (" to false" if off else "")


Convert = Callable[[Conversion, str, Any], None]


def ignore(conversion: Conversion, key: str, value: Any) -> None:
    """Where and how a run executes: not part of a recipe."""


def to(*names: str) -> Convert:
    """The value of these settings, unless it is None."""

    def apply(conversion: Conversion, key: str, value: Any) -> None:
        if value is not None:
            conversion.settings |= dict.fromkeys(names, value)

    return apply


def only(*supported: Any, because: str) -> Convert:
    """Nothing to convert as long as the value is one of these."""

    def apply(conversion: Conversion, key: str, value: Any) -> None:
        if value not in supported:
            conversion.left[key] = because

    return apply


def one_of(name: str, choices: Mapping[Any, Any]) -> Convert:
    def apply(conversion: Conversion, key: str, value: Any) -> None:
        if value not in choices:
            conversion.left[key] = f"supported: {', '.join(map(str, choices))}"
        elif choices[value] is not None:
            conversion.settings[name] = choices[value]

    return apply


def flag(name: str) -> Convert:
    def apply(conversion: Conversion, key: str, value: Any) -> None:
        if value:
            conversion.settings[name] = True

    return apply
