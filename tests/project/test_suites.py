"""The runner of the test suites, on small suites with every kind of accident."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

CI = ROOT / ".ci"
TESTS = """
import pathlib, subprocess, sys
import pytest

def test_passes(): pass
def test_fails(): assert "spam" == "eggs"
def test_is_skipped(): pytest.skip("no spam")

def test_fails_once():
    seen = pathlib.Path("seen")
    if not seen.exists():
        seen.touch()
        raise RuntimeError("the first time")

@pytest.mark.timeout(10)
def test_waits_for_a_child_for_ever():
    code = "import time\\ndef stuck_here(): time.sleep(3600)\\nstuck_here()"
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
"""


def suite(folder: Path, steps: str) -> subprocess.CompletedProcess[str]:
    """Run these steps in a folder that has this environment's Python as its own; exit code 1 if a step failed."""
    (folder / ".venv").symlink_to(sys.prefix)
    script = f"import sys\nfrom runner import *\nr = Runner()\n{steps}\nr.close()\nr.print_table()\nsys.exit(r.failed)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(CI), str(ROOT / "tests" / "helpers")])}
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def accidents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("accidents")
    (folder / "test_all.py").write_text(TESTS)
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = -p time_limits\npythonpath = {CI}\ntimeout = 100\n")
    return folder, suite(folder, "r.run(Tests('tests', ['test_all.py']))")


@pytest.mark.slow
def test_the_end_is_a_table_and_the_tests_that_failed(accidents):
    _, done = accidents
    assert done.returncode == 1
    end = done.stdout.splitlines()[-20:]
    [row] = [line.split() for line in end if line.startswith("tests ")]
    assert row[2:] == ["1", "2", "1", "1"]  # passed, failed, flaky, skipped
    assert "failed: test_all.py::test_fails: AssertionError: assert 'spam' == 'eggs'" in "\n".join(end)
    assert "flaky: test_all.py::test_fails_once: RuntimeError: the first time" in end
    assert "skipped 1: no spam" in end


@pytest.mark.slow
def test_each_failed_test_ran_once_more_alone_and_both_outputs_are_kept(accidents):
    folder, done = accidents
    assert done.stdout.count("-- once more, alone: ") == 3
    logs = sorted(path.name for path in (folder / "build/ci").iterdir())
    assert logs == ["tests-again-1.log", "tests-again-2.log", "tests-again-3.log", "tests.log"]
    assert "the first time" in (folder / "build/ci/tests.log").read_text()
    assert "1 passed" in (folder / "build/ci/tests-again-2.log").read_text()


@pytest.mark.slow
def test_a_child_that_a_test_waits_for_is_shown_and_ended_in_time(accidents):
    _, done = accidents
    assert "stuck_here" in done.stdout  # the stack of the child
    assert "failed: test_all.py::test_waits_for_a_child_for_ever: Failed: Timeout" in done.stdout


def test_no_process_is_left(tmp_path):
    """Nor does one keep the suite waiting by holding its output open."""
    has_begun = "until grep -qa ^sleep /proc/$!/cmdline; do :; done"
    done = suite(tmp_path, f"r.run(Step('leave', ['bash', '-c', 'setsid sleep 3600 & {has_begun}; echo $! > left']))")
    assert done.returncode == 0, done.stdout
    assert "leave: ended 1 processes that were left: sleep 3600" in done.stdout
    assert not is_running(int((tmp_path / "left").read_text()))


def test_what_needs_the_network_is_tried_again(tmp_path):
    count = "echo try >> tries; test $(wc -l < tries) = 3"
    done = suite(tmp_path, f"import runner; runner.PAUSE = 0\nr.run(Step('download', ['bash', '-c', '{count}'], tries=3))")
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "tries").read_text() == "try\n" * 3


def test_a_command_that_does_not_end_is_ended(tmp_path):
    done = suite(tmp_path, "r.run(Step('endless', ['bash', '-c', 'sleep 3600 & sleep 3600'], limit=0.5))")
    assert done.returncode == 1
    assert "failed: endless: not finished after 0 s" in done.stdout


def test_a_command_that_fails_shows_its_last_lines_without_those_of_make(tmp_path):
    done = suite(tmp_path, "r.run(Step('check', ['bash', '-c', 'echo found; echo make: Error 1; exit 2']))")
    assert "failed: check: exit code 2; its last lines:\n    found\n" in done.stdout


def test_servers_stay_until_they_are_no_longer_needed(tmp_path):
    server = "sleep 3600 & echo $! > server"
    steps = f"""
with r.processes_kept():
    r.run(Step('start', ['bash', '-c', '{server}']))
    r.run(Step('use', ['bash', '-c', 'kill -0 $(cat server)']))
"""
    done = suite(tmp_path, steps)
    assert done.returncode == 0, done.stdout
    assert not is_running(int((tmp_path / "server").read_text()))


def test_a_crash_of_pytest_fails(tmp_path):
    (tmp_path / "test_crash.py").write_text("import os\ndef test_passes(): pass\ndef test_crashes(): os._exit(3)\n")
    done = suite(tmp_path, "r.run(Tests('tests', ['test_crash.py']))")
    assert done.returncode == 1
    assert "failed: tests: pytest: exit code 3" in done.stdout


def test_a_file_that_cannot_be_imported_fails(tmp_path):
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    done = suite(tmp_path, "r.run(Tests('tests', ['test_broken.py']))")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stdout.splitlines()[-1]


def test_many_failures_are_not_tried_again(tmp_path):
    (tmp_path / "test_many.py").write_text("".join(f"def test_{i}(): assert False\n" for i in range(20)))
    done = suite(tmp_path, "r.run(Tests('tests', ['test_many.py']))")
    assert done.returncode == 1
    assert "once more" not in done.stdout
