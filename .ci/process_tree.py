"""The processes that this one has started, directly or through others: list them, show their stacks, end them.

Only Python's standard library, and Linux's /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def descendants() -> dict[int, str]:
    """Running processes below this one, with their command lines."""
    parents, lines = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if state not in "ZX":
            parents[int(entry.name)], lines[int(entry.name)] = int(parent), line.strip()[:200]
    found: dict[int, str] = {}
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= {pid: lines[pid] for pid in level}
    return found


def show_stacks(python: str | Path) -> None:
    """Print the Python stacks of all descendants with the py-spy next to this interpreter, if there is one."""
    tool = Path(python).parent / "py-spy"
    for pid, line in descendants().items() if tool.exists() else ():
        print(f"-- process {pid}: {line}", flush=True)
        try:
            done = subprocess.run([tool, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=20, check=False)
        except subprocess.TimeoutExpired:
            continue
        print(done.stdout or done.stderr.strip().split("\n")[0], flush=True)


def end_descendants() -> list[str]:
    """Kill all descendants; returns their command lines. In rounds: one may start another before it is killed."""
    ended: dict[int, str] = {}
    for _ in range(100):
        found = descendants()
        if not found:
            break
        ended |= found
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    return list(ended.values())
