"""What a training step costs: worldsize's own step in several forms and two bare loops, interleaved in rounds.

``bare`` is the shortest loop: constant tensors on the device, no metrics. ``torchvision`` does per step what its reference
script does (references/classification/train.py, ``train_one_epoch``): float images from the host, and metrics that wait
for the device. Both use the same network, number format and optimizer as ``worldsize``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from worldsize.bench import kernels, tables
from worldsize.bench.options import BenchStep
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data.loading.device_feed import Feed
from worldsize.data.loading.loader import Batch
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World, join
from worldsize.errors import UserError
from worldsize.models import factory
from worldsize.optim import optimizers
from worldsize.runs.run_folder import RunFolder, create
from worldsize.training import build, cuda_graph, environment, new_network, precision
from worldsize.training.gradients import GradientComputer, StepHooks
from worldsize.training.precision import Precision
from worldsize.training.step import StepRunner

BARE, TORCHVISION = "bare", "torchvision"
_CLASSES = 1000
_LAUNCHES = 5  # steps whose launch is timed, per round
_MICRO_BATCH = Recipe().micro_batch
# Dense 16-bit tensor operations per second, from NVIDIA's data sheets.
_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12}


@dataclass(frozen=True)
class Form:
    """A loop (`BARE`, `TORCHVISION` or ``worldsize``) in a number format.

    ``split``: micro-batches have a recipe's default size, and a forward pass has several of them, as in training on a GPU.
    """

    loop: str
    precision: str
    channels_last: bool = True
    compiled: bool = False
    graphs: bool = False
    split: bool = False

    @property
    def name(self) -> str:
        extras = [f"micro-batch {_MICRO_BATCH}"] * self.split + ["contiguous"] * (not self.channels_last)
        extras += ["compiled"] * self.compiled + ["graphs"] * self.graphs
        return " ".join([self.loop, self.precision, *extras])


@dataclass(frozen=True)
class Measured:
    """One form in one round. ``host_ms``: the host's time to launch a step on a GPU that has nothing to do; None on a CPU.

    A busy GPU's queue holds about a thousand kernels, so that the host would wait for the steps before.
    ``memory_gib``: the most that the GPU held beyond what other forms keep there; ``kernels``: launched per step.
    """

    form: str
    round: int
    images_per_s: float
    host_ms: float | None
    memory_gib: float | None
    kernels: int | None


def run(arguments: BenchStep, tell: Callable[[str], None]) -> RunFolder:
    """Measure, and report each form of each round with ``tell``.

    Writes ``results.jsonl`` and ``table.md`` to a new folder, on a GPU also ``kernels.jsonl``.

    Raises:
        UserError: the device does not support a number format or is too small for the batch, or a form is unknown.
    """
    if arguments.steps < 1 or arguments.warmup < 0 or arguments.rounds < 1:
        raise UserError("--steps and --rounds must be positive, and --warmup not negative")
    world = join(RankInfo("none", 0, 1, 0, 1), _recipe(arguments, Form("worldsize", "auto")))
    forms = chosen(arguments, world.device)
    folder = create(arguments.out, None, "bench-step")
    try:
        loops = {form: _Loop(arguments, form, world, tell) for form in forms}
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        raise UserError(f"--batch {arguments.batch} does not fit into the GPU's memory ({reason}): lower it") from None
    results = []
    for turn in range(1, arguments.rounds + 1):
        # Every second round in reverse order, so that a slow drift affects all alike.
        for form in forms if turn % 2 else reversed(forms):
            results.append(loops[form].measure(turn))
            tell(f"round {turn}/{arguments.rounds}  {form.name:<28} {results[-1].images_per_s:10,.1f} images/s")
            with open(folder.path / "results.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(results[-1])) + "\n")
    found = [table(results, flops_per_image(arguments.model, arguments.size), peak(world.device))]
    by_form = {form.name: loop.kernels for form, loop in loops.items()}
    if world.device.type == "cuda":
        kernels.write(folder.path / "kernels.jsonl", by_form)
        found.append(kernels.table(by_form))
    heading = f"{environment.device_name(world.device.type)}, {arguments.model}, {arguments.size} pixels, "
    heading += f"{arguments.batch} images per step"
    (folder.path / "table.md").write_text("\n\n".join([heading, *found]) + "\n", "utf-8")
    return folder


def chosen(arguments: BenchStep, device: torch.device) -> list[Form]:
    """The forms to measure: those of ``--only``, otherwise all that make sense on the device.

    Raises:
        UserError: ``--only`` names an unknown form, or the warm-up is too short for CUDA graphs.
    """
    formats = arguments.precision or (("bf16", "fp16", "tf32") if device.type == "cuda" else ("auto",))
    names = [precision.resolve(Recipe(precision=name, device=arguments.device), device).name for name in formats]
    compiled = (False, True) if arguments.compile else (False,)
    forms = [Form(TORCHVISION, name, channels_last=False) for name in names]
    forms += [Form(BARE, name, compiled=c) for name, c in itertools.product(names, compiled)]
    forms += [Form("worldsize", name, compiled=c) for name, c in itertools.product(names, compiled)]
    if device.type == "cuda":
        if arguments.micro_batch is None and arguments.batch > _MICRO_BATCH and arguments.batch % _MICRO_BATCH == 0:
            forms += [Form("worldsize", name, compiled=c, split=True) for name, c in itertools.product(names, compiled)]
            if arguments.compile:  # what training on one GPU does by default
                forms += [Form("worldsize", name, compiled=True, split=True, graphs=True) for name in names]
        forms += [Form("worldsize", name, compiled=c, graphs=True) for name, c in itertools.product(names, compiled)]
    forms += [Form("worldsize", name, channels_last=False) for name in names]
    if unknown := set(arguments.only) - {form.name for form in forms}:
        raise UserError(f"--only {sorted(unknown)[0]!r} is unknown; available: {', '.join(f.name for f in forms)}")
    kept = [form for form in forms if not arguments.only or form.name in arguments.only]
    if arguments.warmup <= cuda_graph.WARMUPS and any(form.graphs for form in kept):
        raise UserError(
            f"--warmup {arguments.warmup}: step {cuda_graph.WARMUPS + 1} captures CUDA graphs and should not be measured: "
            f"pass --warmup {cuda_graph.WARMUPS + 1} or more"
        )
    return kept


def _recipe(arguments: BenchStep, form: Form) -> Recipe:
    return recipe_files.validate(
        {
            "global_batch": arguments.batch,
            "micro_batch": _MICRO_BATCH if form.split else arguments.micro_batch or arguments.batch,
            "precision": form.precision,
            "device": arguments.device,
            "cuda_graphs": form.graphs,
            "label_smoothing": 0.1,
            "data": {"train_crop_size": arguments.size},
            "model": {"name": arguments.model, "channels_last": form.channels_last, "compile": form.compiled},
            "optimizer": {"lr": 1e-3},
        },
        "bench step",
    )


class _Loop:
    """A form with its own network, ready to step."""

    def __init__(self, arguments: BenchStep, form: Form, world: World, tell: Callable[[str], None]) -> None:
        self._arguments, self._form, self._device = arguments, form, world.device
        recipe = _recipe(arguments, form)
        number_format = Precision(form.precision, world.device)
        number_format.apply()
        torch.backends.cudnn.benchmark = True
        network = new_network.build(recipe, _CLASSES, number_format)
        steps = {BARE: _bare, TORCHVISION: _torchvision}.get(form.loop, _worldsize)
        self._step = steps(recipe, network, world, number_format)
        tell(f"preparing    {form.name}{': compiling' if form.compiled else ''}")
        before = self._reset_peak()
        for _ in range(arguments.warmup):
            self._step()
        self._memory = None if before is None else (torch.cuda.max_memory_allocated(self._device) - before) / 2**30
        self.kernels = kernels.profiled(self._step, self._wait) if self._device.type == "cuda" else []

    def measure(self, turn: int) -> Measured:
        Precision(self._form.precision, self._device).apply()
        steps = self._arguments.steps
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        self._wait()
        images = steps * self._arguments.batch / (time.perf_counter() - begin)
        host_ms = launch_ms(self._step, self._wait) if self._device.type == "cuda" else None
        launches = sum(kernel.launches for kernel in self.kernels) or None
        return Measured(self._form.name, turn, images, host_ms, self._memory, launches)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _reset_peak(self) -> int | None:
        if self._device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_allocated(self._device)


def launch_ms(step: Callable[[], None], wait: Callable[[], None]) -> float:
    """Milliseconds until ``step`` returns, the median of several; ``wait`` lets the device finish between them."""
    spent = []
    for _ in range(_LAUNCHES):
        wait()
        begin = time.perf_counter()
        step()
        spent.append(time.perf_counter() - begin)
    wait()
    return statistics.median(spent) * 1000


def _worldsize(recipe: Recipe, network: nn.Module, world: World, number_format: Precision) -> Callable[[], None]:
    plan = BatchPlan(recipe.global_batch, recipe.micro_batch, 1, groups=recipe.global_batch // recipe.micro_batch)
    state = build.build_state(recipe, network, plan, world, number_format, 1)
    runner = StepRunner(GradientComputer(recipe, plan, 0, world.device, state))
    batches = Feed(_host_batches(recipe.global_batch, recipe.data.train_crop_size, world.device), world.device)
    return lambda: (runner.run(batches, 0, recipe.optimizer.lr, StepHooks(launched=batches.prefetch)), None)[1]


def _host_batches(images: int, size: int, device: torch.device) -> Iterator[Batch]:
    """The same images again and again, on the host, as the loader delivers them."""
    pixels = torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8)
    labels = torch.randint(0, _CLASSES, (images,))
    if device.type == "cuda":
        pixels, labels = pixels.pin_memory(), labels.pin_memory()
    return itertools.repeat(Batch(pixels, labels, np.arange(images)))


def _bare(recipe: Recipe, network: nn.Module, world: World, number_format: Precision) -> Callable[[], None]:
    size, device = recipe.data.train_crop_size, world.device
    images = torch.randn(recipe.global_batch, 3, size, size, device=device, dtype=number_format.weights)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, _CLASSES, (recipe.global_batch,), device=device)
    module: nn.Module = torch.compile(network) if recipe.model.compile else network  # type: ignore[assignment]
    optimizer = optimizers.build(network, recipe.optimizer, device)
    scaler = number_format.scaler()

    def step() -> None:
        with number_format.autocast():
            loss = functional.cross_entropy(module(images), labels, label_smoothing=recipe.label_smoothing)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _torchvision(recipe: Recipe, network: nn.Module, world: World, number_format: Precision) -> Callable[[], None]:
    size, device = recipe.data.train_crop_size, world.device
    host = torch.randn(recipe.global_batch, 3, size, size), torch.randint(0, _CLASSES, (recipe.global_batch,))
    if device.type == "cuda":
        host = host[0].pin_memory(), host[1].pin_memory()
    optimizer = optimizers.build(network, recipe.optimizer, device)
    scaler = number_format.scaler()

    def step() -> None:
        images, labels = host[0].to(device, number_format.weights), host[1].to(device)
        with number_format.autocast():
            logits = network(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        correct = logits.topk(5, 1).indices == labels[:, None]
        correct[:, 0].sum().item(), correct.sum().item(), loss.item()

    return step


def flops_per_image(name: str, size: int) -> float:
    """Floating-point operations of forward and backward of one image; a multiplication and an addition are two."""
    network = factory.build(Recipe.model_validate({"model": {"name": name}}), _CLASSES, torch.device("meta"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(2, 3, size, size, device="meta")).sum().backward()
    return counter.get_total_flops() / 2


def peak(device: torch.device) -> float | None:
    """Dense 16-bit operations per second of the GPU; None if unknown."""
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((_PEAK[word] for word in words if word in _PEAK), None)


def table(results: list[Measured], flops: float, most: float | None) -> str:
    """A Markdown table of medians over the rounds; ratios are medians of the ratios within each round.

    Args:
        flops: operations per image.
        most: the device's 16-bit operations per second, for the share of it that 16-bit forms reach.
    """
    by_form = {name: {r.round: r for r in results if r.form == name} for name in dict.fromkeys(r.form for r in results)}
    headings = ("images/s", "relative to bare", "to torchvision", "TFLOP/s", "of peak", "GPU GiB", "host ms", "kernels")
    rows = [["step", *headings]]
    for name, own in by_form.items():
        first = next(iter(own.values()))
        speed = statistics.median(r.images_per_s for r in own.values())
        number_format = name.split()[1]
        ratios = [_ratio(own, _best(by_form, f"{loop} {number_format}")) for loop in (BARE, TORCHVISION)]
        share = speed * flops / most if most and number_format in ("bf16", "fp16") else None
        hosts = [r.host_ms for r in own.values() if r.host_ms is not None]
        host = statistics.median(hosts) if hosts else None
        cells = [_cell(share, ".1%"), _cell(first.memory_gib, ".1f"), _cell(host, ".2f"), _cell(first.kernels, "d")]
        rows.append([name, f"{speed:,.1f}", *ratios, f"{speed * flops / 1e12:.2f}", *cells])
    return tables.table(rows)


def _best(by_form: dict[str, dict[int, Measured]], start: str) -> dict[int, Measured]:
    """The fastest form whose name begins so; empty if there is none."""
    fitting = [own for name, own in by_form.items() if name.startswith(start)]
    return max(fitting, key=lambda own: statistics.median(r.images_per_s for r in own.values()), default={})


def _ratio(own: dict[int, Measured], reference: dict[int, Measured]) -> str:
    ratios = [own[turn].images_per_s / reference[turn].images_per_s for turn in own if turn in reference]
    return f"{statistics.median(ratios):.3f}" if ratios else "-"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
