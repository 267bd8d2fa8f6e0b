"""``worldsize export``: a trained network as files for other programs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from worldsize import __version__, checkpoint
from worldsize.config import command_line, recipe_files
from worldsize.config.command_line import RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.distributed.rank import discover_rank_info
from worldsize.distributed.stop_signals import ends_at_once
from worldsize.errors import FAILED, SUCCESS, UserError, unwritable
from worldsize.inference.export.formats import NAMES, FormatName

if TYPE_CHECKING:
    import torch

    from worldsize.data.samples import Dataset
    from worldsize.distributed.world import World
    from worldsize.inference.export.base import Format, Options, Source
    from worldsize.inference.export.parity import Parity

_TITLE = "export RUN|CHECKPOINT --to timm|onnx|pt2|safetensors --out DIR"


@dataclass
class Export:
    """Write a run's newest checkpoint, or one checkpoint, as files for other programs, and check that they answer the same.

    The files are loaded in their own runtime (timm, onnxruntime, torch) and classify the validation images of the run. If
    more than 1 in 10,000 images get another class than from the run's network in float32, the exit code is 1 and the
    message says whether preprocessing or network differs. parity.json and the model card, README.md, have the numbers. The
    run is not changed.
    """

    settings: RecipeFlags
    to: FormatName
    """timm: a folder for timm, the Hugging Face hub and transformers; onnx: one ONNX file; pt2: a program of torch.export;
    safetensors: the weights alone."""
    out: Path
    """The folder to write: a new or empty one."""
    preprocess: bool = False
    """onnx: put resizing, crop and normalization into the file, which then takes decoded uint8 images of any size."""
    fold: bool = False
    """onnx, pt2: merge each BatchNorm into the convolution before it."""
    int8: bool = False
    """onnx: quantize weights and activations to 8 bits, and report the accuracy that this costs; the exit code is 1 if it is
    more than 1 percentage point."""
    calibration: int = 256
    """--int8: number of training images on which the ranges of activations are measured."""
    aoti: bool = False
    """pt2: compile for this machine's CPU with AOTInductor, which takes a minute and needs a C++ compiler."""
    temperature: str | None = None
    """Divide the logits by this number, or by the temperature in a folder of `eval --details`. timm, safetensors: only
    `worldsize predict` does so, because the weights do not change."""
    opset: int = 20
    """onnx: version of its operators, 18 to 23."""
    layout: Literal["triton", "kserve"] | None = None
    """onnx: arrange DIR as a model repository of Triton, or the same with a manifest of a KServe InferenceService."""
    parity: int | None = None
    """Number of validation images to compare, evenly spaced (default: all)."""
    raw: bool = False
    """Export the weights themselves, not their average, of a run with --average.name ema or swa."""


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    if not argv or argv[0].startswith("-"):
        if not command_line.asks_help(argv):
            raise UserError(f"RUN or CHECKPOINT is required as the first argument: worldsize {_TITLE}")
        command_line.parse(Export, argv, None, _TITLE)
    path = checkpoint.find(Path(argv[0]))
    recipe = recipe_files.load(str(path / "recipe.yaml"))
    default = Export(recipe, to=_format(argv), out=Path(_required("--out", argv)))
    asked = command_line.parse(Export, argv[1:], default, _TITLE)
    if discover_rank_info().size > 1:
        raise UserError("export runs in one process: start it without a launcher")
    out = asked.out.absolute()
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")

    def clean() -> None:
        shutil.rmtree(temporary, ignore_errors=True)

    try:
        with ends_at_once("nothing was exported", first=clean):
            parity = _export(path, asked, temporary)
            temporary.rename(out)
    except Exception as error:
        if (problem := unwritable(error, asked.out)) is not None:
            raise UserError(problem) from None
        raise
    finally:
        clean()
    return _report(asked, parity)


def _export(path: Path, asked: Export, folder: Path) -> Parity:
    """Create ``folder`` and write the export into it."""
    from worldsize.inference.export import formats

    form, options = formats.load(asked.to), _options(asked, path)
    _check(asked, form, options)
    try:
        folder.mkdir()
    except OSError as error:
        raise UserError(f"--out {asked.out}: cannot create it: {error.strerror}") from None
    return _work(path, asked, form, options, folder)


