"""Weights averaged over the steps of a run: an exponential moving average, or the mean of the last epochs (SWA)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from worldsize.config.recipe import Average
from worldsize.config.wording import count
from worldsize.distributed.world import World
from worldsize.errors import UserError
from worldsize.models.factory import RunningStatistics


def weight(settings: Average, step: int, steps_per_epoch: int) -> float | None:
    """How much the weights after ``step`` (1-based) count in the average, 0 to 1; None: they do not enter it.

    The first weights to enter replace the average. With ``warmup``, the decay of the n-th is at most 1 - n**(-2/3), as in
    timm's ``--model-ema-warmup`` (timm.utils.ModelEmaV3). SWA is the mean of the weights at the ends of epochs (Izmailov et
    al. 2018, arXiv 1803.05407).
    """
    entered = entries(settings, step, steps_per_epoch)
    if step % _interval(settings, steps_per_epoch) or entered < 1:
        return None
    if entered == 1:
        return 1.0
    if settings.name == "swa":
        return 1 / entered
    return 1 - (min(settings.decay, 1 - entered ** (-2 / 3)) if settings.warmup else settings.decay)


def entries(settings: Average, step: int, steps_per_epoch: int) -> int:
    """How many weights have entered the average after ``step`` (1-based); below 1: none yet."""
    every = _interval(settings, steps_per_epoch)
    return step // every - round(settings.start_epoch * steps_per_epoch) // every


def _interval(settings: Average, steps_per_epoch: int) -> int:
    """Steps from one entry to the next."""
    return settings.every_steps if settings.name == "ema" else steps_per_epoch


def check(settings: Average, epochs: int, steps_per_epoch: int) -> None:
    """Refuse an average that no weights of the run would enter.

    Raises:
        UserError: names the settings.
    """
    steps = epochs * steps_per_epoch
    if settings.name != "none" and entries(settings, steps, steps_per_epoch) < 1:
        raise UserError(
            f"average.every_steps {settings.every_steps} and average.start_epoch {settings.start_epoch:g}: nothing would be "
            f"averaged in the run's {count(steps, 'step')}; lower them, or set average.name to none"
        )


class Averaging:
    """The average of a model's parameters and of its running statistics; until the first weights enter it, a copy of them.

    All ranks have the same parameters and so the same average of them. Running statistics may be a rank's own; as averages
    of averages they may be combined over ranks when they are read, as `RunningStatistics` does.
    """

    def __init__(self, settings: Average, model: nn.Module, statistics: RunningStatistics, steps_per_epoch: int) -> None:
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        self._parameters = [p.detach() for p in model.parameters()]
        self._averages = [p.clone() for p in self._parameters]
        self._statistics = statistics
        self._average_statistics = statistics.current.clone()
        self._step = 0

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Let the weights after ``step`` (1-based) enter the average, if the recipe says so."""
        self._step = step
        share = weight(self._settings, step, self._steps_per_epoch)
        if share is not None:
            torch._foreach_lerp_(self._averages, self._parameters, share)  # as torch.optim.swa_utils does
            self._average_statistics.lerp_(self._statistics.current, share)

    def extend(self, model: nn.Module) -> None:
        """Follow the running statistics of layers that update them from now on, too; see `RunningStatistics.extend`."""
        [self._average_statistics] = self._statistics.extend(model, self._average_statistics)

    @contextmanager
    def applied(self, world: World) -> Iterator[None]:
        """Within this context the model has the averages, those of running statistics combined over ``world``.

        All ranks of ``world`` must enter it. Afterwards the model has its own parameters again, with the same bits.
        """
        self._follow()
        self._statistics.fill(self._average_statistics, world)
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _follow(self) -> None:
        """Until the first weights enter the average, copy the present ones, but only when they are read."""
        if entries(self._settings, self._step, self._steps_per_epoch) < 1:
            self.restart(self._step)

    def _exchange(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)

    def own(self) -> dict[str, torch.Tensor]:
        """What only this rank has: its averages of running statistics, if the model has any; references, not copies."""
        self._follow()
        return {"statistics": self._average_statistics} if self._average_statistics.numel() else {}

    def restart(self, step: int) -> None:
        """Start again from the model's present parameters and statistics, which are those after ``step``."""
        self._step = step
        torch._foreach_copy_(self._averages, self._parameters)
        self._average_statistics.copy_(self._statistics.current)
