"""Helpers that start worldsize as a user would, and read the files it writes."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import multiprocessing
import multiprocessing.util  # what it does at exit comes after what is registered later
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file

from worldsize.checkpoint import rank_of

HERE = Path(__file__).parent
# All values of a record but those that are times.
NUMBERS = ("epoch", "step", "loss", "top1", "lr", "grad_norm", "broken", "train_loss", "train_top1", "val_loss", "val_top1")


def environment(**extra: str) -> dict[str, str]:
    """The caller's environment without launcher variables, with one thread per process."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMIX_", "HOROVOD_", "SLURM_", "TORCHELASTIC")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launcher)}
    return clean | {"OMP_NUM_THREADS": "1"} | extra


def worldsize(*arguments: str | Path, cwd: Path, timeout: float = 480, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``worldsize ARGUMENTS`` in a process of its own and wait for it; output as text."""
    command = [sys.executable, "-m", "worldsize", *map(str, arguments)]
    if "PYTHONPATH" in env:  # it decides what is imported, so nothing may be imported yet
        return subprocess.run(
            command, cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout, check=False
        )
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = _fork("command", command[3:], str(cwd), str(out), str(err), environment(**env))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout, out.read_bytes(), err.read_bytes())
        return subprocess.CompletedProcess(command, process.exitcode, out.read_text(), err.read_text())


def start(*arguments: str | Path, cwd: Path, rule: str | None = None, **env: str) -> Forked:
    """Start ``worldsize ARGUMENTS`` in the background; first call the function ``rule`` of sabotage.py."""
    output, far = _FORKS.Pipe(duplex=False)
    words = [*map(str, arguments)]
    process = _fork("background", words, str(cwd), far, environment(**env), rule)
    far.close()
    return Forked(process, output)


def start_sabotaged(rule: str, *arguments: str | Path, cwd: Path, **env: str) -> Forked:
    """The same; each of its ranks first calls the function ``rule`` of sabotage.py."""
    if "--procs" in arguments:
        (cwd / "sitecustomize.py").write_text(RANKS_CALL.format(str(HERE), rule))
        env["PYTHONPATH"] = os.pathsep.join([str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])])
    return start(*arguments, cwd=cwd, rule=rule, **env)


# Watchers are started, too; they would import torch for it.
RANKS_CALL = """import sys
if any("worldsize.cli" in word for word in sys.orig_argv):
    sys.path.append({0!r})
    import sabotage
    sabotage.{1}()
"""


def start_python(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """As `start`, in a Python of its own, which has these arguments and variables from its beginning."""
    command = [sys.executable, "-m", "worldsize", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def workers(launcher: int) -> list[int]:
    """The process ids that a launcher has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children]


# Forks rank processes from one process that has imported torch: importing it takes longer than most runs.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["rank"])
_NUMBERS = itertools.count()


class Ranks:
    """``size`` processes that connect through torchrun's variables and run several commands in sequence.

    ``sabotage`` names a function of sabotage.py that each process calls first; each group of ``local_size`` processes acts
    as one machine.
    """

    def __init__(self, size: int, cwd: Path, sabotage: str | None = None, local_size: int | None = None) -> None:
        self._log = cwd / f"ranks-{size}-{sabotage}-{local_size}-{next(_NUMBERS)}.log"
        self._log.touch()
        machine = local_size or size
        self._running: list[tuple[BaseProcess, Connection]] = []
        for rank in range(size):
            variables = environment(
                RANK=str(rank),
                WORLD_SIZE=str(size),
                LOCAL_RANK=str(rank % machine),
                LOCAL_WORLD_SIZE=str(machine),
                MASTER_ADDR="127.0.0.1",
            )
            near, far = _FORKS.Pipe()
            arguments = (far, str(cwd), str(self._log), variables, sabotage)
            process = _fork("serve", *arguments)
            far.close()
            self._running.append((process, near))

    def run(self, *arguments: str | Path, code: int = 0) -> str:
        """Run ``worldsize ARGUMENTS`` on all ranks; each must exit with ``code``. Returns their output."""
        begin = self._log.stat().st_size
        command = (str(free_port()), [*map(str, arguments)])
        for _, commands in self._running:
            commands.send(command)
        codes = [self._exit_code(process, commands) for process, commands in self._running]
        with open(self._log) as log:
            log.seek(begin)
            output = log.read()
        assert codes == [code] * len(codes), f"{codes}\n{output}"
        return output

    def _exit_code(self, process: BaseProcess, commands: Connection) -> int | None:
        try:
            return commands.recv() if commands.poll(480) else None
        except EOFError:
            process.join(240)
            return process.exitcode

    def close(self) -> None:
        for process, commands in self._running:
            commands.close()
            process.kill()
            process.join()


