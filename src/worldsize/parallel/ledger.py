"""Who computes which step of an asynchronous run, and how old its gradient may be. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Steps 0 .. ``total`` - 1 are each applied exactly once, in whatever order they come back.

    Attributes:
        total: steps of the run.
        max_staleness: a gradient may be at most this many updates old.
        version: updates applied so far.
        fresh: the first step that was never handed out.
        returned: steps to do again, each with the worker that should rather not get it (-1: anybody may).
        claims: the steps that each worker has in hand, the one it computes first.
        staleness: how many gradients were applied at each age.
        dropped: how many of each worker's gradients were too old.
    """

    total: int
    max_staleness: int
    version: int = 0
    fresh: int = 0
    returned: list[tuple[int, int]] = field(default_factory=list)
    claims: dict[int, list[int]] = field(default_factory=dict)
    staleness: list[int] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)

    @classmethod
    def resume(cls, total: int, max_staleness: int, version: int, fresh: int, missing: Iterable[int]) -> Ledger:
        """Go on after ``version`` updates, with the ``missing`` steps below ``fresh`` that were not among them."""
        return cls(total, max_staleness, version, fresh, [(step, -1) for step in missing])

    @property
    def finished(self) -> bool:
        """Whether every step is applied."""
        return self.version >= self.total  # more, where a run was made shorter

    @property
    def missing(self) -> list[int]:
        """The steps below ``fresh`` that are not applied, rising."""
        in_hand = [step for steps in self.claims.values() for step in steps]
        return sorted([step for step, _ in self.returned] + in_hand)

    def claim(self, worker: int, ahead: int = 2) -> list[int]:
        """Top up what ``worker`` has in hand to ``ahead`` steps. Returns it; empty when nothing is left to hand out now."""
        mine = self.claims.setdefault(worker, [])
        while len(mine) < ahead and (step := self._next(worker)) is not None:
            mine.append(step)
        return mine

    def _next(self, worker: int) -> int | None:
        for i, (step, avoid) in enumerate(self.returned):
            if avoid != worker or self.fresh >= self.total:
                del self.returned[i]
                return step
        if self.fresh >= self.total:
            return None
        self.fresh += 1
        return self.fresh - 1

    def deliver(self, worker: int, step: int, version: int) -> int | None:
        """``worker`` brings the gradient of ``step``, computed with the weights of ``version``.

        Returns:
            How many updates old it is; None if that is too old, and the step will be done again.
        """
        self.claims[worker].remove(step)
        age = self.version - version
        if age > self.max_staleness:
            self.dropped[worker] = self.dropped.get(worker, 0) + 1
            self.returned.append((step, worker))
            return None
        self.staleness += [0] * (age + 1 - len(self.staleness))
        self.staleness[age] += 1
        self.version += 1
        return age

    def leave(self, worker: int) -> None:
        """``worker`` will bring nothing more: others do what it had in hand."""
        self.returned = [(step, -1) for step in self.claims.pop(worker, [])] + self.returned

    def give_back(self, worker: int, step: int) -> None:
        """``worker`` could not compute ``step`` (an overflow of its loss scale, say): somebody does it again."""
        self.claims[worker].remove(step)
        self.returned.append((step, -1))
