"""``worldsize bench scaling RECIPE``."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from worldsize.bench.launching import RunFailed
from worldsize.bench.scaling import local, measured, origin, table
from worldsize.bench.scaling.arguments import BenchScaling
from worldsize.bench.scaling.cases import Case, cases, in_rounds, kinds_of, recipe_of
from worldsize.bench.scaling.jobs import Jobs, settings_of
from worldsize.bench.scaling.measured import Failure, Measured
from worldsize.config import live_output
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import cores
from worldsize.errors import FAILED, SUCCESS, UserError
from worldsize.jobs.terminal import age
from worldsize.report import reading
from worldsize.runs.run_folder import RunFolder, create

_MOST_LETTERS = 400  # of a reason


def run(argv: list[str], tell: Callable[[str], None]) -> tuple[RunFolder, int]:
    """Run the command and report each run with ``tell``. Returns the folder with ``results.jsonl`` and ``table.md``, and the
    exit code: `FAILED` if some of the runs failed.

    Raises:
        UserError: invalid options, all runs failed, or a job is left that cannot be followed or deleted.
    """
    request = origin.parse(argv)
    if request.asked.synthetic:
        request = origin.with_classes(request)
    asked = request.asked
    found = cases(_names(asked.strategies), request.scalings, asked.nodes, asked.procs, kinds_of(asked.on))
    bench = Benchmark(asked, found, request.job_options, tell)
    bench.check()
    folder = _folder(request)
    try:
        failures = bench.run(folder)
    except KeyboardInterrupt:
        tell(f"interrupted; to continue: {origin.to_continue(request, folder.path)}")
        raise
    _write_page(folder.path, tell)
    return folder, FAILED if failures else SUCCESS


def _write_page(folder: Path, tell: Callable[[str], None]) -> None:
    """Write ``page.html``, if what draws it is installed."""
    try:
        from worldsize.report import content, page

        text = page.write(content.of_benches([reading.read_bench(folder)]))
    except ModuleNotFoundError as error:
        if error.name != "altair":
            raise
        tell("page.html is not written: it needs Altair (pip install 'worldsize[report]')")
    else:
        (folder / "page.html").write_text(text, "utf-8")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark with its cases. ``job_options``: those of ``worldsize train --on``, for jobs on a cluster."""

    asked: BenchScaling
    cases: Sequence[Case]
    job_options: tuple[str, ...]
    tell: Callable[[str], None]

    @property
    def steps(self) -> int:
        return self.asked.warmup + self.asked.steps

    def recipe(self, case: Case) -> Recipe:
        smallest = min(case.world_size for case in self.cases)
        return recipe_of(case, self.asked.settings, smallest, self.steps, self.asked.synthetic)

    def check(self) -> None:
        """Raise UserError, before any run, for whatever cannot work."""
        asked = self.asked
        if asked.steps < 1 or asked.warmup < 0 or asked.rounds < 1:
            raise UserError("--steps and --rounds must be positive, and --warmup not negative")
        kinds = {case.on for case in self.cases}
        if any(case.nodes > 1 and case.on == "local" for case in self.cases):
            raise UserError(f"--nodes {asked.nodes}: several nodes require a cluster, such as --on pytorchjob")
        if kinds == {"local"} and self.job_options:
            raise UserError(f"{self.job_options[0]}: options after `--` are for jobs on a cluster; pass --on")
        on_cluster = {kind: Jobs(kind, self.job_options) for kind in sorted(kinds - {"local"})}
        for case in self.cases:
            try:
                self.recipe(case)
            except UserError as error:
                raise UserError(f"{case}: {error}") from None
            local.variant_of(case) if case.on == "local" else settings_of(case)
        for kind, jobs in on_cluster.items():
            largest = max((case for case in self.cases if case.on == kind), key=lambda case: case.world_size)
            jobs.check(largest, self.recipe(largest))

    def run(self, folder: RunFolder) -> list[Failure]:
        """Make the runs that the folder does not have yet, and write its tables after each. Returns those that failed.

        Raises:
            UserError: no run worked, or a job is left that cannot be followed or deleted.
        """
        path = folder.path / "results.jsonl"
        results = measured.read(path) if path.exists() else []
        failures: list[Failure] = []
        done = {(one.round, one.case) for one in results}
        waiting = [(turn, case) for turn, case in in_rounds(self.cases, self.asked.rounds) if (turn, case) not in done]
        begun = time.monotonic()
        with progress_bar() as bar:
            task = bar.add_task("", total=len(waiting))
            for number, (turn, case) in enumerate(waiting, 1):
                bar.update(task, description=str(case))
                said = self._make(turn, case, folder.path, results, failures)
                self._write(folder.path, results, failures)
                bar.advance(task)
                left_s = (time.monotonic() - begun) / number * (len(waiting) - number)
                left = f"; {age(left_s)} left" if left_s else ""
                self.tell(f"{number} of {len(waiting)}, round {turn}/{self.asked.rounds}  {case!s:<32} {said}{left}")
        if not results and failures:
            raise UserError(f"all runs failed; the first, {failures[0].case}: {failures[0].reason}")
        return failures

    def _make(self, turn: int, case: Case, folder: Path, results: list[Measured], failures: list[Failure]) -> str:
        """Make a run, and add it to the results or the failures. Returns what to report of it."""
        try:
            one = self._measure(turn, case, folder)
        except RunFailed as error:
            lines = str(error).splitlines()
            reason = " ".join(dict.fromkeys([lines[0].strip(), lines[-1].strip()]))[:_MOST_LETTERS]
            failures.append(Failure(case, turn, reason))
            (folder / f"{case.name}-{turn}.failed.txt").write_text(f"{error}\n", "utf-8")
            return f"failed: {reason}"
        results.append(one)
        return f"{one.images_per_s:9.2f} images/s, {one.images_per_s_per_process:.2f} per process"

    def _measure(self, turn: int, case: Case, folder: Path) -> Measured:
        recipe = self.recipe(case)
        name = f"{case.name}-{turn}"
        if case.on == "local":
            threads = max(1, cores() // max(one.procs for one in self.cases))
            metrics = local.run(case, recipe, folder, name, self.steps, threads)
        else:
            # Another benchmark may have had a folder of this name, and its runs are still on the volume.
            job = "-".join([folder.name, *origin.token(folder), name])
            metrics = Jobs(case.on, self.job_options).run(case, recipe, folder, job, self.steps)
        records, damaged = reading.parse(metrics.read_text("utf-8", errors="replace"))
        if damaged:
            self.tell(f"{metrics}: {damaged} incomplete line{'s' * (damaged > 1)} not used")
        records = [one for one in records if one.get("kind") == "step"]
        one = measured.of_steps(case, turn, recipe, records, self.asked.warmup, self.asked.steps)
        planned = batch_plan.plan(recipe, case.world_size).global_batch
        if one.global_batch != planned:
            self.tell(f"{case}: the run computed {one.global_batch} images per step, and the recipe has {planned}")
        return replace(one, shares=measured.shared(case, _environment(metrics.parent)), run=metrics.parent.name)

    def _write(self, folder: Path, results: Sequence[Measured], failures: Sequence[Failure]) -> None:
        measured.write(folder / "results.jsonl", results, failures)
        (folder / "table.md").write_text(self._report(measured.with_efficiency(results), failures), "utf-8")

    def _report(self, results: Sequence[Measured], failures: Sequence[Failure]) -> str:
        """Everything that was measured; its last line is the sentence to quote."""
        asked = self.asked
        kept = [table.what_scales(scaling, results) for scaling in dict.fromkeys(one.scaling for one in results)]
        counted = (
            f"means over {asked.steps} steps, after {asked.warmup} of warm-up that did not count; rounds: {asked.rounds}"
        )
        remarks = [*table.failed(failures), *table.oversubscribed(results), *table.verdicts(results)]
        lines = [*kept, counted, "", table.table(results), "", *remarks]
        return "\n".join(lines).rstrip() + "\n"


def _environment(run: Path) -> dict[str, Any]:
    """What the run recorded of its machine; empty without it."""
    try:
        found = json.loads((run / "environment.json").read_text("utf-8"))
    except (OSError, ValueError):
        found = None
    return found if isinstance(found, dict) else {}


def progress_bar() -> Progress:
    """Which run is being made, on stderr; nothing if it is not a terminal."""
    console = Console(stderr=True)
    live = live_output.possible(console)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not live)


def _folder(request: origin.Request) -> RunFolder:
    """A new folder, or that of the benchmark to continue.

    Raises:
        UserError: that benchmark measured something else.
    """
    resumed = request.asked.resume
    if resumed is None:
        folder = create(request.asked.out, None, "bench-scaling")
        origin.write(folder.path, request, secrets.token_hex(3))
        return folder
    if different := origin.differences(origin.read(resumed), request):
        raise UserError(f"--resume {resumed} measured something else: {'; '.join(different)}. Repeat its options")
    return RunFolder(resumed)
