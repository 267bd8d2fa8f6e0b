"""Local launcher: several processes on this machine, under torch's elastic agent (torchrun) used as a library."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.distributed.rank import LOCAL_LAUNCH
from worldsize.distributed.stop_signals import handled, temporary_folder
from worldsize.errors import INTERNAL_ERROR, SIGNAL_BASE, SUCCESS, PeersUnreachable, Stalled
from worldsize.launch import agent_signals, entry_point, unkillable

ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
# What a rank may report because another one has ended.
EFFECTS = (INTERNAL_ERROR, PeersUnreachable.exit_code)
AGENT_KILL_S = 20  # a rank killed later than this after the first report may have been killed by the agent
_SHUTDOWN_TIMEOUT_S = 3600  # a step can take long on a slow machine; a second signal ends the wait


@dataclass(frozen=True)
class Outcome:
    """Exit code of the run (0 is success) and the message of the first failure, empty if none is needed."""

    code: int
    message: str = ""


def launch(argv: Sequence[str], processes: int) -> Outcome:
    """Run ``worldsize ARGV`` as ``processes`` processes that rendezvous on a free port of this machine.

    Signals are forwarded to the workers; a second signal ends the launcher and its workers immediately.

    Returns:
        The exit code and message of the first failure.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with temporary_folder() as logs:
        settings: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "run_id": uuid.uuid4().hex,
            "rdzv_endpoint": "127.0.0.1:0",
            "local_addr": "127.0.0.1",
            "max_restarts": 0,
        }
        try:
            run_elastic(argv, processes, logs, settings)
            return Outcome(SUCCESS)
        except ChildFailedError as error:
            return cause({rank: f.exitcode for rank, f in error.failures.items()}, reports(logs), time.time())
        except SignalException as interrupt:
            reported = reports(logs)
            return reported[0][1] if reported else Outcome(SIGNAL_BASE + interrupt.sigval)


def run_elastic(argv: Sequence[str], processes: int, logs: Path, settings: Mapping[str, Any], tee: bool = False) -> None:
    """Run this machine's ``processes`` of a job under torch's elastic agent; failures raise torch's exceptions.

    Args:
        logs: folder for the workers' reports.
        settings: additional fields of torch's `LaunchConfig`.
        tee: prefix each line of a worker's output with its rank, as in ``[3] ...``.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence("torch.distributed.elastic")
    defaults: dict[str, Any] = {
        "nproc_per_node": processes,
        "rdzv_backend": "c10d",
        "monitor_interval": 0.1,
        "logs_specs": DefaultLogsSpecs(log_dir=str(logs), tee=Std.ALL if tee else Std.NONE),
        "log_line_prefix_template": "[${rank}] ",
        "shutdown_timeout": _SHUTDOWN_TIMEOUT_S,
        "signals_to_handle": ",".join(number.name for number in handled()),
    }
    # The oldest supported torch lacks the last two.
    supported = {k: v for k, v in (defaults | dict(settings)).items() if k in LaunchConfig.__dataclass_fields__}
    os.environ[LOCAL_LAUNCH] = str(processes)
    try:
        program, *words = entry_point.worker(sys.executable)
        alone = settings["max_nodes"] == 1
        watched = unkillable.not_waited_for(logs, lambda: _stall(logs))
        with agent_signals.interrupting_once(logs, alone) as workers, watched:
            try:
                elastic_launch(LaunchConfig(**supported), program)(*words, *argv)
            except SignalException:  # perhaps it came while they were ending
                if not (alone and workers.succeeded()):
                    raise
    finally:
        del os.environ[LOCAL_LAUNCH]


def report(message: str, code: int) -> bool:
    """In a worker: write the failure where torch's agent and `launch` read it. Returns whether they can."""
    path = os.environ.get(ERROR_VARIABLE)
    if not path:
        return True
    content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
    text = json.dumps(content | {"worldsize": {"code": code, "time": time.time()}})
    try:
        Path(path).write_text(text)
    except OSError:  # no file descriptor or disk space is left, which may be what the message says
        try:
            os.close(0)  # a process that ends reads no more
            Path(path).write_text(text)
        except OSError:
            return False
    return True


def _stall(logs: Path) -> tuple[float, str] | None:
    """When the newest hang was reported, and its message."""
    found = [(at, outcome.message) for at, outcome in reports(logs) if outcome.code == Stalled.exit_code]
    return max(found, default=None)


def _silence(package: str) -> None:
    """Silence torch's failure logs, which repeat our messages; torch sets a level on every module's logger separately."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def reports(logs: Path) -> list[tuple[float, Outcome]]:
    """The workers' reports with their times (seconds since the epoch), first failure first."""
    found: list[tuple[float, Outcome]] = []
    for path in logs.rglob("error.json"):
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            ours = content["worldsize"]
            found.append((ours["time"], Outcome(ours["code"], content["message"]["message"])))
        except (ValueError, KeyError, TypeError):  # the process died while writing it
            continue
    return sorted(found, key=lambda report: report[0])


def cause(exit_codes: dict[int, int], reports: list[tuple[float, Outcome]], now: float) -> Outcome:
    """Why the run failed, in this order: an expected error that a rank reported, a rank that was killed, any other error.

    A killed rank cannot report, and the other ranks report that they lost it, or an internal error. The agent stops the
    remaining ranks with SIGTERM, and after 30 s with SIGKILL: those deaths are not the cause.
    """
    deaths = [(rank, code) for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    if reports:
        at, first = reports[0]
        if first.code not in EFFECTS or not deaths or now - at > AGENT_KILL_S:
            return first
    exits = [(rank, code) for rank, code in exit_codes.items() if code > 0]
    # NCCL aborts the ranks that lost one on a GPU: of two deaths, an abort is the later one.
    deaths.sort(key=lambda death: death[1] == -signal.SIGABRT)
    rank, code = (deaths or exits or list(exit_codes.items()))[0]
    return Outcome(as_in_a_shell(code), death(code, f"rank {rank}"))


def as_in_a_shell(exit_code: int) -> int:
    """The exit code that a shell has for a process: 128 and the signal's number for one that a signal ended."""
    return SIGNAL_BASE - exit_code if exit_code < 0 else exit_code


def death(exit_code: int, who: str) -> str:
    """How a process ended. ``exit_code`` is that of `subprocess`, ``who`` its name for the user."""
    if exit_code >= 0:
        return f"{who} exited with code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; a likely cause is the kernel's out-of-memory killer" if name == "SIGKILL" else ""
    return f"{who} was killed by {name}{hint}"
