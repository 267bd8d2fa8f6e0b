"""The house itself: which way imports go, how long files are, what the reference says."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "worldsize"

# From the ground up: a module may import from its own line and those above it.
FLOORS = [
    ("errors", "signals"),
    ("recipe", "clock", "place"),
    ("catalog", "batch", "schedule", "world", "run"),
    ("arguments", "data"),
    ("launch",),
    ("cli_cluster", "cli_data"),
    ("model", "precision", "track"),
    ("optim",),
    ("parallel",),
    ("checkpoint", "evaluate", "request", "control", "environment"),
    ("meter", "progress", "state"),
    ("saver", "compute"),
    ("loop", "worker"),
    ("train", "asynchronous"),
    ("job",),
    ("recheck", "bench"),
    ("cli",),
    ("__main__",),
]
FLOOR = {name: level for level, names in enumerate(FLOORS) for name in names}


def imports(path: Path) -> set[str]:
    """The rooms of worldsize that a module imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "worldsize":
            found |= {alias.name for alias in node.names if alias.name in FLOOR}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("worldsize."):
            found.add(str(node.module).split(".")[1])
    return found


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    modules = [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]
    assert len(modules) > 40
    upward = [
        f"{path.relative_to(SOURCE)} imports {other}"
        for path in modules
        for other in imports(path)
        if FLOOR[other] > FLOOR[room(path)]
    ]
    assert upward == []


def test_what_only_one_room_may_import():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert ("import wandb" in text) == (path == SOURCE / "track" / "wandb.py")
        assert ("import horovod.torch" in text) == (path.name in ("horovod.py", "horovod_build.py"))
        assert ("import kubernetes" in text) == (path == SOURCE / "launch" / "cluster.py")


def test_files_can_be_read_in_one_sitting():
    lengths = {path.name: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert lengths["train.py"] <= 250
    assert max(lengths.values()) <= 400


def test_the_reference_is_up_to_date():
    docs = SOURCE.parent.parent / "docs"
    assert (docs / "recipe.md").read_text() == runpy.run_path(str(docs / "make_recipe_reference.py"))["reference"]()
