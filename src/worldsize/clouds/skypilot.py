"""A SkyPilot task (``sky launch FILE``, or ``sky jobs launch FILE`` to recover from preemptions)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from worldsize.clouds.spec import CloudSpec
from worldsize.jobs.quantities import quantity


def problems(spec: CloudSpec) -> Iterable[str]:
    """What SkyPilot would refuse."""
    if not re.fullmatch(r"[a-zA-Z0-9]+(?:[._-]{1,2}[a-zA-Z0-9]+)*", spec.name):
        yield f"--name {spec.name}: SkyPilot wants letters and digits, with '.', '_' or '-' between them"


def render(spec: CloudSpec) -> dict[str, Any]:
    """The task; its fields are those of SkyPilot's task YAML."""
    cpu = spec.resources.cpu
    resources = {"accelerators": spec.gpus, "cpus": cpu and f"{cpu}+", "memory": _gigabytes(spec.resources.memory)}
    return {
        "name": spec.name,
        "num_nodes": spec.nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": dict(spec.env),
        "setup": "\n".join(spec.setup) + "\n",
        "run": spec.command,
    }


def _gigabytes(memory: str | None) -> str | None:
    """SkyPilot counts memory in GiB, without a unit."""
    return None if memory is None else f"{max(1, int(quantity(memory) / 1024**3))}+"
