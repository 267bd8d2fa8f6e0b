"""Starting worldsize as a user would, and reading what it left behind."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without any launcher's variables, and one thread a process."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "HOROVOD_", "SLURM_", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return clean | {"OMP_NUM_THREADS": "1"} | extra


def worldsize(*arguments: str | Path, cwd: Path, timeout: float = 240, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``worldsize ARGUMENTS`` to its end; output as text."""
    command = [sys.executable, "-m", "worldsize", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """Start ``worldsize ARGUMENTS`` and leave it running."""
    command = [sys.executable, "-m", "worldsize", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def world(size: int, arguments: Sequence[str | Path], cwd: Path, sabotage: str | None = None) -> None:
    """Run ``size`` processes that find each other by torchrun's variables; all must succeed.

    ``sabotage`` names a function of sabotage.py that is called in each of them first.
    """
    module = ["-m", "worldsize"] if sabotage is None else [str(HERE / "sabotage.py"), sabotage]
    port = str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, *module, *map(str, arguments)],
            cwd=cwd,
            env=environment(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(size),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(outputs)


class Ranks:
    """``size`` processes that do one command after the other: torch is imported once for many short runs.

    ``sabotage`` is as in `world`; ``local_size`` of them at a time take themselves for one machine.
    """

    def __init__(self, size: int, cwd: Path, sabotage: str | None = None, local_size: int | None = None) -> None:
        self._log = (cwd / f"ranks-{size}-{sabotage}-{local_size}-{free_port()}.log").open("w+")
        machine = local_size or size
        self._running = [
            subprocess.Popen(
                [sys.executable, HERE / "rank.py", *([sabotage] if sabotage else [])],
                cwd=cwd,
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE=str(size),
                    LOCAL_RANK=str(rank % machine),
                    LOCAL_WORLD_SIZE=str(machine),
                    MASTER_ADDR="127.0.0.1",
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, *arguments: str | Path, code: int = 0) -> str:
        """``worldsize ARGUMENTS`` on all ranks; each must end with this code. Returns what they printed."""
        begin = self._log.seek(0, os.SEEK_END)
        command = json.dumps([str(free_port()), [*map(str, arguments)]])
        for process in self._running:
            print(command, file=process.stdin, flush=True)
        answers = [self._answer(process) for process in self._running]
        self._log.seek(begin)
        output = self._log.read()
        assert answers == [code] * len(answers), f"{answers}\n{output}"
        return output

    def _answer(self, process: subprocess.Popen[str]) -> int | None:
        answered = select.poll()
        answered.register(process.stdout, select.POLLIN)
        ready = answered.poll(240_000)
        line = process.stdout.readline() if ready else ""
        return int(line) if line else process.poll()

    def close(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def records(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "step")]


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-????????"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "model.safetensors")


def momentum(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "optimizer.safetensors")


def ranks_own(run: Path) -> dict[str, torch.Tensor]:
    """What each rank keeps for itself, as ``RANK/KIND/NAME``."""
    return load_file(newest(run) / "ranks.safetensors")


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor, in the norm of that tensor.

    A tensor that is zero but for rounding (the momentum of a bias in front of a norm) is measured by the largest one.
    """
    assert a.keys() == b.keys()
    floor = 1e-6 * max(float(t.double().norm()) for t in b.values())
    return max(float((a[k].double() - b[k].double()).norm()) / max(float(b[k].double().norm()), floor) for k in a)


def overall_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The relative difference of all tensors together, as one vector."""
    assert a.keys() == b.keys()
    apart = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a)
    return (apart / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