class Forked:
    """A process that the fork server has started, used as a `subprocess.Popen`; ``stdout`` has all of its output."""

    def __init__(self, process: BaseProcess, output: Connection) -> None:
        self._process = process
        self.stdout = os.fdopen(os.dup(output.fileno()), encoding="utf-8")
        output.close()
        assert process.pid is not None
        self.pid: int = process.pid
        atexit.register(self.kill)  # multiprocessing would wait for one that a failed test has left

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """What it prints until it and its children have ended."""
        texts: list[str] = []
        reader = threading.Thread(target=lambda: texts.append(self.stdout.read()), daemon=True)
        reader.start()
        reader.join(timeout)
        if reader.is_alive():
            raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0)
        self.wait(timeout)
        return "".join(texts), None

    def send_signal(self, number: int) -> None:
        """Send it, unless the process has ended, as that of `subprocess.Popen` does."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended, and its parent, the fork server, has noticed
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _fork(function: str, *arguments: object) -> BaseProcess:
    """A process that calls this function of rank.py; torch is imported there already."""
    with _variables_of_the_fork_server():
        process = _FORKS.Process(target=_call, args=(function, *arguments))
        process.start()
    return process


def _call(function: str, *arguments: object) -> None:
    import rank

    getattr(rank, function)(*arguments)


@contextmanager
def _variables_of_the_fork_server() -> Iterator[None]:
    """It finds this folder, and torch reads the number of threads when it is imported."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


# Enough for what a test uses at once.
_RESERVED: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A port for a server that cannot choose one itself, reserved until 64 more were asked for."""
    port = reserve(0)
    assert port is not None
    return port


def reserve(port: int) -> int | None:
    """Reserve this port, or any if it is 0, and return it; None if it is in use.

    A socket stays bound to it, so the system gives it to nobody, neither to a server that lets it choose nor to a client. A
    server that sets SO_REUSEADDR, as most do, can listen there all the same.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        return None
    _RESERVED.append(reserved)
    return int(reserved.getsockname()[1])


def records(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in records(run, "step")]


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-????????"))


def bits(run: Path) -> str:
    """The SHA-256 of the final weights and running statistics."""
    return hashlib.sha256((newest(run) / "model.safetensors").read_bytes()).hexdigest()


def numbers(run: Path) -> list[dict]:
    """All records without times."""
    lines = records(run, "step") + records(run, "epoch")
    assert len(lines) >= 12
    return [{key: value for key, value in line.items() if key in NUMBERS} for line in lines]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "model.safetensors")


def average_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "average.safetensors")


def momentum(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "optimizer.safetensors")


def ranks_own(run: Path) -> dict[str, torch.Tensor]:
    """The state that differs between ranks, as ``RANK/KIND/NAME``."""
    files = {rank_of(path.name): load_file(path) for path in newest(run).glob("rank-*.safetensors")}
    return {f"{rank}/{name}": tensor for rank, tensors in files.items() for name, tensor in tensors.items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, relative to the norm of that tensor.

    A tensor that is zero except for rounding (the momentum of a bias before a norm layer) is measured relative to the
    largest tensor.
    """
    assert a.keys() == b.keys()
    floor = 1e-6 * max(float(t.double().norm()) for t in b.values())
    return max(float((a[k].double() - b[k].double()).norm()) / max(float(b[k].double().norm()), floor) for k in a)


def overall_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The relative difference of all tensors together, as one vector."""
    assert a.keys() == b.keys()
    squared = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a)
    return (squared / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


def identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
