"""Records what the model sees and how it changes in chosen steps, for ``worldsize replay``. Training is not affected."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from worldsize.data.loading.loader import Batch
from worldsize.data.samples import Samples
from worldsize.training.objective import Objective

# FIRST:LAST:FOLDER, set by the command for the processes that it starts.
VARIABLE = "WORLDSIZE_INSPECT"


class StepRecorder:
    """Writes to ``folder``, for the steps ``first`` to ``last`` (1-based), two kinds of files.

    ``step-N.rank-R.npz`` has the n samples of a rank in order: ``pixels`` uint8 (n, size, size, 3); ``names``; ``samples``,
    ``labels`` and ``predictions`` int64 (n,); ``losses`` and the ``probabilities`` of the labels float64 (n,). With several
    labels per image, labels and predictions are uint8 (n, classes), and the probability is that of exactly these labels.
    Images are mixed with their partners, if the recipe mixes; labels are then those of the larger part, and ``shares``
    float64 (n,) are the parts, 0.5 to 1.
    ``step-N.json``, of rank 0, has the names of the ``classes`` and the ``norms`` of each parameter's gradient (after
    clipping), weight and update.
    """

    def __init__(self, folder: Path, first: int, last: int, rank: int, samples: Samples, classes: Sequence[str]) -> None:
        self._folder = folder
        self._first = first
        self._last = last
        self._rank = rank
        self._samples = samples
        self._classes = list(classes)
        self._batches: list[dict[str, Any]] = []
        self._before: dict[str, torch.Tensor] = {}
        self._norms: dict[str, dict[str, float]] = {}

    def wants(self, step: int) -> bool:
        """Whether this step (1-based) is inspected."""
        return self._first <= step <= self._last

    def forward(self, batch: Batch, losses: torch.Tensor, logits: torch.Tensor, objective: Objective) -> None:
        """A micro-batch, and what the step computes of it: its losses (n,) and logits (n, classes)."""
        logits = logits.detach().double().cpu()
        labels = objective.likeliest(batch.labels, batch.mix).cpu()
        predictions, probabilities = _predicted(logits, labels)
        self._batches.append(
            {
                "pixels": objective.mixed_pixels(batch.pixels, batch.mix).cpu().numpy().copy(),
                "samples": batch.indices.copy(),
                "labels": labels.numpy().copy(),
                "shares": _shares(batch),
                "predictions": predictions.numpy(),
                "losses": losses.detach().double().cpu().numpy(),
                "probabilities": probabilities.numpy(),
            }
        )

    def before_update(self, model: nn.Module) -> None:
        """The gradients are complete."""
        self._before = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._norms = {
            name: {"gradient": _norm(p.grad), "weight": _norm(p)}
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    def after_update(self, step: int, model: nn.Module) -> None:
        """The optimizer has applied them: write everything of this step."""
        for name, parameter in model.named_parameters():
            if name in self._norms:
                self._norms[name]["update"] = _norm(parameter.detach() - self._before[name])
        batches, self._batches, self._before = self._batches, [], {}
        arrays: dict[str, Any] = {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}
        arrays["names"] = np.array([self._samples.name(int(i)) for i in arrays["samples"]])
        np.savez(self._folder / f"step-{step}.rank-{self._rank}.npz", **arrays)
        if self._rank == 0:
            written = json.dumps({"classes": self._classes, "norms": self._norms})
            (self._folder / f"step-{step}.json").write_text(written, "utf-8")


def _shares(batch: Batch) -> NDArray[np.float64]:
    """The weight of each image's label, (n,): more than half if it is mixed."""
    own = np.ones(len(batch.labels)) if batch.mix is None else batch.mix[:, 0].double().cpu().numpy()
    return np.maximum(own, 1 - own)


def _predicted(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if labels.ndim == 1:
        return logits.argmax(1), logits.softmax(1)[torch.arange(len(logits)), labels]
    log_odds = torch.where(labels > 0, logits, -logits)
    return (logits > 0).to(labels.dtype), functional.logsigmoid(log_odds).sum(1).exp()


def _norm(tensor: torch.Tensor | None) -> float:
    return 0.0 if tensor is None else float(tensor.detach().double().norm())


def from_environment(
    rank: int, samples: Samples, classes: Sequence[str], env: Mapping[str, str] = os.environ
) -> StepRecorder | None:
    """The recorder that the parent process asked for, if any."""
    if VARIABLE not in env:
        return None
    first, last, folder = env[VARIABLE].split(":", 2)
    return StepRecorder(Path(folder), int(first), int(last), rank, samples, classes)
