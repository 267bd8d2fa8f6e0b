"""TensorBoard event files in ``RUN/tensorboard`` (extra ``tensorboard``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.utils.tensorboard import SummaryWriter

from worldsize.config.recipe import Track
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        # Also of a run that starts again because it was killed before its first checkpoint.
        self._writer = SummaryWriter(str(folder.path / "tensorboard"), purge_step=resumed_step + 1)

    def begin(self, facts: base.RunFacts) -> None:
        self._writer.add_text("run", f"{facts.model}, global batch {facts.global_batch}", facts.first_step)

    def steps(self, steps: Sequence[base.Step]) -> None:
        for step in steps:
            for name, value in base.step_scalars(step).items():
                self._writer.add_scalar(name, value, step.step)

    def epoch(self, epoch: base.Epoch) -> None:
        for name, value in base.epoch_scalars(epoch).items():
            self._writer.add_scalar(name, value, epoch.step)
        self._writer.flush()

    def end(self, summary: base.Summary | None) -> None:
        self._writer.close()
