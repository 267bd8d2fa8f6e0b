"""Which networks in runs and checkpoints may run: code from others is executed only if the user says so.

A user trusts what they have trained: `worldsize train` notes the SHA-256 of the network that it is given. Any other one
must be in the environment variable WORLDSIZE_TRUST_CODE.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from worldsize.config.recipe import Recipe, own_network
from worldsize.errors import UserError

VARIABLE = "WORLDSIZE_TRUST_CODE"
_trusted: set[str] = set()  # of this process, where the file cannot be written


def trust(recipe: Recipe) -> None:
    """The user has named this recipe's network to train it."""
    if recipe.model.source is None:
        return
    digest = own_network.fingerprint(recipe.model.source)
    if _is_trusted(digest):  # perhaps for this command only
        return
    _trusted.add(digest)
    with suppress(OSError, RuntimeError):  # no home, or a read-only one
        _file().parent.mkdir(parents=True, exist_ok=True)
        with open(_file(), "a") as file:
            file.write(f"{digest}\n")


def check(recipe: Recipe) -> None:
    """Refuse a network of code that this user has not trained.

    Raises:
        UserError: says where to read the code, and how to let it run.
    """
    if recipe.model.source is None:
        return
    digest = own_network.fingerprint(recipe.model.source)
    if not _is_trusted(digest):
        raise UserError(
            f"the network {recipe.model.name} is Python code inside this run, and you have not trained it on this machine. "
            f"Read it (model.source in recipe.yaml); if you trust it, set {VARIABLE}={digest}"
        )


def _is_trusted(digest: str) -> bool:
    if digest in _trusted or digest in os.environ.get(VARIABLE, "").split(","):
        return True
    with suppress(OSError, RuntimeError):
        return digest in _noted()
    return False


def _noted() -> list[str]:
    return _file().read_text().split() if _file().exists() else []


def _file() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "worldsize" / "trusted-code"
