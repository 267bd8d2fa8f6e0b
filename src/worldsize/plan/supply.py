"""Images/s that loaders deliver: what flags assume, and what was measured. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from worldsize.plan.model import Cluster


@dataclass(frozen=True)
class Delivered:
    """Images/s that the loader of each device delivered in a measurement; ``limit``: it could not deliver more."""

    cluster: Cluster
    images_per_s: float
    limit: bool


@dataclass(frozen=True)
class Supply:
    """Images/s that the loaders can deliver: per device, the shared storage to all devices together, and as measured."""

    per_device: float = math.inf
    total: float = math.inf
    measured: tuple[Delivered, ...] = ()

    def of(self, cluster: Cluster) -> float:
        """Images/s per device."""
        return min(self.per_device, self.total / cluster.devices, self._as_measured(cluster))

    def _as_measured(self, cluster: Cluster) -> float:
        """Unlimited unless a loader was the limit, and never less than as many or more devices received each."""
        limits = [d for d in self.measured if d.limit]
        # Loaders share cores and storage, so the limit of a larger cluster says little about a smaller one.
        limits = [d for d in limits if _within(d.cluster, cluster)] or limits
        reached = (d.images_per_s for d in self.measured if _within(cluster, d.cluster))
        return max(min((d.images_per_s for d in limits), default=math.inf), *reached, 0.0)


def _within(small: Cluster, large: Cluster) -> bool:
    return small.nodes <= large.nodes and small.per_node <= large.per_node
