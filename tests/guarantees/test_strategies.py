"""Each strategy computes what its paper specifies: compared with a NumPy implementation in one process."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from paths import SMALL_NETWORK
from processes import distance, losses, momentum, overall_distance, records, weights
from reference import Replica
from worldsize.config.recipe import Recipe
from worldsize.distributed.batch_plan import plan
from worldsize.parallel.adasum.arithmetic import adasum

SMALL = SMALL_NETWORK
STEPS = 6


@pytest.fixture(scope="module")
def runs(ranks):
    """runs(size, *arguments, ...) trains once with the settings of `reference.RECIPE` and returns the run folder."""

    def run(
        size: int,
        *arguments: str,
        model: str = SMALL,
        steps: int = STEPS,
        precision: str = "fp64",
        sabotage: str | None = None,
        local_size: int | None = None,
    ) -> Path:
        parts = (Path(model).name, steps, precision, size, sabotage, local_size, *arguments)
        name = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(map(str, parts)))
        folder = ranks.cwd / "runs" / name
        if not folder.exists():
            recipe = ranks.cwd / f"{name}.yaml"
            recipe.write_text(reference.RECIPE.format(precision=precision, model=model))
            command = ("train", recipe.name, "--name", name, "--max-steps", str(steps), *arguments)
            ranks(size, sabotage=sabotage, local_size=local_size).run(*command)
        return folder

    return run


def same_as_reference(run: Path, expected: tuple[list[float], list[Replica]]) -> None:
    expected_losses, replicas = expected
    assert losses(run) == pytest.approx(expected_losses, rel=1e-6)
    state = reference.mean_state(replicas, len(expected_losses))
    assert distance(weights(run), state) < 1e-9  # running statistics included
    own = {name: torch.from_numpy(array) for name, array in replicas[0].momentum().items()}
    assert distance(momentum(run), own) < 1e-9


@pytest.mark.slow
def test_the_reference_distinguishes_strategies(runs):
    """The comparisons are meaningful: strategies differ by far more than 1e-9."""
    ddp, adasum = runs(2, "--parallel.strategy", "ddp"), runs(2, "--parallel.strategy", "adasum")
    assert distance(weights(ddp), weights(adasum)) > 1e-3


# ddp


@pytest.fixture
def averaged(runs):
    """A few steps of plain ddp with a small model."""
    return runs(2, "--parallel.strategy", "ddp", model="squeezenet1_1", steps=4)


@pytest.mark.parametrize("before", ["1", pytest.param("3", marks=pytest.mark.slow)])
def test_dividing_before_and_after_the_sum_changes_nothing(runs, averaged, before):
    divided = runs(2, "--parallel.predivide", before, model="squeezenet1_1", steps=4)
    assert losses(divided) == pytest.approx(losses(averaged), rel=1e-6)
    assert distance(weights(divided), weights(averaged)) < 1e-9
    assert distance(momentum(divided), momentum(averaged)) < 1e-9


# The momentum is a sum of gradients rounded to 11 or 8 bits: measured 3.5e-4 and 2.8e-3.
@pytest.mark.parametrize(("kind", "nearest", "farthest"), [("fp16", 1e-5, 1e-3), ("bf16", 1e-3, 8e-3)])
def test_16_bit_gradients_are_close(runs, averaged, kind, nearest, farthest):
    rounded = runs(2, "--parallel.compression", kind, model="squeezenet1_1", steps=4)
    assert nearest < overall_distance(momentum(rounded), momentum(averaged)) < farthest


@pytest.mark.slow
def test_buckets_averaged_in_cpp_have_the_bits_of_those_averaged_in_python(runs):
    """Three processes: torch's own default multiplies by 1/3, which rounds."""
    settings = ("--micro-batch", "4")
    builtin, python = (runs(3, *settings, *more, steps=4) for more in ((), ("--parallel.predivide", "3")))
    assert losses(builtin) == losses(python)
    own, expected = weights(builtin), weights(python)
    assert own.keys() == expected.keys() and all(torch.equal(own[name], expected[name]) for name in own)
    for mine, other in zip(records(builtin, "step"), records(python, "step"), strict=True):
        assert mine["sent_bytes"] == other["sent_bytes"] > 0
        parts = ("data_ms", "compute_ms", "communication_ms", "overhead_ms")
        assert 0 < mine["communication_ms"] < mine["step_ms"] == pytest.approx(sum(mine[part] for part in parts))


