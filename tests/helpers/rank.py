"""What forked processes do: run one command of worldsize, or several in sequence; see processes.py."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from multiprocessing.connection import Connection

import torch.distributed as dist

import sabotage
from worldsize import cli
from worldsize.training import build, request

# What every run imports, so that forked processes have it; they need not look for garbage in it.
assert build.train and request.from_arguments(["digits"])
gc.freeze()


def command(arguments: list[str], cwd: str, out: str, err: str, environment: dict[str, str]) -> None:
    """Run ``worldsize ARGUMENTS`` and exit with its code; ``out`` and ``err`` are the files for its output."""
    _enter(cwd, _appending(out), _appending(err), environment)
    sys.exit(cli.main(arguments))


def background(arguments: list[str], cwd: str, output: Connection, environment: dict[str, str], rule: str | None) -> None:
    """The same in one pipe, after the function ``rule`` of sabotage.py."""
    _enter(cwd, output.fileno(), output.fileno(), environment)
    output.close()
    if rule is not None:
        getattr(sabotage, rule)()
    sys.exit(cli.main(arguments))


def serve(commands: Connection, cwd: str, log: str, environment: dict[str, str], rule: str | None) -> None:
    """For each command (MASTER_PORT, arguments), run ``worldsize ARGUMENTS`` and send its exit code.

    Args:
        commands: ends the process when it is closed.
        log: file for stdout and stderr.
        rule: a function of sabotage.py that is called first.
    """
    _enter(cwd, _appending(log), _appending(log), environment)
    if rule is not None:
        getattr(sabotage, rule)()
    while True:
        try:
            os.environ["MASTER_PORT"], arguments = commands.recv()
        except EOFError:
            return
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        if dist.is_initialized():  # a failed run does not destroy its group
            dist.destroy_process_group()
        _free_memory()
        commands.send(code)


def _free_memory() -> None:
    """Return the memory of the last command to the system; otherwise it would be gigabytes after a few commands."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _appending(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _enter(cwd: str, out: int, err: int, environment: dict[str, str]) -> None:
    """Go on in this folder with these descriptors and variables."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
