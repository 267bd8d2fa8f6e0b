"""The strategy `horovod` with the real Horovod: the same numbers as `single` and `adasum`, and clear error messages.

The first half needs no Horovod. The rest requires `make horovod` (as in CI) and is skipped otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from paths import SMALL_NETWORK
from processes import distance, environment, identical, losses, momentum, overall_distance, weights, worldsize
from worldsize.config.recipe import Optimizer, Parallel, Recipe
from worldsize.distributed.rank import RankInfo, local_rank_info
from worldsize.errors import UserError
from worldsize.parallel.horovod import installed
from worldsize.parallel.horovod.installed import Build

RECIPE = """
base: digits
epochs: 2
max_steps: 12
global_batch: 24
micro_batch: 6
precision: fp64
data: {flip: true, max_broken: 0}
model: {name: mobilenet_v3_small}
optimizer: {lr: 0.0005, lr_reference_batch: 24}
schedule: {warmup_epochs: 0.5}
"""


HERE = importlib.util.find_spec("horovod") is not None
HOROVOD = ("--parallel.strategy", "horovod")
ADAMW = ("--optimizer.name", "adamw")
OTHERS = sorted(set(get_args(Optimizer.model_fields["name"].annotation)) - {"sgd", "adamw"})


def mpi(size: int, hosts: int = 1) -> RankInfo:
    return RankInfo("Open MPI", 0, size, 0, size // hosts, ("127.0.0.1", 1))


def adasum(**settings) -> Recipe:
    return Recipe(parallel=Parallel(strategy="horovod", op="adasum"), **settings)


@pytest.mark.parametrize(
    ("recipe", "rank_info", "build", "expected"),
    [
        (adasum(), local_rank_info(2), Build("0", True, True, False), "mpirun -np 2"),
        (adasum(), mpi(3), Build("0", True, True, False), "not a power of two"),
        (adasum(), mpi(2), Build("0", True, True, True), "averages inside a machine"),
        (adasum(optimizer=Optimizer(clip_norm=1.0)), mpi(2), Build("0", True, True, False), "clip-norm"),
        (adasum(precision="fp16"), mpi(2), Build("0", True, True, False), "--precision bf16"),
        (
            Recipe(parallel=Parallel(strategy="horovod", op="adasum", predivide=2)),
            mpi(2),
            Build("0", True, True, False),
            "predivide",
        ),
        (Recipe(parallel=Parallel(strategy="horovod")), mpi(2), Build("0", False, True, False), "built with MPI"),
        (
            Recipe(parallel=Parallel(strategy="horovod")),
            local_rank_info(2),
            Build("0", True, False, False),
            "built with Gloo",
        ),
        (
            Recipe(parallel=Parallel(strategy="horovod")),
            RankInfo("torchrun", 0, 4, 0, 2, ("a", 1)),
            Build("0", True, True, False),
            "horovodrun or mpirun",
        ),
    ],
)
def test_what_horovod_cannot_do_is_refused_early(monkeypatch, recipe, rank_info, build, expected):
    monkeypatch.setattr(installed, "find", lambda: build)
    with pytest.raises(UserError, match=expected):
        installed.check(recipe, rank_info)


def test_what_horovod_can_do_is_accepted(monkeypatch):
    monkeypatch.setattr(installed, "find", lambda: Build("0", True, True, True))
    installed.check(Recipe(parallel=Parallel(strategy="horovod")), local_rank_info(2))
    installed.check(adasum(), mpi(4, hosts=2))  # NCCL within a machine, Adasum between machines
    installed.check(adasum(device="cpu"), mpi(4))


def test_a_host_name_that_does_not_resolve(monkeypatch):
    def unknown(*_):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(installed, "find", lambda: Build("0", True, True, False))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    rank_info = RankInfo("horovodrun", 0, 2, 0, 2, ("127.0.0.1", 1))
    with pytest.raises(UserError, match="/etc/hosts"):
        installed.check(Recipe(parallel=Parallel(strategy="horovod")), rank_info)
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")  # Gloo then does not resolve the host name
    installed.check(Recipe(parallel=Parallel(strategy="horovod")), rank_info)


def test_a_horovod_for_another_torch(tmp_path):
    """Horovod's loader raises ImportError in this case; a fake package that raises it stands in."""
    package = tmp_path / "horovod"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.28.1'\n")
    (package / "torch.py").write_text("raise ImportError('compiled for torch 1.0')\n")
    done = worldsize(
        "train", "digits", "--procs", "2", "--parallel.strategy", "horovod", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    )
    assert done.returncode == 64
    assert "compiled for torch 1.0" in done.stderr
    assert "make horovod" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(HERE, reason="Horovod is installed")
def test_no_horovod(tmp_path):
    done = worldsize("train", "digits", "--procs", "2", *HOROVOD, cwd=tmp_path)
    assert done.returncode == 64
    assert "make horovod" in done.stderr
    assert not (tmp_path / "runs").exists()


needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="no Horovod: `make horovod` builds it"
)
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """runs(launcher, size, ...settings) trains once and returns the run folder."""
    cwd = tmp_path_factory.mktemp("horovod")
    (cwd / "r.yaml").write_text(RECIPE)

    def run(launcher: str, size: int, *settings: str) -> Path:
        name = "-".join([launcher, str(size), *settings]).replace("--", "").replace(SMALL_NETWORK, "small")
        if not (cwd / "runs" / name).exists():
            launch(launcher, size, "train", "r.yaml", "--name", name, *settings, cwd=cwd)
        return cwd / "runs" / name

    yield run
    shutil.rmtree(cwd / "runs", ignore_errors=True)


def launch(launcher: str, size: int, *arguments: str, cwd: Path) -> None:
    worldsize_command = [sys.executable, "-m", "worldsize", *arguments]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = {
        "procs": [*worldsize_command, "--procs", str(size)],
        "mpirun": ["mpirun", "-np", str(size), *root, "--oversubscribe", "--bind-to", "none", *worldsize_command],
        "horovodrun": [str(Path(sys.executable).parent / "horovodrun"), "-np", str(size), "--gloo", *worldsize_command],
    }[launcher]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_horovod
@needs_mpirun
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun", "procs"])
def test_average_is_single(runs, launcher):
    """Each rank computes two micro-batches, so `backward_passes_per_step` is two."""
    distributed, single = runs(launcher, 2, *HOROVOD), runs("procs", 1)
    assert losses(distributed) == pytest.approx(losses(single), rel=1e-6)
    assert distance(weights(distributed), weights(single)) < 1e-9
    assert distance(momentum(distributed), momentum(single)) < 1e-9


@needs_horovod
@needs_mpirun
@pytest.mark.parametrize("op", ["average", "adasum"])
@pytest.mark.parametrize("optimizer", OTHERS)
def test_every_optimizer_of_recipes_steps(runs, optimizer, op):
    words = ("--model.name", SMALL_NETWORK, "--optimizer.name", optimizer, "--optimizer.weight-decay", "0.1")
    words = (*words, "--max-steps", "4")
    distributed = runs("mpirun", 2, *HOROVOD, "--parallel.op", op, *words)
    expected = runs("procs", 2, "--parallel.strategy", "adasum", *words) if op == "adasum" else runs("procs", 1, *words)
    assert losses(distributed) == pytest.approx(losses(expected), rel=1e-6)
    assert distance(weights(distributed), weights(expected)) < 1e-7
    assert distance(momentum(distributed), momentum(expected)) < 1e-7


@needs_horovod
@needs_mpirun
def test_predivide_and_clipping_give_the_numbers_of_single(runs):
    clipped = ("--optimizer.clip-norm", "1.0")
    distributed = runs("mpirun", 2, *HOROVOD, *clipped, "--parallel.predivide", "2")
    assert distance(weights(distributed), weights(runs("procs", 1, *clipped))) < 1e-9


@needs_horovod
@needs_mpirun
def test_fp16_gradients_are_close(runs):
    # Later, rounding is amplified; in small networks at once.
    few = ("--max-steps", "3", "--model.name", "resnet18")
    compressed = runs("mpirun", 2, *HOROVOD, "--parallel.compression", "fp16", *few)
    assert 1e-9 < overall_distance(weights(compressed), weights(runs("procs", 1, *few))) < 1e-3


@needs_horovod
@needs_mpirun
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", [(), ADAMW])
def test_horovods_adasum_equals_ours(runs, size, optimizer):
    steps = ("--max-steps", "5") if size == 4 else ()  # four ranks on two cores are slow
    theirs = runs("mpirun", size, *HOROVOD, "--parallel.op", "adasum", *optimizer, *steps)
    ours = runs("procs", size, "--parallel.strategy", "adasum", *optimizer, *steps)
    # AdamW divides by sqrt(v) + 1e-8, which amplifies the processor-dependent rounding of vanishing gradients.
    tolerance = 1e-7 if optimizer else 1e-9
    assert distance(weights(theirs), weights(ours)) < tolerance
    assert distance(momentum(theirs), momentum(ours)) < tolerance


@needs_horovod
@needs_mpirun
@pytest.mark.parametrize("op", ["average", "adasum"])
def test_horovod_resumes_where_it_stopped(runs, op):
    expected = runs("mpirun", 2, *HOROVOD, "--parallel.op", op)
    half = runs("mpirun", 2, *HOROVOD, "--parallel.op", op, "--max-steps", "5")
    launch("mpirun", 2, "train", "--resume", str(half), "--max-steps", "12", cwd=half.parent.parent)
    if op == "average":
        assert identical(weights(half), weights(expected))
        assert losses(half) == losses(expected)
    # Horovod's Adasum splits a dot product depending on which tensors are ready at the same time.
    assert distance(weights(half), weights(expected)) < 1e-9
    assert distance(momentum(half), momentum(expected)) < 1e-9
