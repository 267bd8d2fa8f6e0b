"""A checkpoint before the memory or the disk runs out. The files of a cgroup are those of the kernel, in another folder."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from interruptions import start_until
from processes import newest, workers
from waiting import until
from worldsize.training import early_signs

GIB = 1 << 30


def fill(
    folder: Path, anon: float, file: float = 0.0, limit: str = str(10 * GIB), high: str = "max", full: float = 0.0
) -> None:
    """Describe a cgroup with this memory in GiB, and % of the time that it waits for memory."""
    folder.mkdir(exist_ok=True)
    pressure = f"some avg10=99.00 avg60=0.00 avg300=0.00 total=0\nfull avg10={full:.2f} avg60=0.00 avg300=0.00 total=0\n"
    files = {
        "membership": "12:cpu:/old\n0::/\n",
        "memory.stat": f"anon {int(anon * GIB)}\nfile {int(file * GIB)}\nshmem {GIB // 2}\n",
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.pressure": pressure,
        "memory.current": f"{int((anon + file) * GIB)}\n",
    }
    for name, text in files.items():
        temporary = folder / f"{name}.new"
        temporary.write_text(text)
        temporary.rename(folder / name)


class Machine:
    """A cgroup and a clock of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cgroup, self.now, self.free = folder / "cgroup", 0.0, 100 * GIB
        fill(self.cgroup, 1)
        monkeypatch.setattr(early_signs, "ROOT", self.cgroup)
        monkeypatch.setattr(early_signs, "MEMBERSHIP", self.cgroup / "membership")
        monkeypatch.setattr(early_signs, "time", SimpleNamespace(monotonic=lambda: self.now))

    def after(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("state", "sign"),
    [
        ({"anon": 9.2}, "need 9.70 of the 10.00 GiB of memory that their cgroup (container) allows, and may be killed"),
        ({"anon": 8.0, "file": 2.0}, None),  # the kernel takes cached files back
        ({"anon": 9.2, "limit": "max"}, None),
        ({"anon": 4.9, "high": str(5 * GIB)}, "need 5.40 of the 5.00 GiB"),
        ({"anon": 1.0, "full": 30.0}, "wait for memory that their cgroup (container) lacks"),
        ({"anon": 1.0, "full": 3.0}, None),
    ],
)
def test_memory_that_the_kernel_cannot_take_back_is_a_sign(machine, caplog, state, sign):
    signs = early_signs.EarlySigns(None)
    assert not signs.begun(0)
    fill(machine.cgroup, **{"file": 0.5} | state)
    machine.after(2)
    assert signs.begun(0) == (sign is not None)
    assert [sign in record.getMessage() for record in caplog.records] == ([True] if sign else [])


def test_a_sign_that_stays_asks_once_and_one_that_returns_asks_again(machine):
    signs = early_signs.EarlySigns(None)
    asked = []
    for anon in (9.8, 9.8, 1.0, 9.8, 9.8):
        fill(machine.cgroup, anon)
        asked.append(signs.begun(0))
        machine.after(100)
    assert asked == [True, False, False, True, False]


def test_signs_that_come_and_go_do_not_cost_a_checkpoint_each_second(machine):
    signs = early_signs.EarlySigns(None)
    asked = 0
    for second in range(60):
        fill(machine.cgroup, 9.8 if second % 2 == 0 else 1.0)
        asked += signs.begun(0)
        machine.after(1.1)
    assert asked == 2


def test_a_disk_without_room_for_two_checkpoints_is_a_sign(machine, tmp_path, caplog):
    free = shutil.disk_usage(tmp_path).free
    signs = early_signs.EarlySigns(tmp_path)
    assert not signs.begun(free // 100)
    machine.after(2)
    assert signs.begun(free)
    assert (
        f"{tmp_path} has" in caplog.text
        and "free some, or lower --checkpoint.keep; saving a checkpoint early" in caplog.text
    )
    assert not early_signs.EarlySigns(tmp_path).begun(0)
    assert not early_signs.EarlySigns(tmp_path / "nowhere").begun(free)


def test_a_disk_that_is_small_from_the_start_is_not_filled_with_the_first_step(machine, tmp_path, caplog):
    free = shutil.disk_usage(tmp_path).free
    signs = early_signs.EarlySigns(tmp_path)
    assert not signs.begun(0)  # unknown
    for _ in range(3):
        machine.after(100)
        assert not signs.begun(free)
    [record] = caplog.records
    assert "beside the one before: free some" in record.getMessage() and "early" not in record.getMessage()
    fill(machine.cgroup, 9.8)
    machine.after(2)
    assert signs.begun(free)  # for the memory


def test_without_cgroups_there_are_no_signs(machine, tmp_path):
    shutil.rmtree(machine.cgroup)
    assert not early_signs.EarlySigns(tmp_path).begun(1)


@pytest.mark.slow
def test_a_run_that_is_killed_for_its_memory_has_saved_at_the_first_sign(tmp_path):
    cgroup = tmp_path / "cgroup"
    fill(cgroup, 1)
    process = start_until(tmp_path, "a", 2, 3, "--epochs", "1000", "--evaluate-every", "1000", rule="own_cgroup")
    checkpoints = tmp_path / "runs" / "a" / "checkpoints"
    assert not list(checkpoints.glob("step-*"))
    fill(cgroup, 9.8)
    until(lambda: list(checkpoints.glob("step-????????")), "the run has saved", running=process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert output.count("may be killed: raise its limit") == 1, output
    assert newest(tmp_path / "runs" / "a")
