"""Several processes on this machine, through torch's elastic agent (what torchrun runs) as a library."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.place import LOCAL_LAUNCH
from worldsize.signals import handled

ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_AGENTS_PATIENCE_S = 20
_GRACE_S = 3600  # a step on a slow machine can be long, and a second signal ends the wait


@dataclass(frozen=True)
class Outcome:
    """Exit code of the run (0 is success) and the first failure's message, empty if it needs none."""

    code: int
    message: str = ""


def launch(argv: Sequence[str], processes: int) -> Outcome:
    """Run ``python -m worldsize ARGV`` as ``processes`` processes that meet on a free port of this machine.

    Signals are passed on; a second one leaves at once, and the workers with it.

    Returns:
        The first failure's own exit code and message.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with tempfile.TemporaryDirectory(prefix="worldsize-") as logs:
        settings: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
            "max_restarts": 0,
        }
        try:
            elastic(argv, processes, Path(logs), settings)
            return Outcome(0)
        except ChildFailedError as error:
            return cause({rank: f.exitcode for rank, f in error.failures.items()}, reports(Path(logs)), time.time())
        except SignalException as interrupt:
            told = reports(Path(logs))
            return told[0][1] if told else Outcome(128 + interrupt.sigval)


def elastic(argv: Sequence[str], processes: int, logs: Path, settings: Mapping[str, Any], tee: bool = False) -> None:
    """Run this machine's ``processes`` of a job under torch's elastic agent; it raises what went wrong.

    Args:
        logs: where workers leave their reports.
        settings: further fields of torch's `LaunchConfig`.
        tee: begin each line that a worker prints with its rank, as in ``[3] ...``.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _quieten("torch.distributed.elastic")
    fixed: dict[str, Any] = {
        "nproc_per_node": processes,
        "rdzv_backend": "c10d",
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=str(logs), tee=Std.ALL if tee else Std.NONE),
        "log_line_prefix_template": "[${rank}] ",
        "shutdown_timeout": _GRACE_S,
        "signals_to_handle": ",".join(number.name for number in handled()),
    }
    # The last two are younger than the oldest torch we allow.
    known = {k: v for k, v in (fixed | dict(settings)).items() if k in LaunchConfig.__dataclass_fields__}
    os.environ[LOCAL_LAUNCH] = str(processes)
    try:
        elastic_launch(LaunchConfig(**known), sys.executable)("-m", "worldsize", *argv)
    finally:
        del os.environ[LOCAL_LAUNCH]


def report(message: str, code: int) -> None:
    """In a worker: leave the failure where the agent and `launch` look for it."""
    path = os.environ.get(ERROR_VARIABLE)
    if path:
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(content | {"worldsize": {"code": code, "time": time.time()}}))


def _quieten(package: str) -> None:
    """torch gives each module's logger a level of its own; what they say of failures, we say in our words."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def reports(logs: Path) -> list[tuple[float, Outcome]]:
    """What the workers reported, with the time, first failure first."""
    found: list[tuple[float, Outcome]] = []
    for path in logs.rglob("error.json"):
        try:
            told: dict[str, Any] = json.loads(path.read_text())
            found.append((told["worldsize"]["time"], Outcome(told["worldsize"]["code"], told["message"]["message"])))
        except (ValueError, KeyError, TypeError):  # written by a process that died while writing
            continue
    return sorted(found, key=lambda report: report[0])


def cause(exit_codes: dict[int, int], reports: list[tuple[float, Outcome]], now: float) -> Outcome:
    """Why the run failed: a deliberate report, a rank that was killed, or a defect, in this order.

    A rank that is killed cannot report, and the others report that they lost it. The agent ends the ranks that are left
    with SIGTERM, and after half a minute with SIGKILL: those deaths are no cause.
    """
    deaths = [(rank, code) for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    if reports:
        at, first = reports[0]
        if first.code != 70 or not deaths or now - at > _AGENTS_PATIENCE_S:
            return first
    own_exits = [(rank, code) for rank, code in exit_codes.items() if code > 0]
    rank, code = (deaths or own_exits or list(exit_codes.items()))[0]
    return Outcome(_code(code), _death(code, rank))


def _code(exit_code: int) -> int:
    return 128 - exit_code if exit_code < 0 else exit_code


def _death(exit_code: int, rank: int) -> str:
    if exit_code >= 0:
        return f"rank {rank} ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; the kernel does that when memory runs out" if name == "SIGKILL" else ""
    return f"rank {rank} was ended by {name}{hint}"
