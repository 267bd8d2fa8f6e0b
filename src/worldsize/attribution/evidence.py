"""What a run folder says about its speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import yaml

from worldsize import parallel
from worldsize.attribution.step_time import NEWER, PARTS
from worldsize.errors import UserError, of_system
from worldsize.runs import history
from worldsize.runs.run_folder import RunFolder
from worldsize.track.base import Window

LOCAL_LAUNCHERS = ("none", "worldsize --procs")  # on one machine
_FEW = 4  # windows, of which the first is counted too

Times = dict[str, float]


@dataclass(frozen=True)
class Evidence:
    """The windows of a run, and what it ran. ``damaged`` counts the lines that could not be read, ``left_out`` the steps
    with another number of processes, before the run was resumed with that of ``environment``. ``most_on_a_host``: the
    largest number of processes of one host, None if it is unknown."""

    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    windows: Sequence[Window]
    damaged: int = 0
    left_out: int = 0
    most_on_a_host: int | None = None

    @property
    def world_size(self) -> int:
        return int(self.environment.get("world_size", 1))

    @property
    def processes_here(self) -> int | None:
        """How many processes share the ``cores`` of ``environment``, those of rank 0's machine; None if it is unknown."""
        if self.world_size == 1 or self.environment.get("launcher") in LOCAL_LAUNCHERS:
            return self.world_size
        recorded = self.environment.get("processes_here")  # not by older versions
        return self.most_on_a_host if recorded is None else int(recorded)

    @property
    def counted(self) -> Sequence[Window]:
        """Without the first window, in which memory is allocated and connections are made, unless there are few."""
        return self.windows[1:] if len(self.windows) > _FEW else self.windows

    @cached_property
    def steps(self) -> int:
        return sum(window.steps for window in self.counted)

    @cached_property
    def between_s(self) -> Times:
        """Seconds between epochs, by `Window.between_s`."""
        names = {name for window in self.counted for name in window.between_s}
        return {name: sum(window.between_s.get(name, 0.0) for window in self.counted) for name in sorted(names)}

    @cached_property
    def evaluations(self) -> int:
        return sum(window.between_s.get("evaluation", 0) > 0 for window in self.counted)

    @cached_property
    def saves(self) -> int:
        """The windows in which checkpoints were taken."""
        return sum(w.between_s.get("checkpoint", 0) > 0 or w.mean_ms.get("checkpoint_ms", 0) > 0 for w in self.counted)

    @cached_property
    def mean(self) -> Times:
        """Milliseconds of a step, the mean over ranks and steps."""
        return self._per_step({id(window): window.mean_ms for window in self.counted if window.steps})

    @cached_property
    def ranks(self) -> dict[int, Times]:
        """Milliseconds of a step of each rank that is listed in every window."""
        stepping = [window for window in self.counted if window.steps]
        always = set.intersection(*(set(window.ranks) for window in stepping)) if stepping else set()
        found = {}
        for rank in sorted(always):
            one = {id(w): {name: values[w.ranks.index(rank)] for name, values in w.ms.items()} for w in stepping}
            found[rank] = self._per_step(one)
        return found

    def compared(self, rank: int) -> tuple[Times, Times]:
        """Milliseconds of a step of the rank and of the mean of all others, in the windows that list the rank."""
        windows = [window for window in self.counted if window.steps and rank in window.ranks]
        steps, size = sum(window.steps for window in windows), self.world_size
        its: Times = {}
        others: Times = {}
        for window in windows:
            for name, values in window.ms.items():
                own = values[window.ranks.index(rank)]
                its[name] = its.get(name, 0.0) + own * window.steps / steps
                mean = (size * window.mean_ms[name] - own) / (size - 1)
                others[name] = others.get(name, 0.0) + mean * window.steps / steps
        return its, others

    @property
    def seconds(self) -> float:
        """Of the counted windows."""
        return self.mean["step_ms"] * self.steps / 1000 + sum(self.between_s.values())

    def _per_step(self, times: dict[int, Times]) -> Times:
        """The mean of the windows' times, weighted by their steps."""
        total: Times = {}
        for window in self.counted:
            for name, ms in times.get(id(window), {}).items():
                total[name] = total.get(name, 0.0) + ms * window.steps / self.steps
        return total


def read(folder: RunFolder) -> Evidence:
    """The evidence in a run folder. Never writes.

    Raises:
        UserError: the run recorded no timing, or a file of it is damaged.
        StoreUnreachable: its disk or the network does not answer.
    """
    try:
        recipe = yaml.safe_load(folder.recipe.read_text("utf-8"))
        _refuse_asynchronous(folder, recipe)
        environment = json.loads(folder.environment.read_text("utf-8"))
        lines = folder.timing.read_text("utf-8").splitlines()
    except FileNotFoundError as error:
        raise UserError(
            f"{folder.path} has no {error.filename.rpartition('/')[2]}, so nothing is known about its speed: it has not "
            "completed a step, or was made by an older version"
        ) from None
    except (TypeError, KeyError):
        raise UserError(f"{folder.recipe} is damaged: it has no settings of a run") from None
    except OSError as error:
        raise of_system(f"{error.filename or folder.path}: {error.strerror}", error) from None
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{folder.path}: {error}") from None
    if not isinstance(environment, dict) or not isinstance(environment.get("world_size", 1), int):
        raise UserError(f"{folder.environment} is damaged: it does not have the number of processes")
    windows, damaged = [], 0
    for line in lines:
        window = _window(line)
        windows.extend([] if window is None else [window])
        damaged += window is None
    before = history.steps_at_other_sizes(folder.history)
    # Windows of different sizes have no common ranks or speed.
    kept = [window for window in windows if window.step > before]
    left_out = sum(window.steps for window in windows if window.step <= before)
    evidence = Evidence(recipe, environment, kept, damaged, left_out, history.most_on_a_host(folder.history))
    if not evidence.steps and left_out:
        raise UserError(f"{folder.path}: no step was recorded yet since the run was resumed at another world size")
    if not evidence.steps:
        raise UserError(f"{folder.timing} has no complete line with steps: the run has not done any, or the file is damaged")
    return evidence


def _refuse_asynchronous(folder: RunFolder, recipe: Mapping[str, Any]) -> None:
    strategy = recipe["parallel"]["strategy"]
    if strategy in parallel.STRATEGIES and parallel.load(strategy).asynchronous:
        raise UserError(
            f"{folder.path} is asynchronous: no process waits for another, so where time is lost is not recorded. Compare "
            f"its workers in {folder.metrics}: speeds (images/s) and staleness of each epoch, step_ms and compute_ms of "
            "each step"
        )


def _window(line: str) -> Window | None:
    """None if the line is damaged."""
    try:
        values = json.loads(line)
        window = Window(**{field.name: values[field.name] for field in fields(Window)})
        if window.steps:
            window = _with_newer_parts(window)
        complete = not window.steps or all(name in window.mean_ms for name in ("step_ms", *PARTS))
    except (ValueError, KeyError, TypeError):
        return None
    return window if complete else None


def _with_newer_parts(window: Window) -> Window:
    """The window with 0 for what older versions counted in another part."""
    ms = {name: [0.0] * len(window.ranks) for name in NEWER} | window.ms
    return replace(window, ms=ms, mean_ms=dict.fromkeys(NEWER, 0.0) | window.mean_ms)
