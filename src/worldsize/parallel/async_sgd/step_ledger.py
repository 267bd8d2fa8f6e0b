"""Which worker computes which step of an asynchronous run, and how old its gradient may be (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Steps 0 .. ``total`` - 1 are each applied exactly once, in the order of their arrival.

    Attributes:
        total: steps of the run.
        max_staleness: a gradient may be at most this many updates old.
        version: updates applied so far.
        fresh: the first step that was never assigned.
        returned: steps to compute again, each with the worker that should preferably not get it (-1: any may).
        claims: the steps assigned to each worker, starting with the one it computes.
        staleness: how many gradients were applied at each age.
        dropped: how many gradients of each worker were too old.
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
        """Continue after ``version`` updates; the ``missing`` steps below ``fresh`` were not among them."""
        return cls(total, max_staleness, version, fresh, [(step, -1) for step in missing])

    @property
    def finished(self) -> bool:
        """Whether every step is applied."""
        return self.version >= self.total  # greater if the run was shortened

    @property
    def missing(self) -> list[int]:
        """The steps below ``fresh`` that are not applied, in increasing order."""
        assigned = [step for steps in self.claims.values() for step in steps]
        return sorted([step for step, _ in self.returned] + assigned)

    def claim(self, worker: int, ahead: int = 2) -> list[int]:
        """Assign steps to ``worker`` until it has ``ahead``. Returns its steps; empty if none is left to assign now."""
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
        """Accept the gradient of ``step`` from ``worker``, computed with the weights of ``version``.

        Returns:
            How many updates old it is; None if that is too old, and the step will be computed again.
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
        """``worker`` left: others compute its steps."""
        self.returned = [(step, -1) for step in self.claims.pop(worker, [])] + self.returned

    def give_back(self, worker: int, step: int) -> None:
        """``worker`` could not compute ``step`` (its loss scale overflowed, say): it is computed again."""
        self.claims[worker].remove(step)
        self.returned.append((step, -1))
