"""Real runs of two processes to which something happens: what the user sees, what it costs, and that no bit changes.

A `Fault` says what happens; `check` injects it, resumes the run and compares it with an undisturbed one. With
WORLDSIZE_FAULTS, what was measured is added to that file, from which docs/make_fault_table.py makes the table in
docs/reliability.md.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from interruptions import same_run
from processes import HERE, environment, free_port, newest, workers
from trees import tree
from waiting import until

_SMALL = (
    *("--model.name", "shufflenet_v2_x0_5", "--precision", "fp32", "--deterministic", "--schedule.warmup-epochs", "0"),
    *("--global-batch", "8", "--micro-batch", "4", "--data.train-crop-size", "16", "--data.val-crop-size", "16"),
    *("--data.val-resize-size", "16", "--track.every-seconds", "0"),
)
SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "80", "--data.classes", "10", "--epochs", "4"),
    *("--evaluate-every", "2", *_SMALL),
)  # 40 steps
PROCS = ("--procs", "2")
EVERY = 5  # steps per checkpoint; what happens while one is written costs the steps before it too
SAVING = ("--checkpoint.every-steps", str(EVERY))
_LIMIT_S = 480.0  # ends a test that hangs


@dataclass(frozen=True)
class Fault:
    """Something that happens to a run.

    Args:
        name: the test's parameter.
        title: the fault, in the table.
        happens: what the user sees, in the table.
        inject: makes it happen, once ``step`` steps are done. Returns the exit code where the run has another parent.
        codes: exit codes that the run may have. With 0 it completes by itself, else it is resumed.
        says: a regular expression in what the run then prints.
        lost: steps at most that are computed again.
        start: starts the run.
        repair: called before the run is resumed.
        again: starts the run again.
        options: more of the command line of the disturbed run.
        files: the run reads image files, instead of images in memory.
        rule: a function of sabotage.py that each process calls first.
        resumes: False: nothing can be resumed.
        marks: of the test.
    """

    name: str
    title: str
    happens: str
    inject: Callable[[Scene], int | None]
    codes: tuple[int, ...]
    says: str = ""
    lost: int = 0
    start: Callable[[Scene], object] = field(default=lambda scene: scene.train())
    step: int = 6
    repair: Callable[[Scene], object] = field(default=lambda scene: None)
    again: Callable[[Scene], object] = field(default=lambda scene: scene.train_as_ranks())
    options: tuple[str, ...] = ()
    files: bool = False
    rule: str | None = None
    resumes: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = (pytest.mark.slow,)


@dataclass(frozen=True)
class Measured:
    """Seconds from the fault to the first message about it, or to the end of the run; and from the end to the first new step
    of the resumed run. None: nothing is printed, or the run does not end."""

    code: int
    detected_s: float | None
    recovered_s: float | None
    lost: int
    equal: bool


class Scene:
    """A run in the folder ``cwd``; ``process`` was started last."""

    def __init__(self, fault: Fault, cwd: Path) -> None:
        self.fault, self.cwd = fault, cwd
        self.run = cwd / "runs" / "a"
        self.log = cwd / "log.txt"
        self.log.touch()
        self.processes: list[subprocess.Popen[str]] = []
        self._afterwards = ExitStack()
        self.kept: Any = None  # what the start leaves for the injection, or that for `repair`
        self.over = False  # the run is started again without the fault
        self.began = time.monotonic()
        self.detected_s: float | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        return self.processes[-1]

    @property
    def ranks(self) -> list[int]:
        """The process ids of the ranks."""
        return workers(self.process.pid)

    def settings(self) -> tuple[str, ...]:
        return of_files(self.cwd / "images") if self.fault.files else SETTINGS

    def command(self, *options: str) -> list[str]:
        """The command line of the run; once the fault is over, without its options and with more patience."""
        new = ("train", "digits", *self.settings(), "--name", "a", *SAVING)
        words = (*(("train", "--resume", "runs/a") if self.saved() else new), *options)
        words += ("--parallel.stall-s", "60") if self.over else self.fault.options
        return [sys.executable, "-m", "worldsize", *words]

    def train(self, *prefix: str, **options: Any) -> subprocess.Popen[str]:
        """Start the run with a launcher, as an argument of the command ``prefix``."""
        return self.start([*prefix, *self.command(*PROCS)], **options)

    def rank(self, rank: int, port: int, host: str = "127.0.0.1", *prefix: str, **env: str) -> subprocess.Popen[str]:
        """Start one rank, as a launcher would, as an argument of the command ``prefix``."""
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        return self.start([*prefix, *self.command()], env=place | env)

    def train_as_ranks(self) -> None:
        """Start the run without a launcher of ours, as torchrun would."""
        port = free_port()
        for rank in (0, 1):
            self.rank(rank, port)

    def start(self, command: list[str], env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
        variables = environment(PYTHONUNBUFFERED="1", **(env or {}))
        if self.fault.rule is not None and not self.over:
            rule = f"import sys\nsys.path.append({str(HERE)!r})\nimport sabotage\nsabotage.{self.fault.rule}()\n"
            (self.cwd / "sitecustomize.py").write_text(rule)
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.cwd), os.environ.get("PYTHONPATH")]))
        with open(self.log, "a") as log:
            options = {"stdout": log, "stderr": subprocess.STDOUT} | options
            self.processes.append(subprocess.Popen(command, cwd=self.cwd, env=variables, text=True, **options))
        return self.process

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def steps(self) -> int:
        """How many steps the run has recorded."""
        with suppress(FileNotFoundError):
            return (self.run / "metrics.jsonl").read_text().count('"kind": "step"')
        return 0

    def saved(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return int(newest(self.run).name.removeprefix("step-")) if list(self.run.glob("checkpoints/step-????????")) else 0

    def now(self) -> None:
        """The fault happens now."""
        self.began, self.detected_s = time.monotonic(), None

    def until(self, condition: Callable[[], Any], what: str, running: bool = True) -> Any:
        """`waiting.until`, which also notes when the fault was first reported."""

        def noted() -> Any:
            if self.detected_s is None and self.fault.says and re.search(self.fault.says, self.printed()):
                self.detected_s = time.monotonic() - self.began
            return condition()

        def ended() -> bool:
            return running and any(process.poll() is not None for process in self.processes)

        until(lambda: noted() or ended(), what, _LIMIT_S, every=0.05)
        assert condition(), f"{what}: the run ended before, with {[p.returncode for p in self.processes]}\n{self.printed()}"

    def until_it_says(self) -> None:
        self.until(lambda: re.search(self.fault.says, self.printed()), f"{self.fault.says!r} is printed")

    def end(self) -> int:
        """Wait for the end of all processes; the exit code of the first that failed, as a shell reports it."""
        self.until(lambda: all(process.poll() is not None for process in self.processes), "the run ends", running=False)
        codes = [process.returncode for process in self.processes]
        return next((128 - code if code < 0 else code for code in codes if code), 0)

    def finally_do(self, work: Callable[[], object]) -> None:
        """When all processes have ended, also after a failure."""
        self._afterwards.callback(work)

    def close(self) -> None:
        with self._afterwards:
            self._end_all()

    def _end_all(self) -> None:
        for process in self.processes:
            for pid in [*(workers(process.pid) if process.poll() is None else []), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    os.kill(pid, signal.SIGCONT)
            process.wait()


def of_files(root: Path) -> tuple[str, ...]:
    """Settings of a run of 40 steps on 16 images in files; makes the files."""
    if not root.exists():
        names = (f"{split}/{name}/{i}.png" for split in ("train", "val") for name in ("cat", "dog") for i in range(8))
        tree(root, *names)
    return ("--data.name", "folder", "--data.root", str(root), "--epochs", "20", "--evaluate-every", "10", *_SMALL)


@contextmanager
def scene(fault: Fault, cwd: Path) -> Iterator[Scene]:
    """The run has been started; its processes end with the context."""
    one = Scene(fault, cwd)
    try:
        fault.start(one)
        yield one
    finally:
        one.close()


def check(fault: Fault, cwd: Path, undisturbed: Path) -> Measured:
    """Start a run, inject the fault, see what it should say and how it should end, and resume it to the same bits."""
    with scene(fault, cwd) as one:
        last = fault.step - fault.step % EVERY  # its checkpoint must be on disk, or there is nothing to resume
        one.until(lambda: one.steps() >= fault.step and one.saved() >= last, f"{fault.step} steps are done")
        one.now()
        code = fault.inject(one)
        code = one.end() if code is None else code
        assert code in fault.codes, f"exit code {code}\n{one.printed()}"
        assert re.search(fault.says, one.printed()), one.printed()
        assert "Traceback" not in one.printed(), one.printed()
        noticed = one.detected_s if fault.says else time.monotonic() - one.began if code else None
        done = one.steps()
        fault.repair(one)
        recovered_s = None
        lost = 0
        if code and fault.resumes:
            resumed, recovered_s = _resume(one)
            lost = done - resumed
        if fault.resumes:
            same_run(one.run, undisturbed)
        assert 0 <= lost <= fault.lost, f"{lost} steps lost"
    return Measured(code, noticed, recovered_s, lost, fault.resumes)


def _resume(one: Scene) -> tuple[int, float]:
    """Resume the run, or start it again without a checkpoint. Returns the step from which, and the seconds to the next."""
    begin, first_s = time.monotonic(), None
    resumed = None if one.saved() else 0
    one.processes.clear()
    one.over = True
    one.fault.again(one)
    behind = False
    while any(process.poll() is None for process in one.processes):
        if resumed is None and (found := re.search(r"resuming after step ([\d,]+)", one.printed())):
            resumed = int(found[1].replace(",", ""))
        if resumed is not None and first_s is None:
            behind = behind or one.steps() <= resumed  # the steps that are lost have been removed
            first_s = time.monotonic() - begin if behind and one.steps() > resumed else None
        assert time.monotonic() - begin < _LIMIT_S, one.printed()
        time.sleep(0.05)
    assert one.end() == 0, one.printed()
    assert resumed is not None, one.printed()
    return resumed, first_s or time.monotonic() - begin


def record(fault: Fault, measured: Measured) -> None:
    """Add what was measured to the file of WORLDSIZE_FAULTS, if there is one."""
    if "WORLDSIZE_FAULTS" not in os.environ:
        return
    path = Path(os.environ["WORLDSIZE_FAULTS"])
    results = json.loads(path.read_text()) if path.exists() else {}
    promised = {"codes": fault.codes, "at_most": fault.lost}
    rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in asdict(measured).items()}
    path.write_text(json.dumps(dict(sorted((results | {fault.name: rounded | promised}).items())), indent=1) + "\n")
