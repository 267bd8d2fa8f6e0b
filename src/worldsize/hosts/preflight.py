"""Checks of the hosts before anything is started on them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from worldsize import __version__
from worldsize.hosts.connection import LOST, Connection
from worldsize.hosts.spec import HostsSpec, peers
from worldsize.launch import entry_point

_SKEW_S = 5.0
_TIMEOUT_S = 120.0


def problems(spec: HostsSpec, config: Path | None) -> list[str]:
    """What keeps the job from running on its hosts; empty if nothing is known to."""
    with ThreadPoolExecutor(len(spec.hosts)) as pool:
        answers = list(pool.map(lambda rank: _ask(spec, rank, config), range(spec.nodes)))
    found = [answer for answer in answers if isinstance(answer, str)]
    if found:
        return found
    facts = [(host, answer) for host, answer in zip(spec.hosts, answers, strict=True) if not isinstance(answer, str)]
    return [problem for host, fact in facts for problem in compare(spec, host, fact, facts[0])]


def compare(spec: HostsSpec, host: str, fact: dict[str, Any], first: tuple[str, dict[str, Any]]) -> Iterable[str]:
    """Problems of one host, see `probe.describe`; ``first`` is the first host and its facts."""
    name, reference = first
    if fact["version"] != __version__:
        yield f"{host} has worldsize {fact['version']}, this machine has {__version__}: install the same version"
    if fact["version"] != __version__ or reference["version"] != __version__:
        return  # other versions may describe themselves in another way
    if fact["torch"] != reference["torch"]:
        yield f"{host} has torch {fact['torch']}, {name} has {reference['torch']}: install the same version"
    # The host looked at its clock between these two.
    skew = fact["time"] - min(max(fact["time"], fact["asked"]), fact["answered"])
    if abs(skew) > _SKEW_S:
        yield f"the clock of {host} is {skew:+.0f} s off this machine's: synchronize it (NTP)"
    if spec.resources.gpus > fact["gpus"]:
        yield f"{host} has {fact['gpus']} GPUs, the job needs {spec.resources.gpus}: lower the processes, or pass --gpus 0"
    if not fact["port_free"]:
        yield f"port {spec.port} is in use on {host}: pass another --port"
    if not fact["writable"]:
        yield f"{host} cannot write to {spec.out}: pass another --out"
    for peer, found in fact["routes"].items():
        if found is None:
            yield f"{host} does not reach {peer}: check its name there, or pass --address"
    if fact["problem"] is not None:
        yield f"{host}: {fact['problem']}"
    elif fact["data"] != reference["data"]:
        ours, theirs = _brief(fact["data"]), _brief(reference["data"])
        yield f"the data of {host} ({ours}) differs from that of {name} ({theirs}): copy it from one to the other"


def _brief(data: dict[str, Any] | None) -> str:
    return f"{data['train_samples']:,} training images, {data['train'][:8]}" if data else "none"


def _ask(spec: HostsSpec, rank: int, config: Path | None) -> dict[str, Any] | str:
    """The host's facts; or why there are none."""
    asked = {
        "out": str(spec.out),
        "port": spec.port if rank == 0 else 0,
        "gpus": spec.resources.gpus > 0,
        "recipe": spec.recipe,
        "peers": peers(spec, rank),
    }
    lines: list[str] = []
    probe = shlex.join(entry_point.command(spec.python, "worldsize.hosts.probe"))
    host = spec.hosts[rank]
    one = Connection(host, f"cd {shlex.quote(str(spec.folder))} && {probe}", lines.append, config)
    one.send(json.dumps(asked).encode())
    one.finish()
    begun, deadline = time.time(), time.monotonic() + _TIMEOUT_S
    while (code := one.poll()) is None:
        if time.monotonic() > deadline:
            one.kill()
            return f"{host} did not answer within {_TIMEOUT_S:.0f} s"
        time.sleep(0.05)
    one.wait()
    if (facts := _facts(lines)) is not None:
        return facts | {"asked": begun, "answered": time.time()}
    if code == LOST:
        return one.reason()
    said = "; ".join(lines[-2:]) or f"exit code {code}"
    return f"{host} cannot run worldsize ({said}): check --folder and --python, {spec.python} here"


def _facts(lines: list[str]) -> dict[str, Any] | None:
    """The answer of `worldsize.hosts.probe` among the lines of a host, which may print others; None if there is none."""
    for line in reversed(lines):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and "version" in found:
                return found
    return None
