"""Learning rates, compared with values computed by hand and with torch's schedulers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worldsize.config.recipe import Optimizer, Recipe, Schedule
from worldsize.optim.schedules import factor, peak_lr

NAMES = ["cosine", "linear", "polynomial", "exponential", "step", "constant", "onecycle"]


def factors(schedule: Schedule, steps_per_epoch: int, epochs: int) -> list[float]:
    return [factor(schedule, step, steps_per_epoch, epochs) for step in range(steps_per_epoch * epochs)]


def torch_rates(make, steps: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(name="cosine"), [1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060]),
        (Schedule(name="cosine", end=0.2), [1, 0.969552, 0.882843, 0.753073, 0.6, 0.446927, 0.317157, 0.230448]),
        (Schedule(name="cosine", warmup_epochs=2), [0, 0.25, 0.5, 0.75, 1, 0.853553, 0.5, 0.146447]),
        (Schedule(name="linear"), [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        (Schedule(name="linear", warmup_epochs=2, warmup_start=0.2, end=0.5), [0.2, 0.4, 0.6, 0.8, 1, 0.875, 0.75, 0.625]),
        (Schedule(name="linear", warmup_epochs=0.75), [0, 2 / 3, 12 / 13, 10 / 13, 8 / 13, 6 / 13, 4 / 13, 2 / 13]),
        (Schedule(name="step", milestones=(1, 3), gamma=0.1), [1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01]),
        (Schedule(name="step", milestones=(2.5,), gamma=0.5, warmup_epochs=1), [0, 0.5, 1, 1, 1, 0.5, 0.5, 0.5]),
        (Schedule(name="exponential", gamma=0.25), [1, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125]),
        (Schedule(name="exponential", gamma=0.25, warmup_epochs=1), [0, 0.5, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (Schedule(name="constant", warmup_epochs=1), [0, 0.5, 1, 1, 1, 1, 1, 1]),
        (Schedule(name="constant"), [1] * 8),
        (Schedule(name="polynomial", end=0.2), [1, 0.8125, 0.65, 0.5125, 0.4, 0.3125, 0.25, 0.2125]),
        (Schedule(name="polynomial", power=0.5, warmup_epochs=2), [0, 0.25, 0.5, 0.75, 1, 0.866025, 0.707107, 0.5]),
        (
            Schedule(name="cosine", warmup_epochs=1, warmup_prefix=False),
            [0, 0.5, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060],
        ),
        (
            Schedule(name="exponential", gamma=0.25, warmup_epochs=1, warmup_prefix=False),
            [0, 0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125],
        ),
        (
            Schedule(name="restarts", cycle_epochs=2, warmup_epochs=1, warmup_prefix=False),
            [0, 0.5, 0.5, 0.146447, 1, 0.853553, 0.5, 0.146447],
        ),
        (Schedule(name="restarts", cycle_epochs=1), [1, 0.5] * 4),
        (
            Schedule(name="restarts", cycle_epochs=1, cycle_growth=2, warmup_epochs=1),
            [0, 0.5, 1, 0.5, 1, 0.853553, 0.5, 0.146447],
        ),
        (Schedule(name="piecewise", milestones=(0, 1, 4), values=(0, 1, 0)), [0, 0.5, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        (Schedule(name="piecewise", milestones=(1, 2), values=(0.5, 0.25)), [0.5, 0.5, 0.5, 0.375, 0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_four_epochs_of_two_steps_equal_the_values_computed_by_hand(schedule, expected):
    assert factors(schedule, 2, 4) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("warmup", "epochs", "steps"), [(3, 10, 7), (1, 4, 25), (5, 20, 3), (2.5, 8, 10)])
@pytest.mark.parametrize("end", [4e-6, 0.01])
def test_onecycle_equals_torch_at_every_step(warmup, epochs, steps, end):
    total = epochs * steps
    theirs = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=1.0,
            total_steps=total,
            pct_start=warmup / epochs,
            anneal_strategy="cos",
            div_factor=25,
            final_div_factor=1 / 25 / end,
            cycle_momentum=False,
            three_phase=False,
        ),
        total - 1,
    )
    ours = factors(Schedule(name="onecycle", warmup_epochs=warmup, end=end), steps, epochs)
    assert ours[:-1] == pytest.approx(theirs, abs=1e-12)
    assert ours[-1] == pytest.approx(end, abs=1e-12)


@pytest.mark.parametrize("end", [0.0, 0.1])
def test_cosine_without_warmup_equals_torch(end):
    theirs = torch_rates(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90, eta_min=end), 90)
    assert factors(Schedule(name="cosine", end=end), 9, 10) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_equals_torch(power):
    theirs = torch_rates(lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 90, power), 90)
    assert factors(Schedule(name="polynomial", power=power), 9, 10) == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize(("growth", "end"), [(1, 0.0), (2, 0.1), (3, 0.01)])
def test_restarts_equal_torch(growth, end):
    theirs = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 18, growth, eta_min=end), 400
    )
    schedule = Schedule(name="restarts", cycle_epochs=2, cycle_growth=growth, end=end)
    assert factors(schedule, 9, 45)[:400] == pytest.approx(theirs, abs=1e-12)


@pytest.mark.parametrize("warmup", [0, 7])
def test_a_tenth_of_an_epoch_ends_at_its_step(warmup):
    """1.1 epochs of 100 steps are 110.00000000000001 in floating-point numbers."""
    restarts = Schedule(name="restarts", cycle_epochs=1.1, warmup_epochs=warmup / 100)
    parameter = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    theirs = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(parameter, 110)
    for step in range(500):
        assert factor(restarts, warmup + step, 100, 10) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        parameter.step()
        theirs.step()
    steps = Schedule(name="step", milestones=(1.1, 2.2))
    assert [factor(steps, step, 100, 10) for step in (109, 110, 219, 220)] == pytest.approx([1, 0.1, 0.1, 0.01])


def test_piecewise_equals_the_schedule_of_ffcv():
    """Its rn50 configurations: the ends of each epoch from ``get_step_lr``'s interpolation, then linear within it."""
    epochs, steps, points = 16, 5, ([0, 2, 16], [1e-4, 1, 0])
    ends = np.interp(np.arange(epochs + 1), *points)
    theirs = np.concatenate([np.interp(np.arange(steps), [0, steps], ends[e : e + 2]) for e in range(epochs)])
    schedule = Schedule(name="piecewise", milestones=(0, 2, 16), values=(1e-4, 1, 0))
    assert factors(schedule, steps, epochs) == pytest.approx(theirs.tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "piecewise"}, "0 values, 3 milestones"),
        ({"name": "piecewise", "milestones": (0.0,), "values": (1.0,)}, "at least two"),
        ({"name": "piecewise", "milestones": (0, 5), "values": (1, 0), "warmup_epochs": 1}, "piecewise has no warmup"),
        ({"name": "piecewise", "milestones": (5, 0), "values": (1, 0)}, "must be increasing"),
        ({"name": "piecewise", "milestones": (0, 5), "values": (2, 0)}, "less than or equal to 1"),
        ({"name": "restarts", "cycle_epochs": 0}, "greater than 0"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        Recipe.model_validate({"schedule": settings})


FRACTIONS = st.just(0.0) | st.floats(1e-30, 1)


@st.composite
def schedules(draw) -> tuple[Schedule, int, int]:
    epochs = draw(st.integers(1, 30))
    schedule = Schedule(
        name=draw(st.sampled_from(NAMES)),
        warmup_epochs=draw(st.just(0.0) | st.floats(1e-30, epochs, exclude_max=True)),
        warmup_start=draw(FRACTIONS),
        warmup_prefix=draw(st.booleans()),
        end=draw(FRACTIONS),
        milestones=tuple(sorted(draw(st.sets(st.integers(0, epochs - 1), max_size=3)))),
        gamma=draw(st.floats(0.01, 1)),
    )
    return schedule, draw(st.integers(1, 20)), epochs


@given(schedules())
def test_a_factor_lies_between_zero_and_one(case):
    assert all(0 <= f <= 1 for f in factors(*case))


@given(schedules())
def test_warmup_rises_and_what_follows_falls(case):
    schedule, steps, _ = case
    found = factors(*case)
    warmup = schedule.warmup_epochs * steps
    peak = math.ceil(warmup) if schedule.name != "onecycle" else math.floor(max(warmup - 1, 0))
    rising, falling = found[: peak + 1], found[peak + (schedule.name == "onecycle") :]
    if schedule.name != "step":
        assert all(a <= b + 1e-12 for a, b in pairwise(rising[:-1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(falling))


@given(schedules(), st.randoms())
def test_a_factor_does_not_depend_on_what_was_asked_before(case, random):
    schedule, steps, epochs = case
    in_order = factors(*case)
    order = random.sample(range(len(in_order)), len(in_order))
    assert {step: factor(schedule, step, steps, epochs) for step in order} == dict(enumerate(in_order))


@given(schedules(), st.sampled_from([2, 3, 10]))
def test_a_batch_k_times_as_large_sees_every_kth_factor(case, k):
    schedule, steps, epochs = case
    if schedule.name == "onecycle":
        schedule = schedule.model_copy(update={"name": "cosine"})
    fine, coarse = factors(schedule, steps * k, epochs), factors(schedule, steps, epochs)
    assert coarse == pytest.approx(fine[::k], abs=1e-9)


def test_the_first_step_after_warmup_has_the_peak():
    for name in ("cosine", "linear", "constant"):
        assert factor(Schedule(name=name, warmup_epochs=5), 50, 10, 90) == 1


@pytest.mark.parametrize(("scaling", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_peak_rate_follows_the_batch_as_asked(scaling, expected):
    optimizer = Optimizer(lr=0.1, lr_reference_batch=256, lr_scaling=scaling)
    assert peak_lr(optimizer, 1024) == pytest.approx(expected)
    assert peak_lr(optimizer, 256) == pytest.approx(0.1)


def test_the_linear_rule_also_lowers_the_rate():
    assert peak_lr(Optimizer(lr=0.1, lr_reference_batch=256), 64) == pytest.approx(0.025)
