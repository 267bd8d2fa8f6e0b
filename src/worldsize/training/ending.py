"""The end of a run: its last metrics, in ``result.json``; also of a run that was killed before it had written that."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from worldsize.config import job_pod
from worldsize.errors import CheckpointError, NotSaved
from worldsize.runs import atomic
from worldsize.runs.history import FINISHED, History, last_event
from worldsize.runs.run_folder import RunFolder
from worldsize.track.base import Summary
from worldsize.training.evaluation import Result
from worldsize.training.progress import Progress

log = logging.getLogger(__name__)


def summary(at: Progress, result: Result, newest: Path | None, batch: int, per_epoch: int, seconds: float) -> Summary:
    """The last metrics of a run.

    Args:
        newest: its newest checkpoint.
        batch: its global batch.
        per_epoch: the steps of one of its epochs.
        seconds: its run time.
    """
    return Summary(
        top1=result.top1,
        top5=result.top5,
        loss=result.loss,
        best_top1=at.best_top1,
        map=result.map,
        f1=result.f1,
        best_map=at.best_map,
        best_epoch=at.best_epoch,
        steps=at.step,
        epochs=round(at.step / per_epoch, 3),
        images_per_s=at.step * batch / max(at.train_s, 1e-9),
        seconds=seconds,
        checkpoint=str(newest) if newest else None,
        chain=at.chain,
    )


def write(folder: RunFolder, found: Summary) -> None:
    """Write result.json.

    Raises:
        NotSaved: it cannot be written.
    """
    try:
        atomic.write_json(folder.result, asdict(found))
    except OSError as error:
        raise NotSaved(
            f"the run has ended and its last state is saved, but {folder.result} cannot be written: {error.strerror}. Once "
            f"it can be, complete the run: {job_pod.continuing(folder.path)}"
        ) from None


def complete(folder: RunFolder, state: dict[str, Any], newest: Path | None, per_epoch: int) -> None:
    """Write what a run lacks that ended with the checkpoint ``newest``, with this state, if it was killed soon after that.

    Raises:
        NotSaved: it cannot be written.
        CheckpointError: the state has no complete evaluation.
    """
    at = Progress.from_dict(state)
    if not folder.result.exists() and at.evaluation is not None:
        try:
            result = Result(**at.evaluation)  # type: ignore[arg-type]
        except TypeError as error:
            raise CheckpointError(f"{newest}/state.json: evaluation is not one: {error}") from None
        # Of the run time only that of the steps is known.
        write(folder, summary(at, result, newest, state["global_batch"], per_epoch, at.train_s))
        log.warning("%s was missing, since the run was ended before it had written it; it is written now", folder.result)
    # Older versions wrote no history.
    if folder.history.exists() and last_event(folder.history) != FINISHED:
        History(folder.history).add(FINISHED, at.step)
