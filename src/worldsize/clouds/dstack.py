"""A dstack task (``dstack apply -f FILE``); it starts again when a node is interrupted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from worldsize.clouds.spec import CloudSpec
from worldsize.jobs.quantities import quantity


def problems(spec: CloudSpec) -> Iterable[str]:
    """What dstack would refuse."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{1,40}", spec.name):
        yield f"--name {spec.name}: dstack wants 2 to 41 lower-case letters, digits and '-', and a letter first"


def render(spec: CloudSpec) -> dict[str, Any]:
    """The task; its fields are those of dstack's task configuration."""
    memory = spec.resources.memory
    resources = {
        "gpu": spec.gpus,
        "cpu": None if spec.resources.cpu is None else f"{spec.resources.cpu}..",
        "memory": None if memory is None else f"{max(1, int(quantity(memory) / 1024**3))}GB..",
    }
    return {
        "type": "task",
        "name": spec.name,
        "nodes": spec.nodes,
        "python": "3.12",
        "env": dict(spec.env),
        "commands": [*spec.setup, spec.command],
        "resources": {name: value for name, value in resources.items() if value is not None},
        "retry": {"on_events": ["interruption"], "duration": "1d"},
    }
