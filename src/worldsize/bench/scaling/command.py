"""``worldsize bench scaling RECIPE``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from worldsize.bench.scaling import local, measured, origin, table
from worldsize.bench.scaling.arguments import BenchScaling
from worldsize.bench.scaling.cases import Case, cases, in_rounds, recipe_of
from worldsize.bench.scaling.jobs import Jobs, settings_of
from worldsize.bench.scaling.measured import Measured
from worldsize.config.recipe import Recipe
from worldsize.distributed import batch_plan
from worldsize.distributed.rank import cores
from worldsize.errors import UserError
from worldsize.report import reading
from worldsize.runs.run_folder import RunFolder, create


def run(argv: list[str], tell: Callable[[str], None]) -> RunFolder:
    """Run the command and report each run with ``tell``. Returns the folder with ``results.jsonl`` and ``table.md``.

    Raises:
        UserError: invalid options, or a run that failed; --resume continues after it.
    """
    request = origin.parse(argv)
    asked = request.asked
    found = cases(_names(asked.strategies), request.scalings, asked.nodes, asked.procs)
    bench = Benchmark(asked, found, request.job_options, tell)
    bench.check()
    folder = _folder(request)
    bench.run(folder)
    _write_page(folder.path, tell)
    return folder


def _write_page(folder: Path, tell: Callable[[str], None]) -> None:
    """Write ``report.html``, if what draws it is installed."""
    try:
        from worldsize.report import content, page

        text = page.write(content.of_benches([reading.read_bench(folder)]))
    except ModuleNotFoundError as error:
        if error.name != "altair":
            raise
        tell("report.html is not written: it needs Altair (pip install 'worldsize[report]')")
    else:
        (folder / "report.html").write_text(text, "utf-8")


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
        if asked.on == "local" and any(case.nodes > 1 for case in self.cases):
            raise UserError(f"--nodes {asked.nodes}: several nodes require a cluster, such as --on pytorchjob")
        if asked.on == "local" and self.job_options:
            raise UserError(f"{self.job_options[0]}: options after `--` are for jobs on a cluster; pass --on")
        if asked.on != "local":
            Jobs(asked.on, self.job_options)
        for case in self.cases:
            self.recipe(case)
            local.variant_of(case) if asked.on == "local" else settings_of(case)

    def run(self, folder: RunFolder) -> None:
        """Make the runs that the folder does not have yet, and write its tables after each."""
        path = folder.path / "results.jsonl"
        results = measured.read(path) if path.exists() else []
        done = {(one.round, one.case) for one in results}
        largest = max(case.procs for case in self.cases)
        threads = max(1, cores() // largest)
        if self.asked.on == "local" and largest > cores():
            self.tell(f"{largest} processes share {cores()} cores: beyond {cores()}, efficiency can only fall")
        waiting = [(turn, case) for turn, case in in_rounds(self.cases, self.asked.rounds) if (turn, case) not in done]
        with progress_bar() as bar:
            task = bar.add_task("", total=len(waiting))
            for turn, case in waiting:
                bar.update(task, description=str(case))
                one = self._measure(turn, case, folder.path, threads)
                results.append(one)
                measured.write(path, results)
                (folder.path / "table.md").write_text(self._report(measured.with_efficiency(results)), "utf-8")
                bar.advance(task)
                self.tell(
                    f"round {turn}/{self.asked.rounds}  {case!s:<32} {one.images_per_s:9.2f} images/s, "
                    f"{one.images_per_s_per_process:.2f} per process"
                )

    def _measure(self, turn: int, case: Case, folder: Path, threads: int) -> Measured:
        recipe = self.recipe(case)
        name = f"{case.name}-{turn}"
        if self.asked.on == "local":
            metrics = local.run(case, recipe, folder, name, self.steps, threads)
        else:
            # Another benchmark may have had a folder of this name, and its runs are still on the volume.
            job = "-".join([folder.name, *origin.token(folder), name])
            metrics = Jobs(self.asked.on, self.job_options).run(case, recipe, folder, job, self.steps)
        records, damaged = reading.parse(metrics.read_text("utf-8", errors="replace"))
        if damaged:
            self.tell(f"{metrics}: {damaged} incomplete line{'s' * (damaged > 1)} not used")
        records = [one for one in records if one.get("kind") == "step"]
        one = measured.of_steps(self.asked.on, case, turn, recipe, records, self.asked.warmup, self.asked.steps)
        planned = batch_plan.plan(recipe, case.world_size).global_batch
        if one.global_batch != planned:
            self.tell(f"{case}: the run computed {one.global_batch} images per step, and the recipe has {planned}")
        return one

    def _report(self, results: Sequence[Measured]) -> str:
        kept = [table.what_scales(scaling, results) for scaling in dict.fromkeys(one.scaling for one in results)]
        lines = [*kept, "", table.table(results), "", *table.verdicts(results)]
        return "\n".join(lines).rstrip() + "\n"


def progress_bar() -> Progress:
    """Which run is being made, on stderr; nothing if it is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal)


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
