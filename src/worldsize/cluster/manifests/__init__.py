"""Kubernetes manifests (pure): converts a job specification to API objects. One module per kind of job."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from worldsize.cluster.manifests.base import Target

# Each target is a module of this package with a class `Target`.
TARGETS = ("pytorchjob", "mpijob", "trainjob")


def load_target(name: str) -> Target:
    """Import the target with this name."""
    target: Target = importlib.import_module(f"worldsize.cluster.manifests.{name}").Target()
    return target
