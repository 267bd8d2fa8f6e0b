"""The command lines of ``train``, ``eval`` and ``bench``, typed; tyro turns them into flags and ``--help``."""

from __future__ import annotations

import io
import math
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from pydantic import ValidationError

from worldsize.config.recipe import Recipe
from worldsize.config.recipe_files import explain
from worldsize.errors import UserError

T = TypeVar("T")

# A nested dataclass whose fields are flags of their own: --namespace, not --where.namespace.
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
# The recipe; its settings keep their sections: --data.root, not --settings.data.root, and not --root.
Settings = Annotated[Recipe, tyro.conf.arg(name="")]


@dataclass
class Train:
    """Train RECIPE (a name from `worldsize recipes`, or a YAML file), or resume a run.

    Every setting of the recipe is a flag with its dotted name; the defaults shown are those of the recipe. `--on
    pytorchjob`, `mpijob` or `trainjob` trains on a Kubernetes cluster, `--on slurm` as a Slurm job, `--on ssh` on a list of
    hosts: `worldsize train RECIPE --on slurm --help`.
    """

    settings: Settings
    procs: int = 1
    """Processes on this machine; each uses one GPU, or its share of the cores."""
    name: str | None = None
    """Name of the run folder (default: RECIPE-N)."""
    out: Path = Path("runs")
    """Where run folders are created."""
    resume: Path | None = None
    """Resume this run at the exact step where it stopped, also with another --procs."""
    allow_changes: bool = False
    """With --resume: continue although the recipe or the data changed, but never on other classes."""
    autoresume: bool = False
    """Resume OUT/NAME if it exists; for schedulers that restart jobs. Requires --name."""
    retries: int = 3
    """With --autoresume: give up after this many starts in a row without a new checkpoint."""
    stop_after: int | None = None
    """Save and stop after this step, as after Ctrl-C (exit code 75); --resume continues."""


@dataclass
class Agent:
    """Start this node's processes of a job, together with those of the other nodes, and start them again if a node is lost.

    The command of the pods of a PyTorchJob or TrainJob (torchrun's PET_* variables), and for what SkyPilot, dstack, PBS
    (pbsdsh -u) or LSF (blaunch -z) start once per node. Exits with 143 if it was asked to leave (retry), and with the
    run's own exit code if a retry would fail again.
    """

    id: str
    """The run, the same on all nodes."""
    procs: int | None = None
    """Processes on this node (default: one per GPU)."""


@dataclass
class Evaluate:
    """Evaluate a run's newest checkpoint, or one checkpoint, on the validation set. Every image counts exactly once.

    Every setting of the recipe is a flag with its dotted name: evaluate at another size or precision, or on other images.
    """

    settings: Settings
    procs: int = 1
    """Processes on this machine; each uses one GPU, or its share of the cores."""
    raw: bool = False
    """Evaluate the weights themselves, not their average, of a run with --average.name ema or swa."""
    images: Path | None = None
    """Evaluate on these images instead, FOLDER/CLASS/IMAGE, where CLASS is a class of the run or, as in ImageNet-V2, its
    number."""
    details: Path | None = None
    """Also write to this folder what the network gets right and wrong: a page (page.html), details.json, classes.csv and
    images.csv. Needs the extra `report`."""
    against: Path | None = None
    """With --details: another run or checkpoint with the same classes, to compare with on the same images."""
    real_labels: Path | None = None
    """real.json of ImageNet-ReaL: a prediction is right if the file lists it for the image; images without labels in it are
    left out."""


@dataclass
class Prove:
    """Run the first steps of RECIPE with several numbers of processes, and compare what they compute.

    Compares the order of samples, losses, gradient norms, weights and BatchNorm statistics, and prints one table. Exits
    with 0 if the strategy keeps its promise (bitwise: the same bits; ddp: the same numbers up to rounding), else with 1.
    Everything runs in a temporary folder.
    """

    settings: Settings
    procs: str = "1,2,4"
    """Numbers of processes on this machine, separated by commas; the first is the reference."""
    steps: int = 20
    """Steps of each run."""
    strategy: str | None = None
    """Strategy (default: the recipe's; of a recipe with `auto`, bitwise)."""
    interrupt: bool = False
    """Stop each run in the middle, and resume it."""
    against: Literal["torch"] | None = None
    """Also compare with a plain PyTorch loop of one process: losses and weights, up to rounding."""


