"""Whether the evaluations that a run recorded in several places agree. They are not computed again. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BEST = ("best_top1", "best_map", "best_epoch")
Lines = dict[int, dict[str, Any]]


def contradiction(
    epochs: list[dict[str, Any]], states: Mapping[str, dict[str, Any]], result: dict[str, Any] | None
) -> tuple[str, int] | None:
    """The first contradiction, and the step after which the network was evaluated; None: there is none.

    Args:
        epochs: the lines of metrics.jsonl about evaluations.
        states: state.json of each checkpoint, by the checkpoint's name.
        result: result.json, if there is one.
    """
    # A run that crashed during an evaluation made it again, so of several the last counts.
    lines = {int(line["step"]): line for line in epochs}
    for name, state in states.items():
        if found := _of_checkpoint(name, state, lines):
            return found
    return None if result is None else _of_result(result, list(states.values()), lines)


def _of_checkpoint(name: str, state: dict[str, Any], lines: Lines) -> tuple[str, int] | None:
    evaluation, step = state.get("evaluation"), state.get("evaluated_step", -1)
    if not evaluation or step < 0:
        return None
    return _of_numbers(name, evaluation, step, lines) or _of_best(name, state, step, lines)


def _of_result(result: dict[str, Any], states: list[dict[str, Any]], lines: Lines) -> tuple[str, int] | None:
    step = int(result["steps"])
    numbers: dict[str, Any] = {name: result[name] for name in ("loss", "top1", "top5", "map", "f1") if name in result}
    if found := _of_numbers("result.json", numbers, step, lines) or _of_best("result.json", result, step, lines):
        return found
    state = next((state for state in states if state.get("evaluated_step") == step), {})
    for name in _BEST:
        if name in result and name in state and result[name] != state[name]:
            return f"{name} is {result[name]} in result.json and {state[name]} in the last checkpoint", step
    return None


def _of_numbers(place: str, numbers: Mapping[str, Any], step: int, lines: Lines) -> tuple[str, int] | None:
    """Where the evaluation in ``place``, made after ``step``, differs from its line."""
    if step not in lines:
        return f"{place} has an evaluation after step {step:,}, which is missing in metrics.jsonl", step
    for name, value in numbers.items():
        recorded = lines[step].get(f"val_{name}")
        if _rounded(value) != _rounded(recorded):
            return f"val_{name} after step {step:,} is {recorded} in metrics.jsonl and {value} in {place}", step
    return None


def _of_best(place: str, numbers: Mapping[str, Any], step: int, lines: Lines) -> tuple[str, int] | None:
    """Whether the best evaluation up to ``step`` is another one in ``place`` than in the lines."""
    name = "top1" if numbers.get("best_map") is None else "map"
    if f"best_{name}" not in numbers:
        return None
    values = {at: line.get(f"val_{name}") or 0.0 for at, line in lines.items() if at <= step}
    for at, value in values.items():
        if not isinstance(value, (int, float)):
            return f"val_{name} after step {at:,} is no number in metrics.jsonl", at
    best = max(values.values())
    if _rounded(claimed := numbers[f"best_{name}"]) != _rounded(best):
        return f"the best {name} up to step {step:,} is {best} in metrics.jsonl and {claimed} in {place}", step
    return None


def _rounded(value: Any) -> Any:
    """With the digits of metrics.jsonl."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
