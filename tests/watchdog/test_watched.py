"""Real runs in which one process makes no progress, and healthy runs that are slow."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from interruptions import SETTINGS, same_run, start_until
from processes import environment, start_python, start_sabotaged, workers, worldsize
from trees import tree
from waiting import until
from worldsize.watchdog.process import is_alive, state_of

# As short as a test needs; the default is 30 s.
QUICK = ("--parallel.stall-s", "2")
PROGRESS = "has made no progress for"
UNIFIED = Path("/sys/fs/cgroup/cgroup.procs").exists()  # cgroup v2, which can kill frozen processes


def watchers(rank: int) -> list[int]:
    """The watchers among the children of a process."""
    children = Path(f"/proc/{rank}/task/{rank}/children").read_text().split()
    return [int(pid) for pid in children if b"watchdog" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def has_spoken(watcher: int) -> bool:
    """Whether it has told the watcher of rank 0 what it sees: it does so as soon as it has a socket, and sleeps then."""
    sockets = [file for file in Path(f"/proc/{watcher}/fd").iterdir() if str(file.readlink()).startswith("socket:")]
    state = state_of(watcher)
    return bool(sockets) and state is not None and state.letter == "S"


def images(root: Path) -> Path:
    """A folder of 32 images, half of them for training."""
    return tree(
        root, *(f"{split}/{name}/{i}.png" for split in ("train", "val") for name in ("cat", "dog") for i in range(8))
    )


FOLDER = (
    *("--data.name", "folder", "--model.name", "shufflenet_v2_x0_5", "--precision", "fp32", "--epochs", "8"),
    *("--schedule.warmup-epochs", "0"),
    *("--global-batch", "8", "--micro-batch", "4", "--data.train-crop-size", "16", "--data.val-crop-size", "16"),
    *("--data.val-resize-size", "16", "--procs", "2", "--name", "a", "--track.every-seconds", "0"),
)


def on_folder(cwd: Path) -> tuple[str, ...]:
    return ("train", "digits", "--data.root", str(images(cwd / "images")), *FOLDER)


def test_a_stopped_process_is_named_and_autoresume_goes_on_to_the_same_bits(tmp_path, ranks):
    ranks(2).run("train", "digits", *SETTINGS, "--name", "undisturbed")
    process = start_until(tmp_path, "a", 2, 6, "--autoresume", "--checkpoint.every-steps", "4", *QUICK)
    stopped = workers(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "go").touch()
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    [message] = re.findall(rf"worldsize: rank 1 \(\S+, process {stopped}\) {PROGRESS} .*", output)
    assert "the process is stopped (SIGSTOP or a debugger)" in message and "--resume runs/a" in message
    assert output.count("worldsize: starting again") == 1
    run = tmp_path / "runs" / "a"
    same_run(run, ranks.cwd / "runs" / "undisturbed")
    # What the stopped process did, and what the one did that waited for it.
    for rank in (0, 1):
        assert "trainer.py" in (run / "stalls" / f"rank-{rank}.txt").read_text()
    assert not is_alive(stopped)


@pytest.mark.slow
def test_under_torchrun_too(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "worldsize"]
    process = subprocess.Popen(
        [*torchrun, "train", "digits", *SETTINGS, "--epochs", "1000", "--evaluate-every", "1000", "--name", "a", *QUICK],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), "some steps are done", running=process)
    os.kill(stopped := workers(process.pid)[1], signal.SIGSTOP)
    output = process.communicate(timeout=400)[0]
    assert process.returncode != 0
    assert f"process {stopped}) {PROGRESS}" in output and "internal error" not in output


@pytest.mark.slow
def test_a_process_alone_ends_too(tmp_path):
    process = start_until(tmp_path, "a", 1, 3, *QUICK)
    os.kill(process.pid, signal.SIGSTOP)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 72, output
    assert f"rank 0 ({os.uname().nodename}, process {process.pid}) {PROGRESS}" in output


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["slow_storage", "slow_computer"])
def test_a_slow_run_goes_on(tmp_path, rule):
    """It is reported, and may take ten times as long as is reported."""
    process = start_sabotaged(rule, *on_folder(tmp_path), *QUICK, cwd=tmp_path)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    warning = next((line for line in lines if "worldsize: warning: rank 1" in line), "")
    (tmp_path / "go").touch()
    output = warning + process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert PROGRESS in warning


@pytest.fixture
def freezer():
    """freezer(pids, frozen=True): freeze these processes together, as a container is frozen, or let them go on."""
    group = Path("/sys/fs/cgroup" if UNIFIED else "/sys/fs/cgroup/freezer") / f"worldsize-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error.strerror}")
    state, words = (group / "cgroup.freeze", "01") if UNIFIED else (group / "freezer.state", ("THAWED", "FROZEN"))

    def set_state(pids: list[int], frozen: bool = True) -> None:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        state.write_text(words[frozen])

    yield set_state
    set_state([], frozen=False)
    until(lambda: not (group / "cgroup.procs").read_text(), "its processes have ended")
    group.rmdir()


@pytest.mark.slow
def test_a_frozen_process_is_named_and_not_waited_for(tmp_path, freezer):
    """Its watcher is frozen with it, and with cgroup v1 it cannot even be killed; a process that waits for dead storage
    cannot, either."""
    process = start_until(tmp_path, "a", 2, 6, *QUICK)
    frozen = workers(process.pid)[1]
    until(lambda: all(map(has_spoken, watchers(frozen))), "its watcher was heard", running=process)
    freezer([frozen, *watchers(frozen)])
    assert process.wait(400) == 72
    freezer([], frozen=False)  # it still has the other end of the output
    output = process.communicate(timeout=400)[0]
    assert f"worldsize: rank 1 ({os.uname().nodename}, process {frozen}) has not been heard of for" in output
    assert f"worldsize: process {frozen} cannot be ended now" in output or UNIFIED


@pytest.mark.slow
def test_a_machine_that_slept_goes_on(tmp_path):
    process = start_until(tmp_path, "a", 2, 3, *QUICK)
    ranks = workers(process.pid)
    everything = [*ranks, *(pid for rank in ranks for pid in watchers(rank))]
    assert len(everything) == 4
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    # As long as it takes another run to be found stuck.
    other = worldsize("train", "digits", *SETTINGS, "--name", "b", "--max-steps", "9", cwd=tmp_path)
    assert other.returncode == 0, other.stderr
    for pid in everything[::-1]:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "go").touch()
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert PROGRESS not in output


@pytest.mark.slow
def test_nothing_is_left_of_a_watcher(tmp_path):
    process = start_until(tmp_path, "a", 2, 3)
    left = [pid for rank in workers(process.pid) for pid in watchers(rank)]
    assert len(left) == 2
    for pid in (*workers(process.pid), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(is_alive(pid) for pid in left), "the watchers have ended")


def test_other_users_cannot_see_what_watchers_recognize_each_other_by(tmp_path):
    """Every user can read the arguments of a process."""
    process = start_until(tmp_path, "a", 2, 3)
    words = [Path(f"/proc/{pid}/cmdline").read_bytes() for rank in workers(process.pid) for pid in watchers(rank)]
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=400)
    assert len(words) == 2
    assert not any(b"token" in those for those in words)


def test_zero_switches_it_off_with_a_warning(tmp_path):
    done = worldsize(
        "train", "digits", *SETTINGS, "--name", "a", "--max-steps", "1", "--parallel.stall-s", "0", cwd=tmp_path
    )
    assert done.returncode == 0 and "--parallel.stall-s 0: a process that makes no progress is not noticed" in done.stderr


def test_a_full_disk_of_temporary_files_costs_a_warning(tmp_path):
    full = tmp_path / "tmp"
    full.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "t", full], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        one = ("train", "digits", *SETTINGS, "--name", "a", "--max-steps", "1", "--device", "cpu")
        process = start_python(*one, cwd=tmp_path, TMPDIR=str(full))
        output = process.communicate(timeout=400)[0]
    finally:
        subprocess.run(["umount", full], check=True)
    assert process.returncode == 0, output
    assert "rank 0 is not watched, so that it may hang unnoticed: " in output and "No space left" in output


def test_a_watcher_that_cannot_start_costs_a_warning(tmp_path):
    one = ("train", "digits", *SETTINGS, "--name", "a", "--max-steps", "1", "--device", "cpu")
    process = start_sabotaged("no_heartbeat", *one, cwd=tmp_path)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert "rank 0 is not watched, so that it may hang unnoticed: " in output and "No space left" in output
