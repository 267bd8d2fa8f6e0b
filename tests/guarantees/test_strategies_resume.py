"""Strategies with state per rank resume with that state; unsupported combinations are refused early."""

from __future__ import annotations

import importlib.util
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch

from interruptions import SETTINGS, STEPS, same_run, start_until
from paths import SMALL_NETWORK
from processes import Ranks, identical, losses, momentum, newest, ranks_own, records, weights

SMALL = (*SETTINGS, "--model.name", SMALL_NETWORK, "--data.samples", "432", "--global-batch", "48", "--micro-batch", "12")
ADASUM = ("--parallel.strategy", "adasum")
LOCAL = ("--parallel.strategy", "localsgd", "--parallel.local-steps", "4")
POWERSGD = ("--parallel.compression", "powersgd", "--parallel.powersgd-start", "3", "--parallel.bucket-mb", "0.2")
ADAMW = ("--optimizer.name", "adamw", "--optimizer.lr", "1e-4")


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(name, *arguments): trains with two processes and small batches; returns the run folder."""

    def run(name: str, *arguments: str) -> Path:
        if not (ranks.cwd / "runs" / name).exists():
            ranks(2).run("train", "digits", *SMALL, "--name", name, *arguments)
        return ranks.cwd / "runs" / name

    return run


@pytest.fixture(scope="module")
def fresh(ranks) -> Ranks:
    """Two processes that did not take part in the runs that they resume."""
    return ranks(2, local_size=2)


# `kept` is a tensor that the checkpoint must contain for each rank.
@pytest.mark.parametrize(
    ("name", "arguments", "kept"),
    [
        ("adasum", ADASUM, "momentum_buffer/fc.weight"),
        pytest.param("local", LOCAL, "weight/fc.weight", marks=pytest.mark.slow),
        pytest.param(
            "local-later",
            (*LOCAL, *ADAMW, "--parallel.local-after", "0.12", "--parallel.average-momentum"),
            "weight/fc.weight",
            marks=pytest.mark.slow,
        ),
        ("powersgd", POWERSGD, "powersgd.error.layer3.conv1.weight"),
    ],
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(runs, fresh, name, arguments, kept):
    expected, part = runs(f"{name}-expected", *arguments, "--max-steps", "12"), runs(name, *arguments, "--max-steps", "6")
    assert newest(part).name == "step-00000006"
    own = ranks_own(part)
    # The state differs between ranks, so resuming with another rank's state would be detected.
    assert not torch.equal(own[f"0/strategy/{kept}"], own[f"1/strategy/{kept}"])
    fresh.run("train", "--resume", part, "--max-steps", "12")
    assert losses(part) == losses(expected)
    assert identical(weights(part), weights(expected))
    assert identical(momentum(part), momentum(expected))
    assert identical(ranks_own(part), ranks_own(expected))


@pytest.mark.parametrize(("name", "arguments"), [("adasum", ADASUM), ("local", LOCAL)])
def test_another_optimizer_begins_with_a_fresh_state(runs, fresh, name, arguments):
    run = runs(f"{name}-other", *arguments, "--max-steps", "6")
    fresh.run("train", "--resume", run, *ADAMW, "--max-steps", "7", "--allow-changes")
    assert {float(steps) for key, steps in ranks_own(run).items() if "/step/" in key} == {1.0}
    assert not [key for key in ranks_own(run) if "momentum_buffer" in key]


@pytest.mark.parametrize(("name", "before", "after"), [("adasum", ADASUM, LOCAL[:2]), ("local", LOCAL[:2], ADASUM)])
def test_another_strategy_begins_with_the_optimizer_of_rank_0(runs, fresh, name, before, after):
    run = runs(f"{name}-first", *before, *ADAMW, "--max-steps", "6")
    fresh.run("train", "--resume", run, *after, "--max-steps", "7", "--allow-changes")
    assert {float(steps) for key, steps in ranks_own(run).items() if "/step/" in key} == {7.0}


def test_another_rank_of_powersgd_counts_from_the_next_step(runs, fresh):
    run = runs("powersgd-narrower", *POWERSGD, "--max-steps", "4")
    fresh.run("train", "--resume", run, "--parallel.powersgd-rank", "1", "--max-steps", "5", "--allow-changes")
    assert {q.shape[1] for key, q in ranks_own(run).items() if ".q." in key} == {1}


def test_synchronous_steps_in_the_middle_of_a_round_leave_no_difference_between_ranks(runs, fresh):
    run = runs("local-ended", *LOCAL, "--max-steps", "6")
    assert [key for key in ranks_own(run) if "/weight/" in key]
    fresh.run("train", "--resume", run, "--parallel.local-after", "9", "--max-steps", "8", "--allow-changes")
    # Weight decay brings a difference between weights into the momentum.
    own = {key: tensor for key, tensor in ranks_own(run).items() if "momentum_buffer" in key}
    assert own and all(torch.equal(tensor, own[f"1{key[1:]}"]) for key, tensor in own.items())


STRATEGIES = [("adasum", ADASUM), ("local", LOCAL), ("powersgd", POWERSGD)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), STRATEGIES)
def test_another_number_of_processes_is_refused_unless_allowed(runs, ranks, tmp_path, name, arguments):
    run = shutil.copytree(runs(f"{name}-expected", *arguments, "--max-steps", "12"), tmp_path / name)
    refused = ranks(4).run("train", "--resume", run, "--max-steps", "13", code=64)
    assert "parallel.processes: was 2, is 4" in refused
    assert "--allow-changes" in refused
    assert newest(run).name == "step-00000012"
    if name == "adasum":
        ranks(4).run("train", "--resume", run, "--max-steps", "13", "--allow-changes")
        assert len(losses(run)) == 13


@pytest.mark.slow
def test_synchronous_steps_do_not_restart_at_another_world_size(runs, ranks, tmp_path):
    """Four synchronous steps, then local ones: after six, the seventh sends nothing and the eighth averages."""
    later = (*LOCAL, "--parallel.local-after", "0.45")
    run = shutil.copytree(runs("later", *later, "--max-steps", "6"), tmp_path / "later")
    ranks(4).run("train", "--resume", run, "--max-steps", "8", "--allow-changes")
    sent = [record["sent_bytes"] for record in records(run, "step")]
    assert [count > 0 for count in sent] == [True] * 4 + [False, False, False, True]


def test_an_exact_run_resumes_only_with_an_exact_strategy(runs, ranks):
    run = runs("ddp", "--parallel.strategy", "ddp", "--max-steps", "3")
    for name, arguments in STRATEGIES:
        refused = ranks(2).run("train", "--resume", run, *arguments, "--max-steps", "4", code=64)
        assert f"parallel.strategy: was None, is {'ddp' if name == 'powersgd' else arguments[1]}" in refused
    ranks(1).run("train", "--resume", run, "--parallel.strategy", "single", "--max-steps", "4")
    assert len(losses(run)) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), STRATEGIES)
def test_sigterm_loses_no_step_and_no_bit(runs, ranks, tmp_path, name, arguments):
    process = start_until(tmp_path, "a", 2, random.Random(name).randint(4, STEPS // 2), *arguments)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=240)[0]
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
def test_an_unsupported_combination_is_refused_with_the_remedy(fails, arguments, expected):
    # --max-steps 1: a combination that is wrongly accepted should end soon.
    message = fails("train", "digits", "--max-steps", "1", *arguments).replace("│", " ")  # the frame around the message
    assert expected in " ".join(message.split())


@pytest.mark.skipif(importlib.util.find_spec("horovod") is not None, reason="Horovod is installed")
@pytest.mark.parametrize("procs", ["1", "2"])
def test_a_missing_horovod_names_the_build_command(fails, procs):
    assert "`make horovod`" in fails("train", "digits", *strategy("horovod", "--procs", procs))
