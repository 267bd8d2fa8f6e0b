"""Train image classifiers at any world size: one command, the same results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldsize.inference.predict.model import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`worldsize.load`, without importing torch before it is used."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from worldsize.inference.predict.model import load

    return load
