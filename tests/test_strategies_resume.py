"""Strategies whose ranks keep something for themselves go on with it; what they cannot do is refused early."""

from __future__ import annotations

import importlib.util
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from processes import Ranks, identical, losses, momentum, newest, ranks_own, records, weights
from test_resume import SETTINGS, STEPS, same_run, start_until

SMALL = (*SETTINGS, "--global-batch", "48", "--micro-batch", "12")
ADASUM = ("--parallel.strategy", "adasum")
LOCAL = ("--parallel.strategy", "localsgd", "--parallel.local-steps", "4")
POWERSGD = ("--parallel.compression", "powersgd", "--parallel.powersgd-start", "3", "--parallel.bucket-mb", "0.2")
ADAMW = ("--optimizer.name", "adamw", "--optimizer.lr", "1e-4")


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(name, *arguments): two processes train with small batches; gives the run folder."""

    def run(name: str, *arguments: str) -> Path:
        if not (ranks.cwd / "runs" / name).exists():
            ranks(2).run("train", "digits", *SMALL, "--name", name, *arguments)
        return ranks.cwd / "runs" / name

    return run


@pytest.fixture(scope="module")
def fresh(ranks) -> Ranks:
    """Two processes that have seen nothing of the runs that they go on with."""
    return ranks(2, local_size=2)


# Each with what must lie in the checkpoint for every rank of it.
@pytest.mark.parametrize(
    ("name", "arguments", "kept"),
    [
        ("adasum", ADASUM, "momentum_buffer/fc.weight"),
        ("local", LOCAL, "weight/fc.weight"),
        (
            "local-later",
            (*LOCAL, *ADAMW, "--parallel.local-after", "0.12", "--parallel.average-momentum"),
            "weight/fc.weight",
        ),
        ("powersgd", POWERSGD, "powersgd.error.fc.weight"),
    ],
)
def test_a_resumed_run_is_the_unbroken_one_bit_by_bit(runs, fresh, name, arguments, kept):
    whole, part = runs(f"{name}-whole", *arguments, "--max-steps", "12"), runs(name, *arguments, "--max-steps", "6")
    assert newest(part).name == "step-00000006"
    own = ranks_own(part)
    # What ranks keep is not the same, so that going on with another one's would be noticed.
    assert not torch.equal(own[f"0/strategy/{kept}"], own[f"1/strategy/{kept}"])
    fresh.run("train", "--resume", part, "--max-steps", "12")
    assert losses(part) == losses(whole)
    assert identical(weights(part), weights(whole))
    assert identical(momentum(part), momentum(whole))
    assert identical(ranks_own(part), ranks_own(whole))


STRATEGIES = [("adasum", ADASUM), ("local", LOCAL), ("powersgd", POWERSGD)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), STRATEGIES)
def test_another_number_of_processes_is_refused_unless_allowed(runs, ranks, tmp_path, name, arguments):
    run = shutil.copytree(runs(f"{name}-whole", *arguments, "--max-steps", "12"), tmp_path / name)
    refused = ranks(4).run("train", "--resume", run, "--max-steps", "13", code=64)
    assert "parallel.processes: was 2, is 4" in refused
    assert "--allow-changes" in refused
    assert newest(run).name == "step-00000012"
    if name == "adasum":
        ranks(4).run("train", "--resume", run, "--max-steps", "13", "--allow-changes")
        assert len(losses(run)) == 13


@pytest.mark.slow
def test_synchronous_steps_do_not_begin_again_in_another_world(runs, ranks, tmp_path):
    """Four of them, then those of each rank alone: after six, the seventh sends nothing and the eighth is a mean."""
    later = (*LOCAL, "--parallel.local-after", "0.45")
    run = shutil.copytree(runs("later", *later, "--max-steps", "6"), tmp_path / "later")
    ranks(4).run("train", "--resume", run, "--max-steps", "8", "--allow-changes")
    sent = [record["sent_bytes"] for record in records(run, "step")]
    assert [count > 0 for count in sent] == [True] * 4 + [False, False, False, True]


def test_an_exact_run_goes_on_with_an_exact_strategy_only(runs, ranks):
    run = runs("ddp", "--parallel.strategy", "ddp", "--max-steps", "3")
    for name, arguments in STRATEGIES:
        refused = ranks(2).run("train", "--resume", run, *arguments, "--max-steps", "4", code=64)
        assert f"parallel.strategy: was None, is {'ddp' if name == 'powersgd' else arguments[1]}" in refused
    ranks(1).run("train", "--resume", run, "--parallel.strategy", "single", "--max-steps", "4")
    assert len(losses(run)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), STRATEGIES)
def test_sigterm_loses_no_step_and_no_bit(runs, ranks, tmp_path, name, arguments):
    process = start_until(tmp_path, "a", 2, random.Random(name).randint(4, STEPS - 4), *arguments)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output
    run = tmp_path / "runs" / "a"
    assert newest(run).name == f"step-{len(losses(run)):08d}"
    ranks(2).run("train", "--resume", run)
    same_run(run, runs(f"{name}-to-the-end", *SETTINGS, *arguments))


def strategy(name: str, *more: str) -> list[str]:
    return ["--parallel.strategy", name, *more]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (strategy("adasum", "--procs", "3"), "3 is not a power of two. Use --procs 2 or 4"),
        (strategy("adasum"), "add --procs 2 (or more)"),
        (strategy("localsgd"), "add --procs 2 (or more)"),
        (strategy("single", "--procs", "2"), "use --parallel.strategy ddp, or --procs 1"),
        (strategy("dataparallel", "--procs", "2"), "use --parallel.strategy ddp, or --procs 1"),
        (strategy("dataparallel", "--device", "cpu"), "--parallel.strategy ddp with --procs 2 does the same"),
        (strategy("async", "--procs", "3", "--parallel.max-staleness", "1"), "allow at least 2"),
        (
            strategy("single", "--parallel.compression", "fp16"),
            "use --parallel.strategy ddp or horovod, or leave it at none",
        ),
        (
            strategy("ddp", "--procs", "2", "--parallel.local-steps", "4"),
            "use --parallel.strategy localsgd, or leave it at 8",
        ),
        (strategy("adasum", "--procs", "2", "--parallel.op", "adasum"), "use --parallel.strategy horovod, or leave it at"),
        (
            strategy("adasum", "--procs", "2", "--parallel.predivide", "2"),
            "use --parallel.strategy ddp or horovod, or leave it at None",
        ),
        (strategy("horovod", "--procs", "2", "--parallel.compression", "powersgd"), "use --parallel.compression fp16"),
        (strategy("rings"), "--parallel.strategy"),
        (["--parallel.compression", "zip"], "--parallel.compression"),
        (["--parallel.compression", "fp16", "--procs", "1"], "add --procs 2 (or more), or leave them out"),
        (["--parallel.compression", "powersgd", "--procs", "2", "--precision", "fp16"], "use --precision bf16 or fp32"),
        (["--parallel.compression", "powersgd", "--parallel.powersgd-start", "1"], "greater than or equal to 2"),
        (["--parallel.sync-batchnorm", "--procs", "2", "--device", "cpu"], "leave it out"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(fails, arguments, expected):
    # --max-steps: what is not refused should end soon.
    message = fails("train", "digits", "--max-steps", "1", *arguments).replace("│", " ")  # what frames it
    assert expected in " ".join(message.split())


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
@pytest.mark.parametrize("procs", ["1", "2"])
def test_a_missing_horovod_names_what_builds_it(fails, procs):
    assert "`make horovod`" in fails("train", "digits", *strategy("horovod", "--procs", procs))
