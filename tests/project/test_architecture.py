"""Structure of the source: import directions, file lengths, and the generated reference."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

from paths import ROOT

SOURCE = ROOT / "src" / "worldsize"

# Layers from the bottom up: a module may import from its own line and the lines above it.
LAYERS = [
    ("errors",),
    ("config",),
    ("pages",),
    ("distributed",),
    ("launch",),
    ("watchdog",),
    ("runs",),
    ("checkpoint",),
    ("data",),
    ("models",),
    ("optim",),
    ("track",),
    ("parallel",),
    ("attribution",),
    ("training",),
    ("jobs",),
    ("cluster", "slurm", "hosts", "clouds"),
    ("initialize", "report"),
    ("inference",),
    ("reproduce",),
    ("tune",),
    ("bench",),
    ("plan",),
    ("api", "cli"),
    ("__main__",),
]
# The same within the packages that have many modules.
DATA_LAYERS = [
    (
        "broken_images",
        "complete_tar",
        "confusable_names",
        "file_contents",
        "progress_bar",
        "read_errors",
        "remote",
        "unused_files",
    ),
    ("sampling", "images"),
    ("augmentation", "samples", "fetch"),
    ("file_samples", "file_sizes", "shards"),
    ("datasets",),
    ("layouts", "loading", "survey"),
]
TRAINING_LAYERS = [
    ("rank_scaler",),
    (
        "average_precision",
        "cuda_graph",
        "device_usage",
        "early_signs",
        "lost_peers",
        "losses",
        "margins",
        "new_network",
        "precision",
        "process_usage",
        "provenance",
        "rank_decisions",
        "supervision",
    ),
    ("environment", "evaluation", "objective", "request"),
    ("lost_gradients",),
    ("compilation",),
    ("progress", "replicas", "resume", "state", "step_recorder"),
    ("ending", "gradients", "saver"),
    ("base_trainer", "out_of_memory", "step", "step_metrics", "unfreezing"),
    ("asynchronous", "forward_pass", "trainer"),
    ("build",),
]
# Only `api` accesses an API server.
CLUSTER_LAYERS = [
    ("objects", "in_pod", "kinds"),
    ("manifests", "api"),
    ("options",),
    ("preflight", "storage", "image"),
    ("jobs",),
    ("commands",),
]


def imports(path: Path) -> set[str]:
    """The worldsize modules that a file imports, anywhere in it, such as ``cluster.jobs.manage``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "worldsize":
            package = str(node.module).partition(".")[2]
            found |= {f"{package}.{alias.name}".strip(".") for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("worldsize.")}
    return found


def modules() -> dict[str, Path]:
    """The path of each module by its dotted name within worldsize."""
    paths = (path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
    return {".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def upward_imports(layers: list[tuple[str, ...]], inside: str = "") -> list[str]:
    """Imports from a lower layer to a higher one, among the members of the package ``inside``."""
    level = {f"{inside}{name}": height for height, names in enumerate(layers) for name in names}

    def member(name: str) -> str:
        return inside + name.removeprefix(inside).split(".")[0]

    own = {name: path for name, path in modules().items() if name.startswith(inside)}
    assert {member(name) for name in own} == level.keys()
    return [
        f"{name} imports {other}"
        for name, path in own.items()
        for other in imports(path)
        if other.startswith(inside) and member(other) in level and level[member(other)] > level[member(name)]
    ]


def test_imports_never_go_to_a_higher_layer():
    assert upward_imports(LAYERS) == []
    assert upward_imports(DATA_LAYERS, "data.") == []
    assert upward_imports(TRAINING_LAYERS, "training.") == []
    assert upward_imports(CLUSTER_LAYERS, "cluster.") == []


def test_only_errors_and_the_entry_points_stand_outside_packages():
    assert {path.name for path in SOURCE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_every_package_says_what_it_is_for():
    for folder in {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_no_modules_import_each_other():
    known = modules()
    graph = {name: set() for name in known}
    for name, path in known.items():
        for other in imports(path):
            target = other if other in known else other.rpartition(".")[0]
            if target in known and target != name:
                graph[name].add(target)
    left = dict(graph)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


# What `cluster.manifests` may import: nothing that reads a file, a clock, the environment or a network.
PURE = (
    "__future__",
    "abc",
    "collections",
    "dataclasses",
    "fractions",
    "importlib",
    "pathlib",
    "re",
    "types",
    "typing",
    "yaml",
)


def test_manifests_are_pure():
    for path in (SOURCE / "cluster" / "manifests").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert {name.split(".")[0] for name in names} <= {*PURE, "worldsize"}, path
        allowed = (
            "cluster.manifests",
            "cluster.objects",
            "cluster.kinds",
            "config.job_pod",
            "errors",
            "launch.entry_point",
            "data.fetch",
            "jobs.spec",
            "jobs.state",
            "jobs.quantities",
        )
        assert all(other.startswith(allowed) for other in imports(path)), path


def test_launch_does_not_depend_on_kubernetes():
    for path in (SOURCE / "launch").glob("*.py"):
        assert not any(other.startswith("cluster") for other in imports(path)), path
        assert "kubernetes" not in path.read_text().lower(), path


def test_optional_packages_are_imported_in_one_place():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert ("import wandb" in text) == (path == SOURCE / "track" / "wandb.py")
        assert ("import horovod.torch" in text) == (
            path.parent == SOURCE / "parallel" / "horovod" and path.stem in ("strategy", "installed")
        )
        assert ("import altair" in text) == (path.parent.name in ("report", "details") and path.stem.endswith("charts"))
        assert ("import jinja2" in text) == (path == SOURCE / "pages" / "render.py")
        assert ("import onnx\n" in text) == (path == SOURCE / "inference" / "export" / "onnx_packages.py")
        assert ("import kubernetes" in text) == (path == SOURCE / "cluster" / "api" / "client.py")


def test_temporary_folders_are_removed_by_signals():
    users = [path for path in SOURCE.rglob("*.py") if "TemporaryDirectory(" in path.read_text()]
    assert users == [SOURCE / "distributed" / "stop_signals.py"], "use temporary_folder of this module"


def test_html_is_written_by_templates():
    for path in SOURCE.rglob("*.py"):
        assert not re.search(r"<!doctype|<html|<style>|<table|</\w+>", path.read_text(), re.I), path


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert lengths[SOURCE / "training" / "trainer.py"] <= 250
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_the_reference_is_up_to_date():
    docs = ROOT / "docs"
    made = runpy.run_path(str(docs / "make_recipe_reference.py"))
    assert (docs / "recipe.md").read_text() == made["reference"]()
    guide = (docs / "recipes.md").read_text()
    assert guide == made["guide"](guide)
    platform = (docs / "platform.md").read_text()
    assert platform == made["platform"](platform)
