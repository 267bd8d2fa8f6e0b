"""The hash chain of a run's steps: each step's fingerprint contains that of the step before it.

The first link covers what the run computes (recipe, data, number format), each further one the step's samples in order,
its learning rate, loss, accuracy and gradient norm. metrics.jsonl stores these numbers without rounding, so that anyone
can compute the chain again; checkpoints and result.json store its head.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_RECORDED = ""
# The numbers of a step that its link covers, by their names in metrics.jsonl.
COVERED = ("step", "samples", "lr", "loss", "top1", "grad_norm")


def run_hash(facts: Mapping[str, Any]) -> str:
    """The chain before the first step, given `resume.fixed_facts`; hexadecimal."""
    return _sha256([facts[name] for name in ("identity", "data", "classes", "precision", "global_batch")])


def link(before: str, step: Mapping[str, Any]) -> str:
    """The chain after a step, given the chain ``before`` it and a mapping with the numbers in `COVERED`; hexadecimal.

    NaN and infinity count as None, as in metrics.jsonl.
    """
    return _sha256([before, *(_plain(step[name]) for name in COVERED)])


def of_samples(micro_batches: Sequence[int] | NDArray[np.int64]) -> str:
    """The digest of a step's samples, given those of its micro-batches in order (see `gradients.digest`); hexadecimal."""
    return hashlib.sha256(np.asarray(micro_batches, "<i8").tobytes()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
