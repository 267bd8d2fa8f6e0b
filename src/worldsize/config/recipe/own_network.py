"""A network of the user's own: ``--model.name FILE.py:FUNCTION``. The recipe takes the code in, so that the run is complete.

The name becomes ``FILE.py:FUNCTION#DIGEST``, and ``model.source`` the text of the file: pods and other machines need no
file, and a change of the code is a change of the recipe. Nothing here executes the code.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path
from typing import Any

_NAME = re.compile(r"(?P<file>.+\.py):(?P<function>\w+)(#(?P<digest>[0-9a-f]{12}))?")
_MISNAMED = re.compile(r".+\.py(:.*)?")


def is_own(name: object) -> bool:
    """Whether the value of ``model.name`` names a file of Python."""
    return isinstance(name, str) and _MISNAMED.fullmatch(name) is not None


def function(name: str) -> str:
    """The function that builds the network."""
    return _parts(name)["function"]


def settings(name: str, source: str | None) -> dict[str, Any]:
    """``name`` and ``source`` as the recipe keeps them; reads the file unless they are already.

    Raises:
        ValueError: there is no such file, it is no Python, or has no such function.
    """
    parts = _parts(name)
    if parts["digest"] is None:
        source = _read(parts["file"])
    elif source is None or digest(source) != parts["digest"]:
        raise ValueError(f"{name}: model.source is other code than this name stands for; leave out #{parts['digest']}")
    _check(parts["file"], parts["function"], source)
    return {"name": f"{parts['file']}:{parts['function']}#{digest(source)}", "source": source}


def digest(source: str) -> str:
    """12 hexadecimal digits of the code's SHA-256: enough to notice a change, not to decide what to trust."""
    return fingerprint(source)[:12]


def fingerprint(source: str) -> str:
    """The code's SHA-256. Two programs with the same 12 digits are found within minutes."""
    return hashlib.sha256(source.encode()).hexdigest()


def _parts(name: str) -> dict[str, Any]:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name}: name the function that builds the network: {name.partition(':')[0]}:build")
    return found.groupdict()


def _read(file: str) -> str:
    path = Path(file).expanduser()
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path.absolute()}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.absolute()} is not UTF-8 text") from None


def _check(file: str, name: str, source: str) -> None:
    try:
        tree = ast.parse(source, file)
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = getattr(error, "lineno", None)
        raise ValueError(f"{file}{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}") from None
    functions = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if name not in functions:
        has = f"; it has {', '.join(functions)}" if functions else ""
        raise ValueError(f"{file} has no function {name!r}{has}. Define build(classes), which returns the network")
