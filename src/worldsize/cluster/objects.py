"""Kubernetes API objects as plain dictionaries: the labels that worldsize sets, and helpers to read objects (pure)."""

from __future__ import annotations

from typing import Any

from worldsize import __version__

Object = dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
COMPONENT_LABEL = "app.kubernetes.io/component"
RUN_LABEL = "app.kubernetes.io/instance"
# Label selector for all objects created by worldsize.
OURS = f"{MANAGED_BY}=worldsize"


def labels(name: str, component: str = "training") -> dict[str, str]:
    """Labels for every object that worldsize creates; RUN_LABEL distinguishes runs."""
    return {
        COMPONENT_LABEL: component,
        RUN_LABEL: name,
        MANAGED_BY: "worldsize",
        "app.kubernetes.io/name": "worldsize",
        "app.kubernetes.io/part-of": "worldsize",
        "app.kubernetes.io/version": __version__,
    }


def is_ours(one: Object) -> bool:
    """Whether worldsize created the object."""
    return bool(one["metadata"].get("labels", {}).get(MANAGED_BY) == "worldsize")


def event_time(event: Object) -> str:
    """When the event last occurred (RFC 3339). Scheduler events have neither firstTimestamp nor lastTimestamp."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(time) for time in times if time), str(event["metadata"].get("creationTimestamp", "")))
