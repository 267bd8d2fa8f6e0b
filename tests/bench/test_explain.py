"""`worldsize explain`: the arithmetic of times and causes, what it reads, what it prints."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from processes import start, workers, worldsize
from waiting import until
from worldsize import parallel
from worldsize.attribution import advice, causes, evidence, verdict
from worldsize.attribution.evidence import Evidence
from worldsize.attribution.step_time import PARTS, TOTALS, USAGE, Steps, window
from worldsize.cli import main
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError
from worldsize.runs.history import History
from worldsize.runs.run_folder import RunFolder
from worldsize.track.base import Window

MS = st.floats(0, 1000)


def steps_of(*ranks: tuple[float, ...]) -> Steps:
    """One step with (data, compute, communication, outside) of each rank, and perhaps copying."""
    values = torch.tensor([(*rank, 0.0)[:5] for rank in ranks], dtype=torch.float64)
    return Steps(values.sum(1)[None], *(values[:, part][None] for part in (0, 2, 3, 4)))


def totals(ranks: int = 1, **values: float) -> torch.Tensor:
    return torch.tensor([[values.get(name, 0.0) for name in TOTALS]] * ranks, dtype=torch.float64)


@given(st.lists(st.tuples(MS, MS, MS, MS, MS), min_size=1, max_size=5), st.tuples(MS, MS, MS, MS))
def test_the_parts_of_a_step_add_up(ranks: list[tuple[float, ...]], spent: tuple[float, ...]):
    names = ("reading_ms", "decoding_ms", "checkpoint_ms", "metrics_ms")
    found = window(7, steps_of(*ranks), totals(len(ranks), **dict(zip(names, spent, strict=True))), {}, False)
    for rank, values in enumerate(ranks):
        parts = [found.ms[name][rank] for name in PARTS]
        assert math.isclose(sum(parts), sum(values), abs_tol=1e-6)
        assert all(part >= -1e-6 for part in parts)
        assert math.isclose(found.ms["copy_ms"][rank], values[4], abs_tol=1e-6)


def test_communication_is_transfer_and_waiting():
    """The rank that waits least waits for nobody."""
    found = window(1, steps_of((0, 100, 5, 0), (0, 60, 45, 0)), totals(2), {}, False)
    assert found.ms["transfer_ms"] == [5, 5]
    assert found.ms["waiting_ms"] == [0, 40]


def test_waiting_for_images_is_shared_by_what_the_threads_did():
    found = window(1, steps_of((80, 20, 0, 0)), totals(reading_ms=30, decoding_ms=10), {}, False)
    assert (found.ms["read_ms"], found.ms["decode_ms"]) == ([60], [20])


def test_of_many_ranks_the_slowest_are_listed():
    many = [(0.0, 100.0 + (rank in (3, 70, 71, 99)), 10.0, 0.0) for rank in range(100)]
    assert window(1, steps_of(*many), totals(100), {}, False).ranks == [3, 70, 71, 99]
    assert window(1, steps_of(*many), totals(100), {}, True).ranks == list(range(100))


# Causes -------------------------------------------------------------------------------------------------------------------


def times(**values: float) -> dict[str, float]:
    found = dict.fromkeys((*PARTS, *USAGE), 0.0) | values
    return found | {"step_ms": sum(found[part] for part in PARTS)}


def made(ranks: list[dict[str, float]], windows: int = 8, recipe: Recipe | None = None, **between: float) -> Evidence:
    """A run with windows of 10 steps that all look alike, and seconds between epochs in the last one."""
    names = ranks[0].keys()
    one = Window(
        step=10,
        steps=10,
        between_s={},
        ranks=list(range(len(ranks))),
        ms={name: [rank[name] for rank in ranks] for name in names},
        mean_ms={name: sum(rank[name] for rank in ranks) / len(ranks) for name in names},
    )
    last = Window(10, 0, between, [], {}, {})
    environment = {"world_size": len(ranks), "cores": 2, "launcher": "worldsize --procs"}
    return Evidence((recipe or Recipe()).model_dump(mode="json"), environment, [*[one] * windows, last])


@given(st.dictionaries(st.sampled_from([*PARTS, "cpu_wait_ms", "throttled_ms", "paused_ms", "cpu_ms", "faults"]), MS))
def test_what_the_system_took_comes_out_of_the_parts(values: dict[str, float]):
    given_times = times(**values)
    found = causes.split(given_times)
    assert math.isclose(sum(found.values()), given_times["step_ms"], abs_tol=1e-6)
    assert all(ms >= -1e-9 for ms in found.values())


OWN = [part for part in PARTS if part not in ("compute_ms", "transfer_ms", "waiting_ms")]


@given(st.lists(st.dictionaries(st.sampled_from(OWN), st.floats(1, 1000), min_size=1), min_size=1, max_size=4), MS, MS)
def test_losses_and_computing_are_the_whole_run(ranks: list[dict[str, float]], transfer: float, evaluation: float):
    longest = max(sum(rank.values()) for rank in ranks)
    base = {"compute_ms": 10, "transfer_ms": transfer}
    every = [times(**base, waiting_ms=longest - sum(rank.values()), **rank) for rank in ranks]
    seen = made(every, evaluation=evaluation)
    computing = 10 * seen.steps / 1000 / seen.seconds
    assert sum(loss.lost for loss in causes.losses(seen)) + computing == pytest.approx(1)


FOUND = {
    "reading": [times(compute_ms=50, read_ms=50)],
    "decoding": [times(compute_ms=50, decode_ms=50)],
    "transfer": [times(compute_ms=50, transfer_ms=50)] * 2,
    "checkpoints": [times(compute_ms=50, checkpoint_ms=50)],
    "metrics": [times(compute_ms=50, metrics_ms=50)],
    "CPU quota": [times(compute_ms=100, cpu_ms=50, cpu_wait_ms=50, throttled_ms=45)],
    "busy processors": [times(compute_ms=100, cpu_ms=50, cpu_wait_ms=50)],
    "paused": [times(compute_ms=100, cpu_ms=50, paused_ms=50)],
    # The training thread waits for pages, and four others compute.
    "paging": [times(compute_ms=100, cpu_ms=400, thread_ms=50, faults=1000)],
    "slow rank": [times(compute_ms=100), times(compute_ms=50, waiting_ms=50)],
}


@pytest.mark.parametrize("cause", FOUND)
def test_half_of_the_time_is_named(cause: str):
    seen = made(FOUND[cause], recipe=Recipe(checkpoint={"every_steps": 5}))
    (loss, *rest) = causes.losses(seen)
    assert (loss.cause, loss.lost) == (cause, pytest.approx(0.5))
    assert sum(one.lost for one in rest) == pytest.approx(0)
    found = advice.on(loss, seen)
    assert found.remedy
    # What saves half of the time makes a run twice as fast; of rarer checkpoints and metrics some remain.
    assert found.gain == pytest.approx({"checkpoints": 9 / 11, "metrics": 2 / 3}.get(cause, 1.0))


OF_STRATEGY = {
    "auto": {"--parallel.compression bf16", "--parallel.strategy localsgd"},
    "ddp": {"--parallel.compression bf16", "--parallel.strategy localsgd"},
    "ddp fp16": set(),  # localsgd sends no gradients that could be fp16
    "bitwise": {"--parallel.strategy localsgd"},
    "adasum": {"--parallel.strategy localsgd"},
    "horovod": {"--parallel.compression fp16", "--parallel.strategy localsgd"},
    "localsgd": {"--parallel.local-steps"},
}


@pytest.mark.parametrize("words", OF_STRATEGY)
def test_advice_on_gradients_is_accepted_by_the_strategy(words: str):
    """No flag is one that ``train`` refuses, or that the run already has."""
    strategy, _, compression = words.partition(" ")
    recipe = Recipe(parallel={"strategy": strategy, "compression": compression or "none"})
    seen = made(FOUND["transfer"], recipe=recipe)
    remedy = advice.on(causes.losses(seen)[0], seen).remedy
    advised = re.findall(r"--parallel\.(\S+)(?: (\w+))?", remedy)
    assert {f"--parallel.{name} {value}".strip() for name, value in advised} == OF_STRATEGY[words]
    for name, value in advised:
        settings = recipe.parallel.model_dump() | {name.replace("-", "_"): value or 16}
        assert settings != recipe.parallel.model_dump()
        parallel.validate(Recipe(parallel=settings))


def test_advice_on_gradients_names_the_batch_that_the_recipe_has():
    seen = made(FOUND["transfer"], recipe=Recipe(per_process_batch=32, average={"name": "ema"}))
    remedy = advice.on(causes.losses(seen)[0], seen).remedy
    # Averaged weights do not work with localsgd.
    assert remedy == "--parallel.compression bf16, a larger --per-process-batch, or a faster network"


def test_the_last_checkpoint_alone_is_no_reason_to_save_less_often():
    step = times(compute_ms=90, checkpoint_ms=10)
    steps = Window(9, 9, {}, [0], {name: [value] for name, value in step.items()}, step)
    seen = Evidence(Recipe().model_dump(mode="json"), {}, [steps, Window(9, 0, {"evaluation": 1.0}, [], {}, {})])
    found = {loss.cause: advice.on(loss, seen) for loss in causes.losses(seen)}
    assert found["checkpoints"].saved == 0 and "--checkpoint" not in found["checkpoints"].remedy
    assert found["evaluation"].why.startswith("one evaluation takes")


def test_checkpoints_of_a_run_shorter_than_their_interval_do_not_become_fewer():
    def advised(every_seconds: float) -> advice.Advice:
        recipe = Recipe(checkpoint={"every_seconds": every_seconds})
        seen = made([times(compute_ms=50, checkpoint_ms=50)], recipe=recipe)  # of 7 seconds
        return advice.on(causes.losses(seen)[0], seen)

    assert advised(300).saved == 0 and "--checkpoint" not in advised(300).remedy
    assert advised(1).remedy.endswith("--checkpoint.every-seconds 10")


def test_a_slow_rank_and_why():
    ranks = [times(compute_ms=60, waiting_ms=40) for _ in range(3)] + [times(compute_ms=60, read_ms=40)]
    loss = causes.losses(made(ranks))[0]
    assert (loss.cause, loss.rank, loss.part) == ("slow rank", 3, "read_ms")
    assert loss.lost == pytest.approx(0.4)


def of_many(slow: dict[int, float], windows: int = 8) -> Evidence:
    """32 ranks, of which each window lists the four slowest: those that are slow, by this many ms, and others in turn."""
    found = []
    for number in range(windows):
        late = {(5 * number + i) % 31 + 1: 0.3 * i for i in (1, 2, 3, 4)} | slow
        longest = max(late.values())
        ranks = [(0.0, 100.0 + late.get(rank, 0.0), 5.0 + longest - late.get(rank, 0.0), 0.0) for rank in range(32)]
        found.append(window(number + 1, steps_of(*ranks), totals(32), {}, False))
    environment = {"world_size": 32, "cores": 2, "launcher": "worldsize --procs"}
    return Evidence(Recipe().model_dump(mode="json"), environment, found)


def test_a_slow_rank_of_many():
    seen = of_many({7: 40.0})
    assert all(len(w.ranks) == 4 for w in seen.windows) and set(seen.ranks) == {7}
    loss = causes.losses(seen)[0]
    assert (loss.cause, loss.rank, loss.part) == ("slow rank", 7, "compute_ms")
    assert loss.lost == pytest.approx(40 / 145, rel=0.02)
    assert sum(one.lost for one in causes.losses(seen)) == pytest.approx(45 / 145, rel=0.02)  # and the transfer
    assert causes.slow_rank(of_many({})) is None


def test_ranks_that_are_slow_in_turn_are_not_slow_ranks():
    seen = made([times(compute_ms=100), times(compute_ms=60, waiting_ms=40)])
    other = made([times(compute_ms=60, waiting_ms=40), times(compute_ms=100)])
    turns = replace(seen, windows=[w for pair in zip(seen.windows, other.windows, strict=True) for w in pair])
    assert causes.losses(turns)[0].cause == "uneven ranks"


def test_rarer_evaluations_are_counted_exactly():
    """8 evaluations of 10 s in a run of 100 s: with every fourth there are 2 left."""
    base = made([times(compute_ms=250.0)], windows=8)
    windows = [replace(w, between_s={"evaluation": 10.0}) if w.steps else w for w in base.windows]
    windows[0] = replace(windows[0], between_s={})
    windows[-1] = replace(windows[-1], between_s={"evaluation": 10.0})
    seen = replace(base, windows=windows, recipe=Recipe(epochs=8, evaluate_every=1).model_dump(mode="json"))
    loss = causes.losses(seen)[0]
    assert seen.seconds == pytest.approx(7 * 10 * 0.25 + 80)  # the first window is not counted
    assert (loss.cause, loss.lost) == ("evaluation", pytest.approx(80 / seen.seconds))
    found = advice.on(loss, seen)
    assert found.remedy == "--evaluate-every 8"
    assert found.saved == pytest.approx(70 / seen.seconds)


def test_the_gain_of_larger_forward_passes_counts_only_computing():
    """Computing takes half of the time and becomes twice as fast: a quarter of the time is saved."""
    assert advice.forward_batch(16, 2, gain=1.0, share=0.5).saved == pytest.approx(0.25)


# Reading ------------------------------------------------------------------------------------------------------------------


def folder(path: Path, seen: Evidence, timing: str | None = None) -> RunFolder:
    path.mkdir()
    run = RunFolder(path)
    run.recipe.write_text(json.dumps(seen.recipe))
    run.environment.write_text(json.dumps(seen.environment))
    run.timing.write_text("".join(json.dumps(asdict(w)) + "\n" for w in seen.windows) if timing is None else timing)
    return run


def test_damaged_lines_are_left_out(tmp_path: Path):
    run = folder(tmp_path / "a", made([times(compute_ms=1)]))
    run.timing.write_text(run.timing.read_text() + '{"step": 5, "ste')
    seen = evidence.read(run)
    assert (len(seen.windows), seen.damaged) == (9, 1)


def test_older_runs_have_no_time_of_copying(tmp_path: Path):
    run = folder(tmp_path / "a", made([times(compute_ms=3, read_ms=1)] * 2))
    lines = run.timing.read_text()
    run.timing.write_text(lines.replace('"copy_ms": [0.0, 0.0], ', "").replace('"copy_ms": 0.0, ', ""))
    assert "copy_ms" in lines and "copy_ms" not in run.timing.read_text()
    seen = evidence.read(run)
    assert (seen.damaged, seen.mean["copy_ms"]) == (0, 0) and seen.mean["step_ms"] == pytest.approx(4)


def test_of_a_run_that_was_resumed_at_another_world_size_the_last_one_counts(tmp_path: Path, capsys):
    alone, two = made([times(compute_ms=8)]), made([times(compute_ms=4), times(compute_ms=5)])
    run = folder(tmp_path / "a", replace(two, windows=[*alone.windows, *(replace(w, step=90) for w in two.windows)]))
    History(run.history).add("started", 0, world_size=1)
    History(run.history).add("started", 80, world_size=2)
    seen = evidence.read(run)
    assert (sorted(seen.ranks), seen.mean["step_ms"], seen.left_out) == ([0, 1], pytest.approx(4.5), 80)
    assert main(["explain", str(tmp_path / "a"), "--no-measure"]) == 0
    assert "The first 80 steps are left out: the run had another number of processes" in capsys.readouterr().out
    History(run.history).add("started", 100, world_size=4)
    with pytest.raises(UserError, match="no step was recorded yet since the run was resumed at another world size"):
        evidence.read(run)


def test_a_run_without_timing_is_a_user_error(tmp_path: Path):
    old = folder(tmp_path / "a", made([times(compute_ms=1)]))
    old.timing.unlink()
    with pytest.raises(UserError, match=r"has no timing\.jsonl"):
        evidence.read(old)
    with pytest.raises(UserError, match="no complete line"):
        evidence.read(folder(tmp_path / "b", made([times(compute_ms=1)]), timing="{}\n"))
    assert verdict.of(old) is None


def test_only_runs_that_lost_much_print_it(tmp_path: Path):
    assert verdict.of(folder(tmp_path / "a", made([times(compute_ms=96, read_ms=4)]))) is None
    told = verdict.of(folder(tmp_path / "b", made([times(compute_ms=75, read_ms=25)])))
    assert told is not None
    assert "25% of the time" in told
    assert "(+33%)" in told
    # What was lost decides, not what the remedy saves: 80 % of it.
    printed = verdict.of(folder(tmp_path / "c", made([times(compute_ms=94, metrics_ms=6)])))
    assert printed is not None and "6% of the time" in printed and "(+5%)" in printed
    printed = verdict.of(folder(tmp_path / "d", made([times(compute_ms=90, loop_ms=10)])))
    assert printed is not None and "No remedy is known. More" in printed


# Real runs ----------------------------------------------------------------------------------------------------------------

SMALL = ("--model.name", "shufflenet_v2_x0_5", "--data.name", "synthetic", "--data.samples", "64", "--data.classes", "10")
QUICK = (*SMALL, "--data.train-crop-size", "32", "--data.val-crop-size", "32", "--global-batch", "16", "--micro-batch", "8")


def timing(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]


def test_a_run_accounts_for_all_of_its_time(ranks):
    begin = time.monotonic()
    ranks(2).run("train", "digits", *QUICK, "--epochs", "3", "--name", "a")
    elapsed = time.monotonic() - begin
    run = ranks.cwd / "runs/a"
    windows = timing(run)
    assert sum(window["steps"] for window in windows) == 12
    assert [window["step"] for window in windows] == sorted(window["step"] for window in windows)
    seen = evidence.read(RunFolder(run))
    assert seen.evaluations == 3
    total = sum(w["mean_ms"].get("step_ms", 0) * w["steps"] / 1000 + sum(w["between_s"].values()) for w in windows)
    summary = json.loads((run / "result.json").read_text())
    assert total < summary["seconds"] < elapsed
    assert total > 0.2 * summary["seconds"]  # the rest is the start: dataset, model, connections
    told = worldsize("explain", "runs/a", "--no-measure", "--json", "a.json", cwd=ranks.cwd)
    assert told.returncode == 0, told.stderr
    # How many are left out as the warm-up depends on how fast the machine is.
    assert re.search(r"runs/a: (\d+ of )?12 steps in", told.stdout)
    written = json.loads((ranks.cwd / "a.json").read_text())
    assert sum(v for k, v in written["mean_ms"].items() if k != "step_ms") == pytest.approx(written["mean_ms"]["step_ms"])


@pytest.mark.slow
def test_a_resumed_run_accounts_for_every_step_once(ranks):
    ranks(2).run("train", "digits", *QUICK, "--epochs", "3", "--name", "b", "--stop-after", "5", code=75)
    ranks(2).run("train", "--resume", "runs/b")
    assert sum(window["steps"] for window in timing(ranks.cwd / "runs/b")) == 12


@pytest.mark.slow
def test_a_paused_rank_is_found(tmp_path: Path):
    """SIGSTOP to one of two ranks, four times."""
    run = start(
        *("train", "digits", *QUICK, "--procs", "2", "--name", "a"),
        *("--epochs", "200", "--max-steps", "4000", "--evaluate-every", "200"),  # a pause in an evaluation is in no step
        cwd=tmp_path,
    )
    metrics = tmp_path / "runs/a/metrics.jsonl"
    try:
        until(lambda: metrics.exists() and metrics.read_text(), "the first step is done", running=run)
        victim = next(pid for pid in workers(run.pid) if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        stopped = 0.0
        for _ in range(4):
            begin, reached = time.monotonic(), metrics.stat().st_size
            os.kill(victim, signal.SIGSTOP)
            time.sleep(1.5)
            os.kill(victim, signal.SIGCONT)
            stopped += time.monotonic() - begin
            until(lambda size=reached: metrics.stat().st_size > size + 1000, "the run goes on", running=run)
    finally:
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=240)
    seen = evidence.read(RunFolder(tmp_path / "runs/a"))
    paused = {rank: causes.split(its)["paused"] * seen.steps / 1000 for rank, its in seen.ranks.items()}
    assert paused[0] < 0.1 * paused[1]
    assert 0.7 * stopped < paused[1] < 1.1 * stopped
    # A rank waits from the end of its own computation on, so the slower the machine, the shorter.
    assert seen.ranks[0]["waiting_ms"] * seen.steps / 1000 > 0.25 * stopped


@pytest.mark.parametrize(
    ("words", "message"),
    [((), "RUN is required"), (("nowhere",), "run nowhere does not exist"), (("empty",), "is not a run folder")],
)
def test_what_is_not_a_run_is_a_user_error(tmp_path: Path, words: tuple[str, ...], message: str):
    (tmp_path / "empty").mkdir()
    done = worldsize("explain", *words, cwd=tmp_path)
    assert done.returncode == 64
    assert message in done.stderr