@dataclass
class Tune:
    """Find a learning rate for RECIPE in a few short runs, and write a recipe with it.

    First a range test (Smith 2017, arXiv 1506.01186): the learning rate rises with each step from --low to --high, and the
    loss shows where learning begins and where it ends. Then runs with warmup and decay around the rate at which the loss
    fell fastest; the one with the lowest loss at its end decides. The numbers do not depend on --procs.
    """

    settings: Settings
    procs: int = 1
    """Processes on this machine."""
    steps: int = 100
    """Steps of each run."""
    low: float = 1e-4
    """First learning rate of the range test, for the recipe's own global batch."""
    high: float = 10.0
    """Its last learning rate."""
    micro_batches: str | None = None
    """Also measure the speed of these micro-batches, such as 16,32,64. They change BatchNorm, so none is chosen."""
    forward_batches: bool = False
    """Also measure forward passes of more and more micro-batches, until one does not fit; choose the fastest."""
    out: Path | None = None
    """The new recipe (default: RECIPE-tuned.yaml in the current folder); the curve is put next to it as SVG."""


@dataclass
class Replay:
    """Compute past steps of a run again, from the nearest checkpoint before them, and show what the model saw.

    Reports whether each step matches metrics.jsonl, and writes an HTML page about the first one: the images after cropping
    and augmentation with labels, predictions and losses, and the norms of gradients, weights and updates. Exits with 1 if
    a step that should be bit-identical is not. The run is not changed.
    """

    step: str
    """The step, counted from 1 as in metrics.jsonl, or a range such as 120:125."""
    procs: int | None = None
    """Processes (default: as many as the run had)."""
    from_start: bool = False
    """If no checkpoint is early enough, start at the beginning of the run."""
    out: Path | None = None
    """The page (default: RUN-step-N.html in the current folder)."""


@dataclass
class Audit:
    """Verify a run: its chain of fingerprints, its checkpoints, and parts of it by computing them again.

    Checks that metrics.jsonl, the checkpoints, result.json, recipe.yaml and the dataset belong together. Then computes
    randomly chosen windows between two checkpoints again, and compares their bits. Exits with 0 and a certificate, or
    with 1 and the first inconsistent step. The run is not changed.
    """

    windows: int = 5
    """Windows to compute again, at most."""
    seed: int | None = None
    """Seed of the choice of windows (default: random, printed)."""
    procs: int | None = None
    """Processes (default: as many as the run had)."""
    out: Path | None = None
    """Also write the certificate to this JSON file."""


@dataclass
class BenchStep:
    """Measure a training step without loading images: worldsize's own, a bare loop and torchvision's reference script.

    All run in one process, interleaved in rounds. Prints a table (images/s, ratios, share of the GPU's peak, memory, host
    time, kernels) and writes it with all measurements to OUT/bench-step-N.
    """

    model: str = "resnet50"
    """Any torchvision classification model."""
    batch: int = 256
    """Samples per step, in one forward pass."""
    micro_batch: int | None = None
    """Samples that share BatchNorm statistics (default: all)."""
    size: int = 224
    """Side of the images, pixels."""
    precision: tuple[Literal["auto", "fp32", "tf32", "bf16", "fp16"], ...] = ()
    """Number formats (default: bf16, fp16 and tf32 on a GPU, auto on a CPU)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device (auto: a GPU if there is one)."""
    compile: bool = False
    """Also measure networks compiled by torch.compile; compiling takes minutes."""
    steps: int = 20
    """Steps of each form per round."""
    warmup: int = 5
    """Steps of each form before the first round."""
    rounds: int = 5
    """Rounds."""
    only: tuple[str, ...] = ()
    """Measure only these forms, such as 'bare bf16' 'worldsize bf16' (default: all)."""
    out: Path = Path("runs")
    """Folder for the results."""


