"""One process of ``worldsize eval``: evaluates a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

from worldsize import checkpoint, parallel
from worldsize.config import recipe_files
from worldsize.config.command_line import Evaluate
from worldsize.data import open_validation
from worldsize.data.broken_images import refuse_many
from worldsize.data.datasets import test_sets
from worldsize.data.file_samples import FileSamples
from worldsize.data.images.crops import five_crops
from worldsize.data.loading.build import val_loader
from worldsize.data.samples import Samples
from worldsize.distributed import device_errors
from worldsize.distributed.batch_plan import evaluation_batch
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.world import World, join
from worldsize.errors import UserError
from worldsize.inference import trained
from worldsize.inference.details.collected import Answers, Collector
from worldsize.inference.details.command import check, write_all
from worldsize.inference.trained import Trained
from worldsize.training import out_of_memory, precision
from worldsize.training.evaluation import Result, evaluate

log = logging.getLogger(__name__)


def evaluate_checkpoint(path: Path, asked: Evaluate, rank_info: RankInfo) -> Result:
    """The result of the checkpoint ``path`` on the images and with the settings that were asked for, the same on every rank.

    Raises:
        CheckpointError: damaged, or of another model.
        UserError: the dataset's classes differ from those it was trained on.
        DataError: more images are broken than ``data.max_broken`` allows.
    """

    def remedy() -> str:
        return out_of_memory.of_evaluation(evaluation_batch(asked.settings, "cuda"), asked.settings)

    with device_errors.explained(rank_info.rank, remedy):
        return _evaluated(path, asked, rank_info)


def _evaluated(path: Path, asked: Evaluate, rank_info: RankInfo) -> Result:
    recipe = asked.settings
    check(asked)
    world = join(rank_info, recipe, parallel.threads(recipe.parallel))
    cache = checkpoint.run_of(path).parent / ".cache"  # listings are cached next to the run
    snapshot = world.collectively(lambda: checkpoint.read(path))
    classes = tuple(snapshot.state["classes"])
    samples = world.collectively(lambda: _samples(asked, classes, path, cache), local_first=True)
    if world.is_main and isinstance(samples, FileSamples) and samples.unused:
        log.warning("%s", samples.unused.note(samples.root))
    number_format = precision.resolve(recipe, world.device)
    number_format.apply()
    found = world.collectively(lambda: trained.load(path, snapshot, recipe, number_format, asked.raw))
    against = world.collectively(lambda: _other(asked.against, samples, world))
    collector = Collector() if asked.details is not None else None
    result = _evaluate(found, samples, world, asked, collector)
    refuse_many(result.broken, len(samples), recipe.data.max_broken, "the warnings above")
    if asked.details is not None and collector is not None:
        folder, network, answers = asked.details, trained.identity(path, asked.raw), collector.answers(world)
        theirs = _answers(against, samples, world, asked) if against is not None else None
        other = (str(asked.against), theirs) if theirs is not None else None
        # Rank 0 has the answers of all ranks.
        world.collectively(lambda: write_all(folder, network, answers, samples, found, other) if answers else None)
    world.close()
    return result


def _evaluate(found: Trained, samples: Samples, world: World, asked: Evaluate, collector: Collector | None) -> Result:
    recipe = found.recipe
    loader = val_loader(recipe, samples, world)
    try:
        result = evaluate(
            found.network,
            loader,
            found.normalise,
            found.precision,
            world,
            evaluation_batch(recipe, world.device.type),
            mirror=recipe.data.val_mirror,
            crops=five_crops(recipe.data),
            scores=asked.real_labels is None,
            each=collector.add if collector is not None else None,
            ahead=recipe.data.device_prefetch,
        )
    finally:
        loader.close()
    assert result is not None  # nothing asks it to stop
    return result


def _other(target: Path | None, samples: Samples, world: World) -> Trained | None:
    """The network to compare with, with its own preprocessing and number format; None without a ``target``.

    Raises:
        UserError: its classes are not those of the images.
    """
    if target is None:
        return None
    path = checkpoint.find(target)
    recipe = recipe_files.load(str(path / "recipe.yaml"))
    other = trained.load(path, checkpoint.read(path), recipe, precision.resolve(recipe, world.device))
    if other.classes != samples.classes:
        raise UserError(f"--against {target} has other classes than these images")
    return other


def _answers(found: Trained, samples: Samples, world: World, asked: Evaluate) -> Answers | None:
    collector = Collector()
    with found.precision.applied():
        _evaluate(found, samples, world, asked, collector)
    return collector.answers(world)


def _samples(asked: Evaluate, classes: tuple[str, ...], path: Path, cache: Path) -> Samples:
    recipe = asked.settings
    if asked.images is None:
        samples = open_validation(recipe.data, cache)
    elif recipe.data.multilabel:
        raise UserError("--images: images of a run with several labels per image need a table; pass --data.root")
    else:
        samples = test_sets.open_folder(asked.images.expanduser(), classes, cache)
    trained.check_classes(path, classes, samples.classes)
    return samples if asked.real_labels is None else test_sets.reassessed(samples, asked.real_labels)
