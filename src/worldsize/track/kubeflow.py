"""Progress of a TrainJob: the percentage, the time left and the newest metrics, shown in the TrainJob's status.

Kubeflow's trainer (2.2 and later, feature gate TrainJobStatus) sets KUBEFLOW_TRAINER_STATUS_URL, _TOKEN and _CA_CERT in
the pods; the last two are paths of files. Newer versions call them KUBEFLOW_TRAINER_SERVER_*. The tracker is active where
they are set. Source: KEP-2779 in kubeflow/trainer.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from worldsize.config.recipe import Track
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base

_EVERY_S = 5.0
_TIMEOUT_S = 5.0
_NAMES = ("KUBEFLOW_TRAINER_STATUS", "KUBEFLOW_TRAINER_SERVER")


def requested(env: Mapping[str, str] = os.environ) -> bool:
    """Whether the pod has an address for reports."""
    return any(f"{name}_URL" in env for name in _NAMES)


class Tracker(base.Tracker):
    """Sends from a thread of its own: a server that does not answer must not delay training."""

    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        name = next(name for name in _NAMES if f"{name}_URL" in os.environ)
        self._url = os.environ[f"{name}_URL"]
        self._token = Path(os.environ[f"{name}_TOKEN"])
        self._tls = ssl.create_default_context(cafile=os.environ[f"{name}_CA_CERT"])
        self._total = 1
        self._step_s: float | None = None  # of the last steps
        self._newest: dict[str, Any] | None = None
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, name="kubeflow", daemon=True)

    def begin(self, facts: base.RunFacts) -> None:
        self._total = max(1, facts.total_steps)
        self._thread.start()

    def steps(self, steps: Sequence[base.Step]) -> None:
        if not steps:
            return
        last = steps[-1]
        self._step_s = sum(step.step_ms for step in steps) / len(steps) / 1000
        metrics = {"epoch": last.epoch, "loss": last.loss, "images_per_s": last.images_per_s}
        self._report(last.step, metrics)

    def epoch(self, epoch: base.Epoch) -> None:
        self._report(epoch.step, _metrics(epoch.val_loss, epoch.val_top1, epoch.val_map))

    def end(self, summary: base.Summary | None) -> None:
        if summary is not None:
            self._report(self._total, _metrics(summary.loss, summary.top1, summary.map))
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TIMEOUT_S)

    def _report(self, step: int, metrics: Mapping[str, float]) -> None:
        known = {} if self._newest is None else {one["name"]: one["value"] for one in self._newest["metrics"]}
        known |= {name: f"{value:.6g}" for name, value in metrics.items()}
        left = max(0, self._total - step)
        # Unknown if a resumed run begins with an evaluation: then left out.
        left_s = 0.0 if left == 0 else None if self._step_s is None else left * self._step_s
        self._newest = {
            "progressPercentage": min(100, 100 * step // self._total),
            **({} if left_s is None else {"estimatedRemainingSeconds": round(left_s)}),
            "metrics": [{"name": name, "value": value} for name, value in known.items()],
            "lastUpdatedTime": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self._wake.set()

    def _send(self) -> None:
        sent = None
        while True:
            self._wake.wait()
            self._wake.clear()
            ended, newest = self._ended.is_set(), self._newest
            if newest is not None and newest is not sent:
                sent = newest
                self._post({"trainerStatus": newest})
            if ended:
                return
            self._ended.wait(_EVERY_S)

    def _post(self, content: Mapping[str, Any]) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._url, json.dumps(content).encode(), headers, method="POST")
            # Kubernetes renews the token in its file. It must not follow a redirect to another host.
            request.add_unredirected_header("Authorization", f"Bearer {self._token.read_text().strip()}")
            urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=self._tls).close()
        except (OSError, ValueError, http.client.HTTPException):  # the next report may succeed; a run must not depend on it
            return


def _metrics(loss: float, top1: float, mean_average_precision: float | None) -> dict[str, float]:
    several = {} if mean_average_precision is None else {"val_map": mean_average_precision}  # labels per image
    return {"val_loss": loss, "val_top1": top1, **several}
