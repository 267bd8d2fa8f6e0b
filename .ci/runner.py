"""Runs the steps of a test suite one after the other, runs a failed test once more, and ends with a table.

Only Python's standard library: the first steps create the environment that everything else needs.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from process_tree import end_descendants, show_stacks

PYTHON = ".venv/bin/python"
LOGS = Path("build/ci")  # the output of each step, and of each test that was run once more
PAUSE = 20.0  # seconds before a step that needs the network is tried again
MOST_RETRIED = 8  # more failed tests than this are no accident
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass
class Step:
    """A command; its exit code decides. ``tries`` is above one for what needs the network; ``limit`` is in seconds."""

    name: str
    command: Sequence[str]
    tries: int = 1
    limit: float = 1200
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Tests(Step):
    """A step whose ``command`` is the arguments of pytest."""


@dataclass
class Result:
    """How a step ended. ``failed`` and ``flaky`` map tests to one line each, ``skipped`` reasons to counts."""

    step: str
    seconds: float = 0.0
    passed: int | None = None
    failed: dict[str, str] = field(default_factory=dict)
    flaky: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    not_run: str = ""


class Runner:
    """Runs steps in a scratch folder, which is their TMPDIR, and ends every process that they leave."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self._scratch = Path(tempfile.mkdtemp(prefix="ci-"))
        self._scratch.chmod(0o755)  # tests start servers as other users
        self._env = os.environ | {"TMPDIR": str(self._scratch), "PYTHONUNBUFFERED": "1"}
        # Without compiled modules, each of the many processes that tests start would compile torch again: 3 seconds.
        self._env.pop("PYTHONDONTWRITEBYTECODE", None)
        self._keep = False
        # Orphans become children of this process, so that it finds them.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        shutil.rmtree(LOGS, ignore_errors=True)
        LOGS.mkdir(parents=True)

    @property
    def failed(self) -> bool:
        return any(result.failed for result in self.results)

    def run(self, step: Step, not_run: str = "") -> Result:
        """Run a step to its end; with a reason in ``not_run``, only record it."""
        result = Result(step.name, not_run=not_run)
        self.results.append(result)
        print(f"\n== {step.name}{f': not run, {not_run}' if not_run else ''}", flush=True)
        begin = time.monotonic()
        if not not_run:
            (self._test if isinstance(step, Tests) else self._command)(step, result)
        result.seconds = time.monotonic() - begin
        return result

    @contextmanager
    def processes_kept(self) -> Iterator[None]:
        """Inside, what a step leaves running stays: servers that later steps need."""
        self._keep = True
        try:
            yield
        finally:
            self._keep = False
            end_descendants()

    def close(self) -> None:
        """End every process and remove the scratch folder."""
        end_descendants()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _command(self, step: Step, result: Result) -> None:
        for attempt in range(1, step.tries + 1):
            why = self._call(step.name, step.command, step)
            if not why:
                return
            if attempt < step.tries:
                print(f"{step.name}: {why}; another try in {PAUSE:.0f} s", flush=True)
                time.sleep(PAUSE)
        result.failed[step.name] = f"{why}; its last lines:\n{_last_lines(step.name)}"

    def _test(self, step: Step, result: Result) -> None:
        """Run the tests, then each failed one once more, alone. One that passes then is flaky, and not a failure."""
        first, why = self._pytest(step.name, step.command, step)
        result.passed, result.skipped = first.passed, first.skipped
        if why and (not first.failed or why != "exit code 1"):
            result.failed[step.name] = f"pytest: {why}"
        for number, (test, message) in enumerate(first.failed.items(), 1):
            if len(first.failed) > MOST_RETRIED:
                result.failed[test] = message
                continue
            print(f"\n-- once more, alone: {test}", flush=True)
            _, why = self._pytest(f"{step.name} again {number}", [test], step)
            (result.failed if why else result.flaky)[test] = message

    def _pytest(self, name: str, arguments: Sequence[str], step: Step) -> tuple[Outcome, str]:
        report = self._scratch / "report.jsonl"
        report.unlink(missing_ok=True)
        why = self._call(name, [PYTHON, "-m", "pytest", f"--report-log={report}", *arguments], step)
        return Outcome.read(report), why

    def _call(self, name: str, command: Sequence[str], step: Step) -> str:
        """Run a command and copy its output to stdout and its log. Returns why it failed; nothing if it did not.

        The output goes through a file, because a process that is left behind would keep a pipe open.
        """
        deadline = time.monotonic() + step.limit
        env = self._env | step.env
        with open(log_of(name), "wb") as log, open(log_of(name), "rb") as written:
            process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
            while process.poll() is None and time.monotonic() < deadline:
                _copy(written)
                _reap_orphans(process.pid)
                time.sleep(0.1)
            late = process.poll() is None
            if late:
                show_stacks(PYTHON)
            left = end_descendants() if late or not self._keep else []
            process.wait()
            _copy(written)
        if late:
            return f"not finished after {step.limit:.0f} s"
        if left:
            print(f"{name}: ended {len(left)} processes that were left: {'; '.join(left)}", flush=True)
        return f"exit code {process.returncode}" if process.returncode else ""

    def print_table(self) -> None:
        """The end of a suite's output: a row for each step, why tests were skipped, and the failed and flaky tests."""
        print(f"\n{'step':<28} {'seconds':>8} {'passed':>7} {'failed':>7} {'flaky':>6} {'skipped':>8}")
        for result in self.results:
            if result.not_run:
                print(f"{result.step:<28} not run: {result.not_run}")
                continue
            passed = "" if result.passed is None else result.passed
            counts = [len(result.failed), len(result.flaky), result.skipped.total()]
            failed, flaky, skipped = (count or "" for count in counts)
            print(f"{result.step:<28} {result.seconds:8.0f} {passed:>7} {failed:>7} {flaky:>6} {skipped:>8}")
        print(f"{'total':<28} {sum(result.seconds for result in self.results):8.0f}")
        reasons = sum((result.skipped for result in self.results), Counter())
        for reason, count in reasons.most_common():
            print(f"skipped {count}: {reason[:200]}")
        for word in ("flaky", "failed"):
            for result in self.results:
                for test, message in getattr(result, word).items():
                    print(f"{word}: {test}: {message}")
        sys.stdout.flush()