def _format(argv: list[str]) -> Any:
    """The value of --to. tyro checks what it reads, but not the default, which this is."""
    name = _required("--to", argv)
    if name not in NAMES:
        raise UserError(f"--to {name}: must be {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    return name


def _required(flag: str, argv: list[str]) -> str:
    """The value of a flag without a default; any if the help is asked for."""
    value = command_line.value_of(flag, argv)
    if value is None and not command_line.asks_help(argv):
        raise UserError(f"{flag} is required: worldsize {_TITLE}")
    return value or "onnx"


def _options(asked: Export, path: Path) -> Options:
    from worldsize.inference.export.base import Options

    temperature = 1.0 if asked.temperature is None else _temperature(asked.temperature, path, asked.raw)
    names = ("preprocess", "fold", "int8", "aoti", "opset", "layout", "calibration")
    return Options(temperature=temperature, **{name: getattr(asked, name) for name in names})


def _temperature(given: str, path: Path, raw: bool) -> float:
    """The number ``given``, or that of a folder of `eval --details` about the weights that are exported."""
    try:
        value = float(given)
    except ValueError:
        value = _fitted(given, path, raw)
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"--temperature {given}: must be above 0")
    return value


def _fitted(given: str, path: Path, raw: bool) -> float:
    from worldsize.inference import trained

    file = Path(given).expanduser()
    try:
        details = json.loads((file / "details.json" if file.is_dir() else file).read_text("utf-8"))
        value = float(details["temperature"])
        network = details.get("network")  # older files do not say which
        other = network is not None and network["sha256"] != trained.identity(path, raw)["sha256"]
    except OSError as error:
        raise UserError(f"--temperature {given}: neither a number nor a file ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"--temperature {given}: not a details.json of `worldsize eval --details`") from None
    if other:
        run, name, weights = (network[key] for key in ("run", "checkpoint", "weights"))
        raise UserError(f"--temperature {given}: fitted for other weights: {weights} of {name} of the run {run}")
    if (doubt := details.get("temperature_warning")) is not None:
        raise UserError(f"--temperature {given}: {doubt} Evaluate more images, or pass a number")
    return value


def _check(asked: Export, form: Format, options: Options) -> None:
    """Refuse before any work what cannot be written."""
    from worldsize.inference.export import formats
    from worldsize.inference.export.base import Options

    plain = Options()
    for name in (field.name for field in dataclasses.fields(plain)):
        if name == "calibration" or getattr(options, name) == getattr(plain, name) or name in form.options:
            continue
        able = ", ".join(other for other in formats.NAMES if name in formats.load(other).options)
        raise UserError(f"--{name} is for {able}, not for {asked.to}")
    if asked.parity is not None and asked.parity < 1:
        raise UserError(f"--parity {asked.parity}: must be at least 1")
    if asked.calibration < 1:
        raise UserError(f"--calibration {asked.calibration}: must be at least 1")
    if not (parent := asked.out.absolute().parent).is_dir():
        problem = "is a file, not a folder" if parent.exists() else "does not exist"
        raise UserError(f"--out {asked.out}: {asked.out.parent} {problem}")
    if asked.out.exists() and (not asked.out.is_dir() or any(asked.out.iterdir())):
        raise UserError(f"--out {asked.out} already exists: choose another folder")
    if asked.settings.data.val_ten_crop:
        raise UserError("an export sees one crop of an image: add --data.no-val-ten-crop to leave out the other nine")
    form.check(asked.settings, options)


def _work(path: Path, asked: Export, form: Format, options: Options, folder: Path) -> Parity:
    """Write and check the export in ``folder``."""
    import torch

    from worldsize import parallel
    from worldsize.data import open_dataset
    from worldsize.distributed.world import join
    from worldsize.inference.export import folder as folders
    from worldsize.inference.export import layout

    settings = {"precision": "fp32", "device": "cpu"}
    recipe = asked.settings.model_copy(update=settings)
    world = join(discover_rank_info(), recipe, parallel.threads(recipe.parallel))
    snapshot = checkpoint.read(path)
    # Listings are cached next to the run.
    dataset = open_dataset(recipe.data, checkpoint.run_of(path).parent / ".cache")
    source = _source(path, snapshot, recipe, asked.raw, dataset, world)
    use = form.write(folder, source, options)
    about = _about(source, snapshot.state, asked, options)
    if options.layout is not None:
        data = recipe.data
        about["model"] = layout.arrange(
            folder, options.layout, source.run, source.found.classes, data.val_crop_size, options.preprocess
        )
    original = _portable(asked.settings)
    opened = original.model_copy(update=settings if form.cpu else {"precision": "fp32"})
    (folder / "recipe.yaml").write_text(recipe_files.to_yaml(opened), "utf-8")
    with torch.inference_mode():
        parity = _parity(source, form, folder, about, dataset, world, asked)
    _describe(folder, about, parity.as_json(options.int8), recipe_files.to_yaml(original), use)
    folders.write(folder, about)
    return parity


def _source(path: Path, snapshot: Any, recipe: Recipe, raw: bool, dataset: Dataset, world: World) -> Source:
    """What is exported.

    Raises:
        CheckpointError: the checkpoint is of another network.
        UserError: it was trained on other classes than those of the dataset, or on images of another size only.
    """
    import torch

    from worldsize.inference import trained
    from worldsize.inference.export.base import Source
    from worldsize.models import factory
    from worldsize.training.precision import Precision

    found = trained.load(path, snapshot, recipe, Precision("fp32", world.device), raw)
    trained.check_classes(path, found.classes, dataset.val.classes)
    found.network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    found.network.requires_grad_(False)
    factory.check_input(found.network, recipe.data.val_crop_size, 2, recipe.model.name)

    def images(count: int) -> torch.Tensor:
        return _training_images(dataset, found, world, count)

    return Source(found, checkpoint.run_of(path).name, path.absolute().name, snapshot.state["data"], images)


def _training_images(dataset: Dataset, found: Any, world: World, count: int) -> torch.Tensor:
    """Evenly spaced training images with the preprocessing of the evaluation, normalized float32 (n, 3, size, size)."""
    import torch

    from worldsize.data.loading.build import val_loader
    from worldsize.inference.export import parity
    from worldsize.training.evaluation import views

    loader = val_loader(found.recipe, parity.some(dataset.train, count), world)
    try:
        return torch.cat([found.normalise(batch.pixels) for (batch,) in views(loader, world, 16)])
    finally:
        loader.close()


def _about(source: Source, state: dict[str, Any], asked: Export, options: Options) -> dict[str, Any]:
    """export.json, without the hashes."""
    from worldsize.inference.export.base import preprocessing

    return {
        "format": asked.to,
        "model": {"onnx": "model.onnx", "pt2": "model.pt2"}.get(asked.to, "model.safetensors"),
        **dataclasses.asdict(options),
        "run": source.run,
        "checkpoint": source.checkpoint,
        "network": source.recipe.model.name,
        "weights": "average" if not asked.raw and source.recipe.average.name != "none" else "raw",
        "classes": list(source.found.classes),
        "preprocessing": preprocessing(source.recipe.data),
        "data": source.data,
        "results": state.get("evaluation"),
        "chain": state.get("chain"),
        "worldsize": __version__,
        "versions": state.get("versions"),
    }


def _portable(recipe: Recipe) -> Recipe:
    """The recipe without the paths of the dataset on this machine."""
    data = recipe.data.model_copy(update={"root": None, "val_list": None, "label_list": None, "labels": None})
    return recipe.model_copy(update={"data": data})


def _parity(
    source: Source, form: Format, folder: Path, about: dict[str, Any], dataset: Dataset, world: World, asked: Export
) -> Parity:
    from worldsize.data.loading.build import val_loader
    from worldsize.inference.export import opened, parity
    from worldsize.inference.progress import images

    found = source.found
    runner = form.open(folder, about, source.recipe, len(found.classes))
    exported = opened.of_runner(runner, form.mirrors, source.recipe, found.classes, found.precision, about["preprocess"])
    samples = parity.some(dataset.val, asked.parity)
    loader = val_loader(source.recipe, samples, world)
    try:
        with images(len(samples), len(samples), True) as advance:
            return parity.measure(found, exported, loader, world, about["temperature"], advance)
    finally:
        loader.close()


def _describe(folder: Path, about: dict[str, Any], parity: dict[str, Any], recipe: str, use: list[str]) -> None:
    from worldsize.inference.export import card

    (folder / "parity.json").write_text(json.dumps(parity, indent=1) + "\n", "utf-8")
    (folder / "README.md").write_text(card.text(about, parity, recipe, use), "utf-8", errors="replace")


def _report(asked: Export, parity: Parity) -> int:
    print(
        f"{asked.out}: {parity.agreement:.4%} of {parity.images:,} validation images get the class of the run's network; "
        f"largest difference of a probability {parity.probability:.2g}"
        + ("" if parity.levels is None else f", of a preprocessed pixel {parity.levels:g} gray levels")
    )
    if asked.int8:
        before, after = parity.right_before / parity.images, parity.right / parity.images
        print(f"int8: top-1 {before:.2%} before, {after:.2%} after, {100 * parity.lost:.2f} percentage points lost")
    if parity.passed(asked.int8):
        return SUCCESS
    if asked.int8:
        print("int8 costs more than 1 percentage point: do not use this export; try --calibration with more images")
    else:
        print(
            f"{parity.disagreements:,} images differ, such as {parity.names[0]}: {parity.cause} differs. "
            "Do not use this export"
        )
    return FAILED
