"""The libraries that networks come from, by the prefix of ``--model.name``. Does not import them."""

from __future__ import annotations

from importlib.util import find_spec

from worldsize.config.recipe import own_network
from worldsize.errors import UserError

PREFIXES = ("", "timm", "worldsize")  # without a prefix: torchvision


def is_built_in(name: str) -> bool:
    """Whether the network is one of worldsize itself."""
    return name.startswith("worldsize:")


def check(setting: str, name: str) -> None:
    """Refuse a name with an unknown prefix, or of a library that is not installed.

    Args:
        setting: the setting that has the value ``name``, such as ``--model.name``.

    Raises:
        UserError: says what is known, or how to install it.
    """
    if own_network.is_own(name):
        return
    prefix = name.rpartition(":")[0]
    if prefix not in PREFIXES:
        known = ", ".join(f"{prefix}:" for prefix in PREFIXES if prefix)
        raise UserError(f"{setting} {name}: known prefixes are {known} and none for torchvision")
    if prefix == "timm" and find_spec("timm") is None:
        raise UserError(f"{setting} {name} needs timm: pip install 'worldsize[timm]'")