def test_dividing_before_the_sum_can_underflow_in_fp16(runs):
    settings = ("--parallel.compression", "fp16", "--parallel.predivide", "1e12")
    run = runs(2, *settings, model="squeezenet1_1", steps=1)
    biases = [tensor for name, tensor in momentum(run).items() if name.endswith(".bias")]  # without weight decay
    assert biases and not any(tensor.any() for tensor in biases)


def parameters(run: Path) -> dict[str, torch.Tensor]:
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return {name: tensor for name, tensor in weights(run).items() if not name.endswith(buffers)}


# Adasum

NUMBERS = st.one_of(st.just(0.0), st.floats(1e-3, 1e3), st.floats(-1e3, -1e-3))
PAIRS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=5), min_size=1, max_size=4)


def adasum_of_one(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The formula of the paper for one tensor."""
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    if aa == 0 or bb == 0:
        return a + b
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def combined(a: torch.Tensor, b: torch.Tensor, *sizes: int) -> torch.Tensor:
    return adasum(a.clone(), b.clone(), list(sizes or [len(a)]))


@given(tensors=PAIRS)
def test_adasum_is_the_papers_formula_tensor_by_tensor(tensors):
    pairs = [np.array(pairs).T for pairs in tensors]
    sizes = [pair.shape[1] for pair in pairs]
    a, b = (torch.from_numpy(np.concatenate([pair[i] for pair in pairs])) for i in range(2))
    expected = torch.from_numpy(np.concatenate([adasum_of_one(*pair) for pair in pairs]))
    near = {"rtol": 1e-12, "atol": 1e-9 * float(torch.maximum(a.abs(), b.abs()).max())}
    torch.testing.assert_close(combined(a, b, *sizes), expected, **near)
    torch.testing.assert_close(combined(b, a, *sizes), expected, **near)


@given(vector=st.lists(NUMBERS, min_size=2, max_size=6), factor=st.floats(0.1, 10))
def test_adasum_is_the_mean_of_parallel_and_the_sum_of_orthogonal_steps(vector, factor):
    a = torch.tensor(vector, dtype=torch.float64)
    zero = torch.zeros_like(a)
    near = {"rtol": 1e-12, "atol": 1e-9}
    for b in (factor * a, -factor * a):
        torch.testing.assert_close(combined(a, b), (a + b) / 2, **near)
    torch.testing.assert_close(combined(a, zero), a, **near)
    torch.testing.assert_close(combined(zero, a), a, **near)
    one, other = torch.cat([a, zero]), torch.cat([zero, factor * a])
    torch.testing.assert_close(combined(one, other), one + other, **near)


@pytest.mark.parametrize("scale", [1.0, 1e-30])  # the square of 1e-30 underflows in float32
def test_adasum_of_long_float32_vectors_computes_its_dots_in_float64(scale):
    a, b = np.random.default_rng(0).standard_normal((2, 200_003)) * scale
    b = 0.3 * a + 0.01 * b
    found = combined(torch.from_numpy(a).float(), torch.from_numpy(b).float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.from_numpy(adasum_of_one(a, b)).float(), rtol=1e-5, atol=1e-6 * scale)


def adasum_tree(_: int, replicas: Sequence[Replica]) -> None:
    """Neighbors first, then pairs of pairs."""
    weights = [replica.weights() for replica in replicas]
    for name in weights[0]:
        steps = [own[name] - replica.before[name] for own, replica in zip(weights, replicas, strict=True)]
        while len(steps) > 1:
            steps = [adasum_of_one(a, b) for a, b in zip(steps[::2], steps[1::2], strict=True)]
        for own, replica in zip(weights, replicas, strict=True):
            own[name][...] = replica.before[name] + steps[0]


@pytest.mark.parametrize(
    ("model", "size"),
    [(SMALL, 2), pytest.param("resnet18", 4, marks=pytest.mark.slow)],
)
def test_adasum_combines_each_ranks_own_step(runs, model, size):
    run = runs(size, "--parallel.strategy", "adasum", model=model)
    same_as_reference(run, reference.train(STEPS, model, size, rate=1 / size, on_weights=adasum_tree))


@pytest.mark.slow
def test_hierarchical_adasum_averages_inside_a_machine(runs):
    def combine(step: int, replicas: Sequence[Replica]) -> None:
        for machine in (replicas[:2], replicas[2:]):
            reference.average([replica.weights() for replica in machine])
        adasum_tree(step, replicas[::2])
        for first, second in (replicas[:2], replicas[2:]):
            for name, array in second.weights().items():
                array[...] = first.weights()[name]

    run = runs(4, "--parallel.strategy", "adasum", "--parallel.hierarchical", local_size=2)
    same_as_reference(run, reference.train(STEPS, SMALL, 4, rate=1 / 2, on_weights=combine))


# Local SGD


@pytest.mark.slow
def test_local_sgd_that_averages_every_step_is_ddp(runs):
    ddp = runs(2, "--parallel.strategy", "ddp")
    local = runs(2, "--parallel.strategy", "localsgd", "--parallel.local-steps", "1", "--parallel.average-momentum")
    assert losses(local) == pytest.approx(losses(ddp), rel=1e-6)
    assert distance(weights(local), weights(ddp)) < 1e-9
    assert distance(momentum(local), momentum(ddp)) < 1e-9


@pytest.mark.parametrize(
    ("model", "size", "steps", "every", "synchronous", "with_momentum"),
    [
        (SMALL, 2, 6, 4, 0, True),  # ends in the middle of a round
        pytest.param(SMALL, 2, 8, 4, 3, False, marks=pytest.mark.slow),
        pytest.param("resnet18", 2, 13, 4, 7, False, marks=pytest.mark.slow),
        pytest.param("resnet18", 4, 8, 3, 0, True, marks=pytest.mark.slow),
    ],
)
def test_local_sgd_steps_independently_and_then_averages(runs, model, size, steps, every, synchronous, with_momentum):
    def on_gradients(step: int, replicas: Sequence[Replica]) -> None:
        if step < synchronous:
            reference.average([replica.gradients() for replica in replicas])

    def on_weights(step: int, replicas: Sequence[Replica]) -> None:
        local_steps = step + 1 - synchronous
        if local_steps > 0 and local_steps % every == 0:
            reference.average([replica.weights() for replica in replicas])
            if with_momentum:
                reference.average([replica.momentum() for replica in replicas])

    local_after = {0: 0.0, 3: 0.1, 7: 0.25}[synchronous]  # epochs of 29 steps, rounded to steps
    settings = ["--parallel.local-steps", str(every), "--parallel.local-after", str(local_after)]
    settings += ["--parallel.average-momentum"] * with_momentum
    # Checkpoints during the run use the mean of the weights, and must not change each rank's own weights.
    settings += ["--checkpoint.every-steps", "2"]
    run = runs(size, "--parallel.strategy", "localsgd", *settings, model=model, steps=steps)
    expected = reference.train(steps, model, size, on_gradients=on_gradients, on_weights=on_weights)
    same_as_reference(run, expected)
    result = json.loads((run / "result.json").read_text())
    assert result["loss"] == pytest.approx(reference.validation_loss(model, weights(run)), rel=1e-6)


# PowerSGD


class LowRank:
    """Vogels et al. 2019, algorithms 1 and 2, at rank ``r``, after ``start`` steps with uncompressed averaging."""

    def __init__(self, r: int, start: int) -> None:
        self._r = r
        self._start = start
        self._errors: dict[tuple[int, str], np.ndarray] = {}
        self._q: dict[str, np.ndarray] = {}

    def __call__(self, step: int, replicas: Sequence[Replica]) -> None:
        gradients = [replica.gradients() for replica in replicas]
        if step >= self._start:
            for name in gradients[0]:
                self._approximate(name, [own[name] for own in gradients])
        reference.average(gradients)

    def _approximate(self, name: str, gradients: list[np.ndarray]) -> None:
        shape = gradients[0].shape
        n, m = shape[0], int(np.prod(shape[1:]))
        if len(shape) < 2 or not sent_as_factors(n, m, self._r):
            return
        matrices = [g.reshape(n, m) + self._errors.get((rank, name), 0) for rank, g in enumerate(gradients)]
        q = self._q[name] if name in self._q else initial_q(name, m, self._r)
        p, _ = np.linalg.qr(np.mean([matrix @ q for matrix in matrices], axis=0))
        q = self._q[name] = np.mean([matrix.T @ p for matrix in matrices], axis=0)
        for rank, (gradient, matrix) in enumerate(zip(gradients, matrices, strict=True)):
            self._errors[rank, name] = matrix - p @ q.T
            gradient[...] = (p @ q.T).reshape(shape)


def sent_as_factors(n: int, m: int, r: int) -> bool:
    """Only if that at least halves the size."""
    return 2 * (n + m) * r < n * m


def initial_q(name: str, m: int, r: int) -> np.ndarray:
    """The first Q: any random matrix, as long as it is the same on all ranks."""
    return torch.randn(m, r, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float64).numpy()


POWERSGD = ("--parallel.compression", "powersgd", "--parallel.bucket-mb", "1")


@pytest.mark.parametrize(("model", "size", "rank"), [(SMALL, 2, 2), pytest.param("resnet18", 4, 1, marks=pytest.mark.slow)])
def test_powersgd_is_the_papers_algorithm(runs, model, size, rank):
    run = runs(size, *POWERSGD, "--parallel.powersgd-rank", str(rank), "--parallel.powersgd-start", "3", model=model)
    same_as_reference(run, reference.train(STEPS, model, size, on_gradients=LowRank(rank, start=3)))


@pytest.mark.slow
def test_powersgd_at_full_rank_is_exact(runs, averaged):
    settings = (*POWERSGD, "--parallel.powersgd-rank", "4608", "--parallel.powersgd-start", "2")
    full = runs(2, *settings, model="squeezenet1_1", steps=4, sabotage="full_rank")
    assert records(full, "step")[-1]["sent_bytes"] > records(averaged, "step")[-1]["sent_bytes"]
    assert distance(weights(full), weights(averaged)) < 1e-8
    assert distance(momentum(full), momentum(averaged)) < 1e-8


# Bytes sent


@pytest.mark.parametrize(
    ("settings", "precision", "expected"),
    [
        ((), "fp64", lambda sizes: [sum(n * m for n, m in sizes) * 8] * 4),
        (("--parallel.predivide", "2"), "fp64", lambda sizes: [sum(n * m for n, m in sizes) * 8] * 4),
        (("--parallel.compression", "fp16"), "fp64", lambda sizes: [sum(n * m for n, m in sizes) * 2] * 4),
        (("--parallel.compression", "bf16"), "fp32", lambda sizes: [sum(n * m for n, m in sizes) * 2] * 4),
        (
            (*POWERSGD, "--parallel.powersgd-rank", "8", "--parallel.powersgd-start", "2"),
            "fp64",
            lambda sizes: (
                [sum(n * m for n, m in sizes) * 8] * 2
                + [sum((n + m) * 8 if sent_as_factors(n, m, 8) else n * m for n, m in sizes) * 8] * 2
            ),
        ),
        (("--parallel.strategy", "adasum"), "fp32", lambda sizes: [sum(n * m for n, m in sizes) * 4] * 4),
        (
            # 0.04 epochs equal one step.
            ("--parallel.strategy", "localsgd", "--parallel.local-steps", "2", "--parallel.local-after", "0.04"),
            "fp64",
            lambda sizes: [sum(n * m for n, m in sizes) * 8 * averaged for averaged in (1, 0, 1, 0)],
        ),
    ],
    ids=["ddp", "predivide", "fp16", "bf16", "powersgd", "adasum", "localsgd"],
)
def test_a_step_sends_the_expected_bytes_and_reports_them(ranks, runs, settings, precision, expected):
    run = runs(2, *settings, model="squeezenet1_1", steps=4, precision=precision, sabotage="counting")
    # A vector counts as a matrix with one row, which is never sent as factors.
    sizes = [(1, t.numel()) if t.ndim < 2 else (t.shape[0], t[0].numel()) for t in parameters(run).values()]
    assert [record["sent_bytes"] for record in records(run, "step")] == expected(sizes)
    if not settings:
        return  # torch sends in C++, which the sabotage cannot count
    for rank in range(2):
        counted = (ranks.cwd / f"sent-{rank}.txt").read_text().split()
        assert list(map(int, counted[-4:])) == expected(sizes)


# DataParallel


@given(accumulation=st.integers(1, 12), micro=st.integers(1, 40), devices=st.integers(1, 8), step=st.integers(0, 10**6))
def test_devices_of_one_process_compute_the_micro_batches_of_as_many_processes(accumulation, micro, devices, step):
    total = accumulation * micro * devices
    recipe = Recipe(global_batch=total, micro_batch=micro)
    one, several = plan(recipe, 1, devices=devices), plan(recipe, devices)
    assert (one.accumulation, one.forward_batch, one.per_process) == (accumulation, micro * devices, total)
    starts = [one.first(step, 0, m) + device * micro for m in range(accumulation) for device in range(devices)]
    assert starts == sorted(several.first(step, rank, m) for rank in range(devices) for m in range(accumulation))