@dataclass
class BenchStrategies:
    """Compare all strategies that work on this machine: real runs on synthetic images, interleaved in rounds.

    Prints a table and writes it, with all measurements and the runs themselves, to OUT/bench-strategies-N.
    """

    procs: int = 2
    """Processes on this machine."""
    model: str = "resnet50"
    """Any torchvision classification model."""
    batch: int = 8
    """Samples per process and step."""
    size: int = 224
    """Side of the images, pixels."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """Number format."""
    steps: int = 19
    """Steps of each run; the first three are not counted."""
    rounds: int = 3
    """How often each strategy runs."""
    only: tuple[str, ...] = ()
    """Compare only these with ddp, by their names in the table (quote names with spaces)."""
    out: Path = Path("runs")
    """Where the folder is created."""


@dataclass
class BenchLoader:
    """Measure how fast training images of a dataset are read, decoded and cropped, by this loader and by others,
    interleaved in rounds; names the bottleneck and the number of cores that a device needs.

    Prints a table and writes it, with all measurements, to OUT/bench-loader-N.
    """

    root: tuple[Path, ...]
    """The dataset, as files or packed; further ones, such as its packed forms, are compared with it."""
    data: Literal["imagenet", "folder", "cifar10"] | None = None
    """Layout of the datasets (default: detected)."""
    against: str = ""
    """Loaders to compare with, separated by commas: torchvision, timm, torchcodec, dali, webdataset. Each runs with half,
    one and two worker processes per core."""
    recipe: str | None = None
    """Crop and augment as this recipe, which also tells the size (default: mirror and random resized crop)."""
    size: int | None = None
    """Side of the crops, pixels (default: the recipe's, or 224)."""
    batch: int = 64
    """Images per batch."""
    workers: int | None = None
    """Decoding threads (default: one per core)."""
    readers: int = 16
    """Reads in flight."""
    prefetch: int = 4
    """Batches prepared ahead."""
    images: Annotated[int, tyro.conf.arg(aliases=["--pictures"])] = 2000
    """Images per pass, at most."""
    rounds: int = 5
    """How often each loader runs, after one round that is not counted."""
    feed: float = 2500
    """Images/s that a device consumes; the default is about ResNet-50 in mixed precision on one A100 (NVIDIA)."""
    out: Path = Path("runs")
    """Where the folder is created."""


def parse(kind: type[T], argv: list[str], default: T | None, title: str, recorded: Recipe | None = None) -> T:
    """The command line as a ``kind``; without a ``default``, its fields' own defaults apply.

    Args:
        recorded: the recipe of an existing run, whose values are not checked again.

    Raises:
        UserError: invalid settings, or settings that contradict each other.
        SystemExit: 0 after ``--help``, 64 after tyro has printed what is wrong.
    """
    values = tyro.MISSING_NONPROP if default is None else default
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            parsed = tyro.cli(kind, prog=f"worldsize {title}", args=argv, default=values)
    except ValidationError as error:
        raise UserError(f"invalid settings:\n{explain(error)}") from None
    except SystemExit as stop:
        # tyro turns an error of one section into a message with pydantic's own text.
        if (invalid := _validation_error(stop)) is not None:
            raise UserError(f"invalid settings:\n{explain(invalid)}") from None
        sys.stderr.write(printed.getvalue())
        raise SystemExit(UserError.exit_code if stop.code else 0) from None
    _check_scale(getattr(parsed, "settings", None), recorded)
    return parsed


def _check_scale(recipe: object, recorded: Recipe | None) -> None:
    """Refuse values of ``data.mean`` and ``data.std`` on the scale 0 to 255, but for those of an existing run."""
    if not isinstance(recipe, Recipe) or (problem := recipe.data.scale_problem()) is None:
        return
    if recorded is None or (recorded.data.mean, recorded.data.std) != (recipe.data.mean, recipe.data.std):
        raise UserError(problem)


def _validation_error(error: BaseException | None) -> ValidationError | None:
    """The validation error that led to ``error``, if any."""
    while error is not None and not isinstance(error, ValidationError):
        error = error.__cause__ or error.__context__
    return error


def check_price(per_hour: float | None) -> None:
    """Refuse a --price-per-hour that is no price."""
    if per_hour is not None and not 0 <= per_hour < math.inf:
        raise UserError(f"--price-per-hour {per_hour:g}: pass a price of at least 0")


def value_of(flag: str, argv: list[str]) -> str | None:
    """The value of ``flag``, for flags that decide how the rest is parsed; None without.

    Raises:
        UserError: it has no value, or several that differ.
    """
    values = []
    for i, argument in enumerate(argv):
        if argument.startswith(flag + "="):
            values.append(argument.split("=", 1)[1])
        elif argument == flag:
            if i + 1 == len(argv):
                raise UserError(f"{flag} needs a value")
            values.append(argv[i + 1])
    if len({*values}) > 1:
        raise UserError(f"{flag} is given as {' and as '.join(values)}: keep one of them")
    return values[0] if values else None


def without(flag: str, argv: list[str]) -> list[str]:
    """The command line without ``flag`` and its value."""
    kept = [argument for argument in argv if not argument.startswith(flag + "=")]
    if flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def asks_help(argv: list[str]) -> bool:
    """Whether ``--help`` or ``-h`` is among the arguments."""
    return "-h" in argv or "--help" in argv
