"""The interface between the training loop and a strategy, and what is known about a strategy before torch is imported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from worldsize.distributed import batch_plan
from worldsize.distributed.device_timer import elapsed_ms, stamp
from worldsize.distributed.tree_sum import fold

if TYPE_CHECKING:
    import torch
    from torch import nn

    from worldsize.config.recipe import Parallel, Recipe
    from worldsize.distributed.batch_plan import BatchPlan
    from worldsize.distributed.device_timer import Stamp
    from worldsize.distributed.rank import RankInfo
    from worldsize.distributed.world import World

# The world sizes at which a strategy works.
Processes = Literal["one", "several", "2, 4, 8, ...", "any"]
LAUNCHERS = ("--procs", "torchrun", "mpirun", "srun", "horovodrun")


@dataclass(frozen=True)
class Machine:
    """What this machine offers: the number of GPUs, and why there is no GPU, gloo or NCCL (empty: it is available)."""

    gpus: int
    no_gpu: str
    no_gloo: str
    no_nccl: str


@dataclass(frozen=True)
class StrategySupport:
    """One way to run a strategy; ``missing`` says why it does not work on this machine, empty if it does."""

    strategy: str
    device: str
    backend: str
    launchers: tuple[str, ...]
    missing: str


@dataclass(frozen=True)
class Variant:
    """One row of ``bench strategies``: its name and the settings it adds.

    ``backend`` is the `StrategySupport.backend` it needs (None: any), ``mpirun`` whether mpirun starts it, ``pairs``
    whether it works only at powers of two, ``threads`` whether its number of threads is a setting.
    """

    name: str
    settings: tuple[str, ...]
    backend: str | None = None
    mpirun: bool = False
    pairs: bool = False
    threads: bool = False


@dataclass(frozen=True)
class StrategyInputs:
    """What a strategy works on.

    ``model`` is the network itself, ``module`` the `objective.Objective` around it, or its compiled form. ``skips``: a
    forward pass may leave out some of the parameters that are trained, by chance; ``skips_later``: the same once
    `Strategy.parameters_added` was called.
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    settings: Parallel
    world: World
    accumulation: int
    steps_per_epoch: int
    skips: bool = False
    skips_later: bool = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters."""
        return [p for p in self.model.parameters() if p.requires_grad]


class Strategy(ABC):
    """How the replicas of one model agree, step by step.

    The class attributes and class methods are its facts: modules of strategies do not import torch at the top, so the
    command line can read them at once. An instance is the strategy at work. For each step the loop computes its
    micro-batches through ``module`` inside ``gradients(last)``, then calls ``update``. Gradient averaging acts in the
    first, combining weights or updates in the second.

    Attributes:
        name: as in the recipe.
        about: one line for people.
        processes: the world sizes it works at.
        rate: what the learning rate is scaled to: the ``global batch``, or the samples of one ``process``.
        settings: the settings of `recipe.Parallel` that it reads and not every strategy does.
        identity_settings: those of ``settings`` that change a run's numbers.
        same_bits: whether a run has the same bits at every world size, not only the same numbers up to rounding.
        averages: whether the recipe's `average` of weights works with it: all ranks have the same weights after a step.
        sharpens: whether `sharpness` works with it: all ranks have the same gradient after the last backward pass.
        unfreezes: whether parts of the network may begin to train during a run, see `parameters_added`.
        rehearses: whether `prepare_first_step` runs a rehearsal.
        optimizer_names: how the names of the optimizer's tensors in `state` begin; None: it has none.
        stable_between_updates: whether weights and optimizer state change only in ``update``: a snapshot copies them during
            the next step.
        asynchronous: whether ranks do not step together, see `worldsize.training.asynchronous.trainer`.
        captured: whether CUDA graphs can contain its steps.
        needs_mpi: whether a cluster must start it with mpirun.
        local_gradients: whether ranks still hold different gradients when ``update`` is called.
        loss_divisor: the loss of a micro-batch is divided by it before the backward pass.
        module: what to call for the forward pass.
        optimizer: what steps, and what a checkpoint saves.
        backend: what carries messages between processes, for people; None for one process.
        exchange: the communication cost of the step; the loop takes it after each step.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    processes: ClassVar[Processes] = "several"
    rate: ClassVar[Literal["global batch", "process"]] = "global batch"
    settings: ClassVar[tuple[str, ...]] = ()
    identity_settings: ClassVar[tuple[str, ...]] = ()
    same_bits: ClassVar[bool] = False
    averages: ClassVar[bool] = True
    sharpens: ClassVar[bool] = False
    unfreezes: ClassVar[bool] = True
    rehearses: ClassVar[bool] = False
    optimizer_names: ClassVar[str | None] = None
    stable_between_updates: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False
    captured: ClassVar[bool] = False
    needs_mpi: ClassVar[bool] = False
    local_gradients: bool = False
    loss_divisor: int
    module: nn.Module
    optimizer: torch.optim.Optimizer

    # Facts ------------------------------------------------------------------------------------------------------------

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        """Whether a run has the numbers of `single`, up to rounding, at every world size."""
        return False

    @classmethod
    def depends_on_world_size(cls, settings: Parallel) -> bool:
        """Whether a run's numbers differ at another world size by more than rounding."""
        return not cls.exact(settings)

    @classmethod
    def allows_merged_forward(cls, settings: Parallel) -> bool:
        """Whether a forward pass may compute several micro-batches, which changes the numbers by rounding only."""
        return True

    @classmethod
    def validate(cls, recipe: Recipe) -> None:
        """Refuse a recipe that this strategy cannot run on any machine.

        Raises:
            UserError: names the setting and the remedy.
        """
        return

    @classmethod
    def check(cls, recipe: Recipe, rank_info: RankInfo) -> None:
        """Refuse what cannot work on this machine, before any process starts.

        Raises:
            UserError: says what is missing and how to get it.
        """
        return

    @classmethod
    def check_size(cls, recipe: Recipe, world_size: int) -> None:
        """Refuse what cannot work with ``world_size`` processes on any machine.

        Raises:
            UserError: says what would work.
        """
        cls.batch_plan(recipe, world_size)

    @classmethod
    def batch_plan(cls, recipe: Recipe, world_size: int) -> BatchPlan:
        """How a step is shared among ``world_size`` processes.

        Raises:
            UserError: it cannot be shared evenly.
        """
        return batch_plan.plan(recipe, world_size)

    @classmethod
    def threads(cls, settings: Parallel) -> int | None:
        """CPU threads per process, if the numbers depend on it; None: each process takes its share of the cores."""
        return None

    @classmethod
    def lr_batch(cls, settings: Parallel, plan: BatchPlan, rank_info: RankInfo) -> int:
        """The number of samples that the learning rate is scaled to: those behind one step of an optimizer."""
        return plan.global_batch

    @classmethod
    def support(cls, machine: Machine) -> list[StrategySupport]:
        """The ways to run it, for ``worldsize strategies``."""
        return [
            StrategySupport(cls.name, "cpu", "gloo", LAUNCHERS, machine.no_gloo),
            StrategySupport(cls.name, "cuda", "nccl", LAUNCHERS, machine.no_gpu or machine.no_nccl),
        ]

    @classmethod
    def variants(cls) -> list[Variant]:
        """What ``bench strategies`` compares."""
        return [Variant(cls.name, ("--parallel.strategy", cls.name))]

    # At work ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def __init__(self, parts: StrategyInputs) -> None:
        self._accumulation = self.loss_divisor = parts.accumulation
        self.module = parts.module
        self.optimizer = parts.optimizer
        # Each rank's mean is not enough where each has used a layer in a number of micro-batches of its own.
        self._combines = parts.world.size if parts.skips and self.averages else 1
        self._combines_later = parts.world.size if parts.skips_later and self.averages else 1
        self.backend = parts.world.backend
        self.exchange = Exchange(parts.world.device)

    def describe(self) -> str:
        """The name and the settings that matter, for people."""
        return self.name

    def gradients(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch; ``last`` is True for the last one of the step."""
        return nullcontext()

    def mean(self, nodes: list[torch.Tensor]) -> torch.Tensor:
        """The mean of a quantity over the micro-batches of the step, (n,): of this rank, or of all ranks.

        Of all ranks if they share a step's weights and the network skips layers: all must call it.

        Args:
            nodes: its sums over this rank's micro-batches, each (n,), as nodes of `worldsize.distributed.tree_sum`.
        """
        mean = fold(nodes, lambda left, right: left + right) / self._accumulation
        if self._combines > 1:
            import torch.distributed as dist

            self.exchange.sends(mean)
            with self.exchange.waiting():
                dist.all_reduce(mean)
            mean /= self._combines
        return mean

    def update(self, step: Callable[[], None]) -> None:
        """Apply the optimizer (``step``) once gradients are ready."""
        step()

    def prepare_first_step(self, rehearse: Callable[[], None]) -> None:
        """Before the first step: a chance to run ``rehearse``, a forward and backward pass without side effects.

        If the network is compiled, also before the first step with images of another size.
        """
        return

    def parameters_added(self) -> None:
        """More parameters of the model are trained from now on. All ranks must call it, then `prepare_first_step`."""
        self._combines = self._combines_later

    def begin_step(self, step: int) -> None:
        """The run resumes after this many steps, possibly at another world size or with another strategy than before."""
        return

    def consensus(self) -> AbstractContextManager[None]:
        """Inside, the model holds the weights that stand for all ranks: the ones to evaluate and save."""
        return nullcontext()

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's own state, beyond the model and rank 0's optimizer, that the next step depends on."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `state`. The optimizer's tensors are left out if another optimizer has saved them."""
        return


def uses_gpu(recipe: Recipe) -> bool:
    """Whether a run of this recipe computes on GPUs here."""
    import torch

    return recipe.device != "cpu" and torch.cuda.is_available()


@dataclass
class Exchange:
    """The communication cost of one step on this rank.

    ``sent_bytes`` is the payload passed to collective operations, however often a network carries it.
    """

    device: torch.device
    sent_bytes: int = 0
    waits: list[tuple[Stamp, Stamp]] = field(default_factory=list)
    _begun: Stamp = 0.0

    def sends(self, tensor: torch.Tensor) -> None:
        """Count a tensor that is sent."""
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def begin(self) -> None:
        """From here on this rank only waits for others; a later call before `end` moves the beginning."""
        self._begun = stamp(self.device)

    def end(self) -> None:
        """The wait is over."""
        self.waits.append((self._begun, stamp(self.device)))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait."""
        self.begin()
        yield
        self.end()

    def take(self) -> Exchange:
        """The cost since the last call; counting starts again from zero."""
        taken = Exchange(self.device, self.sent_bytes, self.waits)
        self.sent_bytes, self.waits = 0, []
        return taken

    def milliseconds(self) -> float:
        """The time waited; waits for the device."""
        return sum(elapsed_ms(begin, end) for begin, end in self.waits)