@dataclass
class Outcome:
    """What pytest-reportlog recorded."""

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def read(cls, path: Path) -> Outcome:
        """A last line that is incomplete, because pytest was killed, is left out."""
        outcome = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                outcome._count(json.loads(line))
            except ValueError:
                break
        return outcome

    def _count(self, event: dict[str, Any]) -> None:
        if event["$report_type"] not in ("TestReport", "CollectReport") or event["outcome"] is None:
            return
        test, outcome = event["nodeid"], event["outcome"]
        if outcome == "failed":
            self.failed.setdefault(test, _one_line(event["longrepr"]))
        elif outcome == "skipped":
            longrepr = event["longrepr"]
            reason = longrepr[2] if isinstance(longrepr, list) else event.get("wasxfail", str(longrepr))
            self.skipped[str(reason).removeprefix("Skipped: ")] += 1
        elif event.get("when") == "call" and test not in self.failed:
            self.passed += 1


def _reap_orphans(but: int) -> None:
    """As init would: a test that waits for the end of an orphan must not see a zombie."""
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
        os.waitpid(ended.si_pid, 0)


def log_of(name: str) -> Path:
    return LOGS / f"{name.replace(' ', '-')}.log"


def _last_lines(name: str, count: int = 5) -> str:
    """The end of a step's output, without what make says about it."""
    lines = log_of(name).read_text(errors="replace").split("\n")
    own = [line.rstrip()[:160] for line in lines if line.strip() and not line.startswith("make")]
    return "\n".join(f"    {line}" for line in own[-count:]) or "    (none)"


def _one_line(longrepr: Any) -> str:
    """The message of the exception, at most 160 characters."""
    if isinstance(longrepr, dict) and longrepr.get("reprcrash"):
        text = longrepr["reprcrash"]["message"]
    else:  # of a file that cannot be imported, whose last line is the error
        text = str(longrepr.get("longrepr", "") if isinstance(longrepr, dict) else longrepr).strip().rpartition("\n")[2]
    return " ".join(text.removeprefix("E ").split())[:160]


def _copy(written: BinaryIO) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(written.read())
    sys.stdout.buffer.flush()
