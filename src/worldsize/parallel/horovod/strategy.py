"""The real Horovod, if installed: averaging or Adasum over MPI, Gloo or NCCL.

Sergeev and Del Balso 2018, "Horovod: fast and easy distributed deep learning in TensorFlow" (arXiv 1802.05799). Gradients
are sent by Horovod; worldsize's own small messages use torch's gloo, as with every strategy. With ``op: adasum`` Horovod
combines the optimizers' steps of each parameter as `parallel.adasum` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from worldsize.errors import UserError
from worldsize.parallel import base
from worldsize.parallel.horovod import installed

if TYPE_CHECKING:
    import torch

    from worldsize.config.recipe import Parallel, Recipe
    from worldsize.distributed.batch_plan import BatchPlan
    from worldsize.distributed.rank import RankInfo
    from worldsize.distributed.world import World


class Strategy(base.Strategy):
    """Horovod's DistributedOptimizer sends the gradients, or with Adasum the steps of the recipe's optimizer."""

    name = "horovod"
    about = "Horovod: average or Adasum"
    processes = "any"
    identity_settings = ("compression", "op")
    settings = ("predivide", *identity_settings)
    needs_mpi = True
    optimizer_names = ""
    unfreezes = False  # its optimizer has the parameters that it began with

    @classmethod
    def exact(cls, settings: Parallel) -> bool:
        return settings.compression == "none" and settings.op == "average"

    @classmethod
    def validate(cls, recipe: Recipe) -> None:
        if recipe.parallel.compression not in ("none", "fp16"):
            raise UserError(
                f"Horovod cannot send gradients as {recipe.parallel.compression}: use --parallel.compression fp16, "
                "or --parallel.strategy ddp"
            )

    @classmethod
    def check(cls, recipe: Recipe, rank_info: RankInfo) -> None:
        installed.check(recipe, rank_info)

    @classmethod
    def lr_batch(cls, settings: Parallel, plan: BatchPlan, rank_info: RankInfo) -> int:
        # As for `parallel.adasum`.
        return plan.per_process if settings.op == "adasum" else plan.global_batch

    @classmethod
    def support(cls, machine: base.Machine) -> list[base.StrategySupport]:
        return installed.support(cls.name, machine)

    @classmethod
    def variants(cls) -> list[base.Variant]:
        use = ("--parallel.strategy", cls.name)
        return [
            base.Variant(f"{cls.name} MPI", use, backend="MPI", mpirun=True),
            base.Variant(
                f"{cls.name} MPI adasum", (*use, "--parallel.op", "adasum"), backend="MPI", mpirun=True, pairs=True
            ),
            base.Variant(f"{cls.name} Gloo", use, backend=installed.GLOO),
        ]

    def __init__(self, parts: base.StrategyInputs) -> None:
        import horovod.torch as hvd
        import torch

        super().__init__(parts)
        settings, world = parts.settings, parts.world
        self._parts = parts
        # Horovod refuses tensors in another order; gradients take that of their weights, activations keep their own.
        parts.model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        for state in parts.optimizer.state.values():
            state.update({kind: value.contiguous() for kind, value in state.items()})
        self._server = _start(world)
        self._adasum = settings.op == "adasum" and world.size > 1  # with one process it is a plain step
        half = settings.compression == "fp16"
        self._distributed = hvd.DistributedOptimizer(
            _stepping(parts.optimizer),
            named_parameters=parts.model.named_parameters(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            backward_passes_per_step=parts.accumulation,
            op=hvd.Adasum if self._adasum else hvd.Average,
            gradient_predivide_factor=settings.predivide or 1.0,
        )
        self._sent_bytes = sum(p.numel() * (2 if half else p.element_size()) for p in parts.parameters)
        self.local_gradients = self._adasum
        self.backend = _backend(world)

    def describe(self) -> str:
        compression = self._parts.settings.compression
        sent = "" if compression == "none" else f" of {compression} gradients"
        return f"{self.name} ({self._parts.settings.op}{sent})"

    @contextmanager
    def gradients(self, last: bool) -> Iterator[None]:
        yield
        if last and not self._adasum:
            with self.exchange.waiting():
                self._distributed.synchronize()

    def update(self, step: Callable[[], None]) -> None:
        if self._parts.world.size > 1:
            self.exchange.sent_bytes += self._sent_bytes
        if self._adasum:
            with self.exchange.waiting():
                self._distributed.step()
        else:
            step()

    def prepare_first_step(self, rehearse: Callable[[], None]) -> None:
        import horovod.torch as hvd

        from worldsize.optim import optimizers

        hvd.broadcast_parameters(dict(self._parts.model.named_parameters()), root_rank=0)
        if not self._adasum:  # with Adasum, each rank has its own state
            hvd.broadcast_parameters(optimizers.state_tensors(self.optimizer, self._parts.model), root_rank=0)

    def state(self) -> dict[str, torch.Tensor]:
        from worldsize.optim import optimizers

        return optimizers.state_tensors(self.optimizer, self._parts.model) if self._adasum else {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        from worldsize.optim import optimizers

        optimizers.load_state_tensors(self.optimizer, self._parts.model, state)


def _stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer that Horovod can make its own of, whose steps are those of ``optimizer``, on the same parameter groups.

    Horovod derives a class from that of the optimizer, and creates it with the groups and nothing else. Most optimizers
    need more. With Adasum, Horovod steps one parameter after the other: it puts each alone into the groups.
    """
    import torch

    class Stepping(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]]) -> None:
            super().__init__(groups, {})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            optimizer.step()

    return Stepping(optimizer.param_groups)


def all_reduce(world: World) -> tuple[str, Callable[[torch.Tensor], None]]:
    """A function that sums a tensor over all ranks in place, with its name for people; starts Horovod."""
    server = _start(world)
    import horovod.torch as hvd

    def summed(tensor: torch.Tensor, _lives: object = server) -> None:
        hvd.allreduce_(tensor, op=hvd.Sum, name="sum")

    return f"Horovod over {_backend(world)}", summed


def _backend(world: World) -> str:
    import horovod.torch as hvd

    transport = "MPI" if hvd.mpi_enabled() else "Gloo"
    return f"NCCL, {transport}" if world.device.type == "cuda" and hvd.nccl_built() else transport


def _start(world: World) -> object:
    """Start Horovod with the ranks of worldsize. Returns what must live as long as the process."""
    import horovod.torch as hvd

    rank_info, server = world.rank_info, None
    if installed.transport(rank_info) == "Gloo" and rank_info.launcher != "horovodrun":
        from horovod.runner.http.http_server import RendezvousServer

        # As horovodrun does for its processes: rank 0 serves the addresses, all on this machine.
        if world.is_main:
            server = RendezvousServer()
        port = world.from_main(server.start() if server else None)
        mine: dict[str, object] = {
            "RANK": rank_info.rank,
            "SIZE": rank_info.size,
            "LOCAL_RANK": rank_info.local_rank,
            "LOCAL_SIZE": rank_info.local_size,
        }
        mine |= {"GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": "lo"}
        mine |= {"CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
        os.environ.update({f"HOROVOD_{name}": str(value) for name, value in mine.items()})
    hvd.init()
    if (hvd.rank(), hvd.size()) != (rank_info.rank, rank_info.size):
        raise UserError(
            f"{rank_info.launcher} started this process as rank {rank_info.rank} of {rank_info.size}, but Horovod reports "
            f"{hvd.rank()} of {hvd.size()}: were mpirun and Horovod built for the same MPI? `make horovod` builds Horovod "
            "for the installed one"
        )
    return server
