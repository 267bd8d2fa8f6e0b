"""Weights & Biases (extra ``wandb``): one run per job, resumed as the same run.

The API key comes from WANDB_API_KEY or ``wandb login``, never from the recipe or the command line. WANDB_MODE=offline
works without a network.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict

import wandb

from worldsize.config.recipe import Track
from worldsize.runs.run_folder import RunFolder
from worldsize.track import base


class Tracker(base.Tracker):
    def __init__(self, settings: Track, folder: RunFolder, resumed_step: int) -> None:
        self._settings = settings
        self._folder = folder
        self._run: wandb.Run | None = None

    def begin(self, facts: base.RunFacts) -> None:
        self._run = wandb.init(
            project=self._settings.wandb_project,
            entity=self._settings.wandb_entity,
            name=facts.name,
            id=self._id(),
            resume="allow",
            dir=str(self._folder.path),
            config={"recipe": facts.recipe, "environment": facts.environment},
            settings=wandb.Settings(console="off"),
        )

    def steps(self, steps: Sequence[base.Step]) -> None:
        assert self._run is not None
        for step in steps:
            self._run.log(base.step_scalars(step), step=step.step)

    def epoch(self, epoch: base.Epoch) -> None:
        assert self._run is not None
        self._run.log(base.epoch_scalars(epoch), step=epoch.step)

    def end(self, summary: base.Summary | None) -> None:
        if self._run is None:
            return
        if summary is not None:
            self._run.summary.update(asdict(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)

    def _id(self) -> str:
        """The run's id, created once and stored in the run folder."""
        path = self._folder.path / "wandb-id.txt"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12])
        return path.read_text().strip()
