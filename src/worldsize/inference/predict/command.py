"""``worldsize predict``: the classes of images, with the preprocessing of the run's evaluation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from worldsize.config import command_line, output_files
from worldsize.config.command_line import RecipeFlags
from worldsize.config.recipe import Recipe
from worldsize.distributed.rank import RankInfo, discover_rank_info
from worldsize.distributed.stop_signals import StopFlag
from worldsize.errors import SUCCESS, DataError, UserError
from worldsize.inference import opening

if TYPE_CHECKING:
    from worldsize.data.loading.loader import Loader
    from worldsize.data.samples import Samples
    from worldsize.distributed.world import World
    from worldsize.inference.opening import Source
    from worldsize.inference.predict.rows import Columns
    from worldsize.inference.predict.top import Row
    from worldsize.inference.trained import Trained

_TITLE = "predict RUN|CHECKPOINT|EXPORT [PATHS ...]"


@dataclass
class Predict:
    """Classify images with a run's newest checkpoint, one checkpoint or an export, and the preprocessing of its evaluation.

    PATHS are files, folders (with all folders in them), folders of shards, tar files, or `-` for standard input: one image,
    or a list of paths, one per line. Without PATHS, the validation images of the run. Images that cannot be decoded are
    reported and get a row without labels. Rows have the order of the images, with any --procs. The run is not changed.
    """

    settings: RecipeFlags
    paths: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """What to classify."""
    topk: int = 5
    """Number of classes for each image, the best first."""
    format: Literal["table", "csv", "json", "parquet"] = "table"
    """Form of the result. parquet needs the extra `parquet` and --results-file."""
    results_file: Path | None = None
    """Write the result to this file instead of the terminal."""
    output: Literal["prob", "logit"] = "prob"
    """The value of a class: its probability, or the network's output."""
    sheet: Path | None = None
    """Also write a page with the images and their best classes."""
    sheet_images: int = 300
    """Number of images on the page."""
    filename_col: str = "filename"
    """Name of the column with the path of the image."""
    label_col: str = "label"
    """Name of the column with the class."""
    output_col: str | None = None
    """Name of the column with the value (default: prob or logit)."""
    include_index: bool = False
    """Add the number of the class, as column `index`."""
    exclude_output: bool = False
    """Leave out the values."""
    procs: int = 1
    """Processes on this machine; each uses one GPU, or its share of the cores."""
    raw: bool = False
    """Use the weights themselves, not their average, of a run with --average.name ema or swa."""


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    from worldsize.launch.distribute import distribute

    if not argv or argv[0].startswith("-"):
        if not command_line.asks_help(argv):
            raise UserError(f"RUN, CHECKPOINT or EXPORT is required as the first argument: worldsize {_TITLE}")
        command_line.parse(Predict, argv, Predict(Recipe()), _TITLE)
    source = opening.find(Path(argv[0]))
    asked = command_line.parse(Predict, argv[1:], Predict(source.recipe), _TITLE)
    rank_info = discover_rank_info()
    _check(asked, max(rank_info.size, asked.procs))
    return distribute(["predict", *argv], asked.procs, rank_info, lambda stop: _work(source, asked, rank_info, stop))


def _check(asked: Predict, processes: int) -> None:
    """Refuse before any work what cannot be read or written."""
    from worldsize.inference.predict import rows
    from worldsize.inference.predict.images import STDIN

    if asked.topk < 1:
        raise UserError(f"--topk {asked.topk}: must be at least 1")
    if asked.sheet_images < 1:
        raise UserError(f"--sheet-images {asked.sheet_images}: must be at least 1")
    if asked.format == "parquet":
        if asked.results_file is None:
            raise UserError("--format parquet is binary: pass --results-file FILE")
        rows.arrow_modules()
    repeated = _columns(asked, asked.topk).repeated()
    if repeated is not None and asked.format != "table":
        raise UserError(
            f"two columns would be called {repeated!r}: choose other names with --filename-col, --label-col and --output-col"
        )
    if processes > 1 and STDIN in asked.paths:
        raise UserError("- reads standard input, which several processes cannot share: pass the paths, or leave --procs out")
    output_files.check_each({"--results-file": asked.results_file, "--sheet": asked.sheet})


def _work(source: Source, asked: Predict, rank_info: RankInfo, stop: StopFlag) -> int:
    from worldsize.distributed import device_errors
    from worldsize.distributed.batch_plan import evaluation_batch
    from worldsize.training import out_of_memory

    batch = evaluation_batch(asked.settings, "cuda")
    with device_errors.explained(rank_info.rank, lambda: out_of_memory.of_evaluation(batch, asked.settings)):
        return _predicted(source, asked, rank_info, stop)


