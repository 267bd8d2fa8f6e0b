"""Terminal output: a live progress line, a table row per evaluation; periodic plain lines if stdout is not a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from worldsize.config import job_pod, live_output, tables
from worldsize.config.recipe import Track
from worldsize.config.wording import count, form, quoted
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base

_PLAIN_SECONDS = 15.0  # between step lines when stdout is not a terminal
_HEADINGS = ("epoch", "train loss", "train top-1", "val loss", "val top-1", "val top-5", "images/s", "time")
_SEVERAL = (*_HEADINGS[:4], "val mAP", "val F1", *_HEADINGS[6:])  # labels per image


class _Console(tables.PrintableConsole):
    def on_broken_pipe(self) -> None:
        # rich would exit the process; training must continue when the reader of stdout closes the pipe.
        raise OSError("stdout was closed")


def say(text: str) -> None:
    """Print a line after the run has ended; the reader of stdout may be gone."""
    with suppress(OSError):
        _Console(highlight=False, soft_wrap=True).print(text, markup=False)


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        self._console = _Console(highlight=False, soft_wrap=True)
        self._folder, self._resumed_step = folder, resumed_step
        self._live: Progress | None = None
        self._task = TaskID(0)
        self._facts: base.RunFacts | None = None
        self._last_line_at = time.monotonic()

    def begin(self, facts: base.RunFacts) -> None:
        self._facts = facts
        for line in _header_lines(facts):
            self._console.print(line, markup=False)
        if live_output.possible(self._console):
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[now]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("starting", total=facts.total_steps, completed=facts.first_step, now="")
            self._live.start()
        headings = _SEVERAL if facts.multilabel else _HEADINGS
        self._console.print(Text("  ".join(f"{h:>11}" for h in headings), style="bold"))

    def steps(self, steps: Sequence[base.Step]) -> None:
        if not steps or self._facts is None:
            return
        last = steps[-1]
        speed = sum(s.images_per_s for s in steps) / len(steps)
        now = (
            f"step {last.step:,}/{self._facts.total_steps:,}  loss {last.loss:.3f}  lr {last.lr:.3g}  {speed:,.0f} images/s"
        )
        if self._live is not None:
            self._live.update(self._task, completed=last.step, description=f"epoch {last.epoch:.1f}", now=now)
        elif time.monotonic() - self._last_line_at >= _PLAIN_SECONDS:
            self._last_line_at = time.monotonic()
            self._console.print(f"epoch {last.epoch:.2f}  {now}", markup=False)

    def evaluating(self, done: int, total: int) -> None:
        if self._live is not None:
            self._live.update(self._task, now=f"evaluating {done:,}/{total:,}")

    def epoch(self, epoch: base.Epoch) -> None:
        cells = (
            f"{epoch.epoch}",
            "-" if epoch.train_loss is None else f"{epoch.train_loss:.4f}",
            "-" if epoch.train_top1 is None else f"{epoch.train_top1:.2%}",
            f"{epoch.val_loss:.4f}",
            f"{epoch.val_top1 if epoch.val_map is None else epoch.val_map:.2%}",
            f"{epoch.val_top5 if epoch.val_f1 is None else epoch.val_f1:.2%}",
            f"{epoch.images_per_s:,.0f}" if epoch.train_s else "-",
            _duration(epoch.train_s + epoch.val_s),
        )
        self._console.print("  ".join(f"{c:>11}" for c in cells), markup=False)
        if epoch.raw_top1 is not None:
            raw = _accuracies(epoch.raw_top1, epoch.raw_top5, epoch.raw_map, epoch.raw_f1)
            line = f"             raw weights: val loss {epoch.raw_loss:.4f}, {raw}"
            self._console.print(line, markup=False, style="dim")
        if epoch.details:
            self._console.print(_worker_line(epoch.details), markup=False, style="dim")

    def end(self, summary: base.Summary | None) -> None:
        if self._live is not None:
            self._live.stop()
        if summary is not None:
            for line in _summary_lines(summary, self._folder, self._resumed_step):
                self._console.print(line, markup=False)


def _header_lines(facts: base.RunFacts) -> list[str]:
    e = facts.environment
    threads = f"{e['threads_per_process']} thread{'s' * (e['threads_per_process'] > 1)} each"
    processes = f"{e['world_size']} process{'es' * (e['world_size'] > 1)}"
    strategy = f"{e['strategy']} over {e['backend']}" if e["backend"] else e["strategy"]
    sharers = "devices" if e["strategy"] == "dataparallel" else "processes"
    return [
        f"{facts.name}: {facts.model}, {facts.parameters / 1e6:.1f} M parameters, {facts.classes} classes, "
        f"{facts.train_samples:,} training and {count(facts.val_samples, 'validation image')}",
        *([f"validation images: {facts.validates_on}"] if facts.validates_on else []),
        f"{processes} on {e['device']}, {threads}, {strategy}, {e['precision']}",
        *([f"images decoded by {e['decoder']}"] if e["decoder"] else []),
        f"global batch {facts.global_batch} = {facts.sharing} x {facts.accumulation} x {facts.micro_batch} "
        f"({sharers} x micro-batches x samples), peak lr {facts.peak_lr:.4g} for {facts.lr_batch}, "
        f"{count(facts.total_steps, 'step')}, {facts.steps_per_epoch:,} per epoch"
        + (f"; resuming after step {facts.first_step:,}" if facts.first_step else ""),
        "",
    ]


def _accuracies(top1: float | None, top5: float | None, mean_precision: float | None, f1: float | None) -> str:
    if mean_precision is not None:
        return f"mAP {mean_precision:.2%}, F1 {f1:.2%}"
    return f"top-1 {top1:.2%}, top-5 {top5:.2%}"


def _worker_line(details: dict[str, Any]) -> str:
    """Staleness and speed per worker, for async."""
    ages = ", ".join(f"{age}: {count:,}" for age, count in enumerate(details["staleness"]) if count)
    speeds = ", ".join(f"{speed:,.0f}" for speed in details["speeds"])
    return f"             updates by staleness {ages}; {details['dropped']:,} dropped; images/s by worker {speeds}"


def _summary_lines(summary: base.Summary, folder: RunFolder, resumed_step: int) -> list[str]:
    width = max(len(name) for name, _ in folder.contents())
    return [
        "",
        *_result_lines(summary, resumed_step),
        f"{folder.path} contains",
        *(f"  {name:<{width}}  {description}" for name, description in folder.contents()),
        *([] if job_pod.inside() else [f"Next: worldsize eval {quoted(folder.path)}"]),
    ]


def _result_lines(summary: base.Summary, resumed_step: int) -> list[str]:
    span = f"since step {resumed_step:,}" if resumed_step else "in total"
    took = f"{_duration(summary.seconds)} {span}"
    accuracies = _accuracies(summary.top1, summary.top5, summary.map, summary.f1)
    if not summary.steps:
        return [f"{accuracies} of the initial weights, {took}"]
    best = summary.best_top1 if summary.best_map is None else summary.best_map
    return [
        f"{accuracies} after {count(summary.steps, 'step')} ({summary.epochs:g} {form(summary.epochs, 'epoch')}); "
        f"best {best:.2%} {_best_at(summary)}",
        f"{summary.images_per_s:,.0f} images/s on average during training, {took}",
    ]


def _best_at(summary: base.Summary) -> str:
    """``in epoch 2`` if the run ended there, else ``after epoch 2``."""
    return f"{'in' if summary.best_epoch > summary.epochs else 'after'} epoch {summary.best_epoch}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
