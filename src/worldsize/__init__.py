"""Train image classifiers at any world size: one command, the same results.

What is offered here is documented in docs/python.md, and changes only with a new major version.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing takes long to import, before `__main__` decides what Ctrl-C does
if TYPE_CHECKING:
    from typing import Any

    from worldsize.api.run import Run
    from worldsize.api.training import load_recipe, resume, train
    from worldsize.config.recipe import Recipe
    from worldsize.inference.predict.model import Model, load

__all__ = ["Model", "Recipe", "Run", "__version__", "load", "load_recipe", "resume", "train"]
__version__ = "0.1.0"

_MODULES = {
    "Model": "inference.predict.model",
    "Recipe": "config.recipe",
    "Run": "api.run",
    "load": "inference.predict.model",
    "load_recipe": "api.training",
    "resume": "api.training",
    "train": "api.training",
}


def __dir__() -> list[str]:
    """The names for completion, before they are imported."""
    return __all__


def __getattr__(name: str) -> Any:
    """What `__all__` lists, imported when it is used: the command line needs little of it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"worldsize.{_MODULES[name]}"), name)
