"""Python's search for garbage must not slow down the start of a process, or a step."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest

from paths import SMALL_NETWORK
from processes import environment
from worldsize.launch import garbage

# Runs a command and prints how many objects a full search now goes through, and how many are spared.
PROGRAM = """
import gc, json, sys
from worldsize import cli
code = cli.main(sys.argv[1:])
gc.collect()
print(json.dumps([code, gc.isenabled(), len(gc.get_objects()), gc.get_freeze_count()]))
"""


class Node:
    """Garbage that only a search finds, if it refers to itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("more", [(), pytest.param(("--model.compile",), marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_training_searches_few_of_the_objects_of_its_start(tmp_path, more):
    arguments = ["train", "digits", "--model.name", SMALL_NETWORK, "--stop-after", "2", *more]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    code, enabled, searched, spared = json.loads(done.stdout.splitlines()[-1])
    assert (code, enabled) == (75, True), done.stderr
    assert spared > 20 * searched, (spared, searched)


def test_objects_are_spared_where_modules_were_imported(tmp_path, monkeypatch):
    (tmp_path / "spared_module.py").write_text("values = [[] for _ in range(100)]")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    with garbage.not_sought():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() <= before
    with garbage.not_sought():
        import spared_module
    assert len(spared_module.values) == 100
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 100


def test_what_was_spared_is_freed_when_it_is_garbage_before_the_next_time():
    node = Node()
    alive = weakref.ref(node)
    garbage.spare_existing()
    del node
    gc.collect()
    assert alive() is not None
    garbage.spare_existing()
    assert alive() is None
    assert gc.get_freeze_count() > 100_000


@pytest.mark.parametrize("loaded", [True, False])
def test_objects_of_triton_are_freed_at_the_exit(loaded):
    """Its bindings print those that are left."""
    program = """
import atexit, gc, sys, types
atexit.register(lambda: print(gc.get_freeze_count()))  # runs last
from worldsize.launch import garbage
with garbage.not_sought():
    import wave
sys.modules |= {name: types.ModuleType(name) for name in sys.argv[1:]}
"""
    command = [sys.executable, "-c", program, *(["triton"] if loaded else [])]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert (int(done.stdout) == 0) == loaded, done.stdout
