"""docs/guarantees.md and docs/reliability.md: the tests that they name exist, and the suites that they state run them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from paths import ROOT

PAGES = [ROOT / "docs" / name for name in ("guarantees.md", "reliability.md")]
FULL = {"slow", "slurm", "hosts", "cluster"}  # marks of tests that only the full suite runs


def rows() -> list[tuple[str, str, str]]:
    """(guarantee or fault, suite, tests) of each row."""
    text = "\n".join(page.read_text() for page in PAGES)
    return re.findall(r"^\| (.+) \| ([^|]+) \| ([^|]*`tests/[^|]+) \|$", text, re.MULTILINE)


def named(tests: str) -> Iterator[tuple[ModuleType, FunctionType]]:
    """The functions behind ```test_a` in `tests/test_b.py```; without a function, all tests of the file."""
    for function, file in re.findall(r"(?:`(test_\w+)(?:\[\w+\])?` in )?`(tests/[\w/]+\.py)`", tests):
        module = load(ROOT / file)
        names = [function] if function else [name for name in vars(module) if name.startswith("test_")]
        yield from ((module, getattr(module, name)) for name in names)


def load(path: Path) -> ModuleType:
    """The module of a test file, as pytest imports it."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def suites(module: ModuleType, function: FunctionType) -> set[str]:
    """The suites that run this test: both, if only some of its parameters are slow."""
    own = getattr(module, "pytestmark", [])
    marks = [*(own if isinstance(own, list) else [own]), *getattr(function, "pytestmark", [])]
    if FULL & {mark.name for mark in marks}:
        return {"full"}
    found = {"gate"}
    for mark in (mark for mark in marks if mark.name == "parametrize"):
        slow = [FULL & {m.name for m in getattr(value, "marks", ())} != set() for value in mark.args[1]]
        found = {"full"} if slow and all(slow) else found | ({"full"} if any(slow) else set())
    return found


@pytest.mark.parametrize(("guarantee", "suite", "tests"), rows())
def test_the_stated_suite_runs_the_tests(guarantee, suite, tests):
    functions = list(named(tests))
    assert functions, "names no test"
    ran = set().union(*(suites(module, function) for module, function in functions))
    assert suite == " and ".join(sorted(ran, reverse=True))