def _predicted(source: Source, asked: Predict, rank_info: RankInfo, stop: StopFlag) -> int:
    """One process: its share of the images; rank 0 writes the rows of all."""
    from worldsize import parallel
    from worldsize.data.loading.build import val_loader
    from worldsize.distributed.world import join
    from worldsize.training import precision

    recipe = asked.settings
    world = join(rank_info, recipe, parallel.threads(recipe.parallel))
    number_format = precision.resolve(recipe, world.device)
    number_format.apply()
    found = world.collectively(lambda: source.load(recipe, number_format, asked.raw))
    samples = world.collectively(lambda: _samples(source, asked, found.classes), local_first=True)
    loader = val_loader(recipe, samples, world)
    try:
        rows = _rows(found, loader, world, asked, stop)
    finally:
        loader.close()
    left = world.collectively(lambda: _reader_left(rows, samples, found, asked, source) if world.is_main else None)
    world.close()
    if left is not None:
        raise left
    return SUCCESS


def _samples(source: Source, asked: Predict, classes: tuple[str, ...]) -> Samples:
    from worldsize.data import open_validation
    from worldsize.inference.predict import images

    if not asked.paths:
        return open_validation(asked.settings.data, source.cache)
    return images.find(asked.paths, classes)


def _rows(found: Trained, loader: Loader, world: World, asked: Predict, stop: StopFlag) -> list[Row]:
    """The rows of all ranks, in the order of the images."""
    import torch

    from worldsize.distributed.batch_plan import evaluation_batch, evaluation_share
    from worldsize.inference.predict import top
    from worldsize.inference.progress import images
    from worldsize.training.evaluation import highest

    data, device = found.recipe.data, world.device.type
    batch, total = evaluation_batch(found.recipe, device), len(loader.samples)
    share = len(evaluation_share(total, world.rank, world.size, batch))
    best: list[tuple[list[int], list[list[int]], list[list[float]]]] = []
    with torch.inference_mode(), images(share, total, world.is_main) as advance:
        for indices, logits in found.answers(loader, world, batch):
            if stop:
                raise KeyboardInterrupt
            values = logits.float()
            if asked.output == "prob":
                values = top.probabilities(values, data.multilabel)
            chosen = highest(logits, asked.topk)  # of probabilities, several may round to 1 or 0
            best.append((indices.tolist(), chosen.tolist(), values.gather(1, chosen).tolist()))
            advance(len(indices))
    rows: dict[int, Row] = {}
    name = loader.samples.name
    for batches, broken in world.gather((best, dict(loader.broken.new))):
        rows |= {i: top.Row(name(i), tuple(k), tuple(v)) for each in batches for i, k, v in zip(*each, strict=True)}
        rows |= {i: top.Row(name(i), broken=reason) for i, reason in broken.items()}
    if all(row.broken is not None for row in rows.values()):
        raise DataError(f"none of the {total:,} images could be decoded; the first: {name(0)}: {rows[0].broken}")
    return [rows[i] for i in sorted(rows)]


def _reader_left(
    rows: list[Row], samples: Samples, found: Trained, asked: Predict, source: Source
) -> BrokenPipeError | None:
    """Write everything. The error of a reader that left, such as ``head``, is no failure of a disk: it is returned."""
    try:
        _write(rows, samples, found, asked, source)
        sys.stdout.flush()
    except BrokenPipeError as error:
        return error
    return None


def _columns(asked: Predict, classes: int) -> Columns:
    from worldsize.inference.predict.rows import Columns

    value = None if asked.exclude_output else asked.output_col or asked.output
    index = "index" if asked.include_index else None
    return Columns(asked.filename_col, asked.label_col, index, value, min(asked.topk, classes))


def _write(rows: list[Row], samples: Samples, found: Trained, asked: Predict, source: Source) -> None:
    from worldsize.inference.predict import rows as forms
    from worldsize.inference.predict import sheet

    columns = _columns(asked, len(found.classes))
    if asked.format == "parquet":
        assert asked.results_file is not None
        with output_files.written(asked.results_file):
            forms.write_parquet(asked.results_file, rows, columns, found.classes)
    elif asked.format == "table":
        forms.show(rows, columns, found.classes, asked.output == "prob", asked.results_file)
    else:
        content = forms.encoded(asked.format, rows, columns, found.classes)
        if asked.results_file is None:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)  # UTF-8 in any locale
        else:
            with output_files.written(asked.results_file):
                asked.results_file.write_bytes(content)
    if asked.sheet is not None:
        title = f"{source.title}: {len(rows):,} images"
        with output_files.written(asked.sheet):
            sheet.write(asked.sheet, title, samples, rows, found.classes, asked.sheet_images, asked.output == "prob")
    broken = sum(row.broken is not None for row in rows)
    if broken:
        print(f"{broken:,} of {len(rows):,} images could not be decoded", file=sys.stderr)
    for file in filter(None, (asked.results_file, asked.sheet)):
        print(f"wrote {file}", file=sys.stderr)
