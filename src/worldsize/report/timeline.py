"""When a run was started and how each start ended, from its history. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from worldsize.report.reading import Record, Run

_ENDS = {"finished": "finished", "stopped": "stopped and saved", "failed": "failed"}
NO_END = "killed, or still running"
CHECKPOINT = "checkpoint"
EVALUATION = "evaluation"
WHAT = (*_ENDS.values(), NO_END, CHECKPOINT, EVALUATION)
_MOST_HOSTS = 16


@dataclass(frozen=True)
class Attempt:
    """From a start of the run to its end, both in seconds since 1970. ``ended`` is one of `WHAT`, ``hosts`` has the number
    of processes by machine or pod."""

    begin: float
    end: float
    ended: str
    hosts: dict[str, int]


def attempts(run: Run) -> list[Attempt]:
    """Each start of the run. Without a recorded end, it lasts to the last that is known of it."""
    found = []
    lines = run.history
    starts = [i for i, line in enumerate(lines) if line["event"] == "started"]
    for start, after in zip(starts, [*starts, len(lines)][1:], strict=True):
        last = lines[after - 1]
        end, ended = last["time"], _ENDS.get(last["event"], NO_END)
        if ended == NO_END and after == len(lines):
            end = max(end, run.modified or 0.0)
        found.append(Attempt(lines[start]["time"], end, ended, lines[start].get("hosts", {})))
    return found


def rows(run: Run, prefix: str = "") -> list[Record]:
    """A bar from ``begin`` to ``end`` for each start on each host, and a point without ``end`` for each checkpoint and each
    evaluation, at its end; minutes since the first start."""
    found: list[Record] = []
    every = attempts(run)
    if not every:
        return found
    zero = every[0].begin
    for attempt in every:
        bar = {"begin": (attempt.begin - zero) / 60, "end": (attempt.end - zero) / 60, "what": attempt.ended}
        names = list(attempt.hosts) or ["unknown machine"]
        if len(names) > _MOST_HOSTS:
            names = [f"{len(names)} machines"]
        found += [{"run": run.name, "row": prefix + name} | bar for name in names]
    saves = [line for line in run.history if line["event"] == "saved"]
    where = found[-1]["row"]
    points = [(CHECKPOINT, line["time"]) for line in saves]
    points += [(EVALUATION, epoch["time"]) for epoch in run.epochs if isinstance(epoch.get("time"), (int, float))]
    return found + [{"run": run.name, "row": where, "begin": (time - zero) / 60, "what": what} for what, time in points]
