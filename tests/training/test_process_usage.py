"""What a process used of its computer: processor time, and whether its cgroup held it back."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from worldsize.training.process_usage import UsageClock, cpu_statistics

STATISTICS = "nr_periods 3\nnr_throttled 2\n"


@pytest.mark.parametrize(
    ("membership", "place"),
    [
        ("0::/pod/box\n", "pod/box"),
        ("0::/pod/box\n", "."),  # in a container, whose own cgroup is mounted at the root
        ("4:memory:/x\n3:cpu,cpuacct:/pod/box\n0::/\n", "cpu,cpuacct/pod/box"),
        ("3:cpu:/pod\n0::/\n", "cpu/pod"),
    ],
)
def test_the_cgroup_is_found(tmp_path: Path, membership: str, place: str):
    (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "fs" / place).mkdir(parents=True)
    (tmp_path / "fs" / place / "cpu.stat").write_text(STATISTICS)
    found = cpu_statistics(tmp_path / "fs", tmp_path / "cgroup")
    assert found is not None
    assert found.resolve() == (tmp_path / "fs" / place / "cpu.stat").resolve()


def test_no_cgroup_is_no_error(tmp_path: Path):
    assert cpu_statistics(tmp_path, tmp_path / "none") is None


def use_processor(seconds: float) -> None:
    """Use this much processor time of this thread, without Python's lock, however long that takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(bytes(100_000))


def test_usage_sees_processor_time():
    before, clock = time.process_time(), UsageClock()
    begin = clock.read()
    use_processor(0.2)
    used = clock.read() - begin
    clock.close()
    assert 200 <= used.cpu_ms <= 1000 * (time.process_time() - before)
    assert used.paused_ms == 0
    assert 190 <= used.thread_ms <= used.cpu_ms + 10


def test_usage_tells_the_training_thread_from_others():
    clock = UsageClock()
    begin = clock.read()
    other = threading.Thread(target=use_processor, args=(0.3,))
    other.start()
    other.join()
    used = clock.read() - begin
    clock.close()
    assert used.thread_ms < 0.5 * used.cpu_ms
