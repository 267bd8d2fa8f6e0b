"""Breaks one rule of worldsize in this process, then runs it: ``python sabotage.py RULE train ...``.

The exactness tests use it to show that they would notice.
"""

from __future__ import annotations

import sys

from worldsize import cli, model
from worldsize.data import loader
from worldsize.parallel import ddp


def no_synchronisation() -> None:
    """Every rank keeps its own gradient."""
    ddp.Strategy.gradients = lambda self, last: self._ddp.no_sync()


def plain_momentum() -> None:
    """BatchNorm's usual moving average, micro-batch after micro-batch."""
    model.micro_momentum = lambda momentum, a, accumulation: momentum


def own_statistics() -> None:
    """Rank 0's running statistics instead of everybody's."""
    model.average = lambda tensors, world: None


def order_by_rank() -> None:
    """Each rank shuffles for itself."""
    permute = loader.permute
    training = loader.Loader.training

    def own(self, plan, rank, epoch, first_step=0):
        loader.permute = lambda seed, epoch, k, n: permute(seed + rank, epoch, k, n)
        return training(self, plan, rank, epoch, first_step)

    loader.Loader.training = own


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    raise SystemExit(cli.main(sys.argv[2:]))
