"""`worldsize bench allreduce`: sizes, arithmetic, real processes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from processes import environment, free_port, worldsize
from worldsize.bench.allreduce import BenchAllreduce, bus_factor, message_sizes
from worldsize.errors import UserError


def test_sizes_grow_by_the_factor_up_to_the_largest():
    assert message_sizes(BenchAllreduce(min_bytes="4K", max_bytes="1MB", factor=4)) == [2**12, 2**14, 2**16, 2**18, 2**20]
    assert message_sizes(BenchAllreduce(min_bytes="100", max_bytes="1000", factor=3)) == [100, 300, 900]


def test_bus_bandwidth_has_the_factor_of_nccl_tests():
    """From PERFORMANCE.md of nccl-tests: AllReduce 2 (n - 1) / n."""
    assert [bus_factor(n) for n in (2, 4, 8)] == [1.0, 1.5, 1.75]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_bytes": "5"}, "--min-bytes '5'"),
        ({"max_bytes": "many"}, "--max-bytes 'many'"),
        ({"min_bytes": "8K", "max_bytes": "4K"}, "larger than --max-bytes 4K"),
        ({"factor": 1}, "--factor 1"),
        ({"seconds": float("nan")}, "--seconds nan: must be positive"),
        ({"seconds": 0.0}, "--seconds 0: must be positive"),
    ],
)
def test_bad_sizes_are_user_errors(settings: dict, message: str):
    with pytest.raises(UserError, match=message):
        message_sizes(BenchAllreduce(**settings))


def test_one_process_is_refused(tmp_path: Path):
    done = worldsize("bench", "allreduce", "--procs", "1", cwd=tmp_path)
    assert done.returncode == 64
    assert "at least 2 processes" in done.stderr


def measured(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs/bench-allreduce-1/results.jsonl").read_text().splitlines()]


def check(rows: list[dict], processes: int, through: str) -> None:
    """The columns agree with each other."""
    assert [row["bytes"] for row in rows] == [4096, 2**18, 2**24]
    assert {row["processes"] for row in rows} == {processes}
    assert {row["through"] for row in rows} == {through}
    for row in rows:
        assert row["low_us"] <= row["us"] <= row["high_us"]
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1000)
        assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"] * 2 * (processes - 1) / processes)


SIZES = ("--max-bytes", "16M", "--factor", "64", "--seconds", "0.05")


def test_processes_on_this_machine(tmp_path: Path):
    done = worldsize("bench", "allreduce", "--procs", "2", *SIZES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(measured(tmp_path), 2, "gloo")
    assert "2 processes, gloo" in done.stdout
    assert (tmp_path / "runs/bench-allreduce-1/table.md").read_text() in done.stdout


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_horovod_over_mpi(tmp_path: Path):
    pytest.importorskip("horovod", reason="Horovod is not installed: make horovod")
    import subprocess

    command = ["mpirun", "-np", "2", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", "worldsize", "bench", "allreduce", "--through", "horovod", *SIZES]
    env = environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    check(measured(tmp_path), 2, "Horovod over MPI")
