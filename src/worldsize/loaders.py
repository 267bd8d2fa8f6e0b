"""The loaders of a run: which samples, cropped how, in which order, with how many threads."""

from __future__ import annotations

import logging

from worldsize.batch import BatchPlan
from worldsize.data import native
from worldsize.data.blocks import BlockShuffle
from worldsize.data.crops import Crop, RandomResizedCrop, evaluation_crop, training_crop
from worldsize.data.loader import Loader
from worldsize.data.order import Order
from worldsize.data.samples import Samples
from worldsize.place import cores
from worldsize.recipe import Recipe
from worldsize.world import World

log = logging.getLogger(__name__)


def train_loader(recipe: Recipe, samples: Samples, plan: BatchPlan, world: World) -> Loader:
    """The loader of the training split."""
    data = recipe.data
    if data.shuffle == "full":
        return _loader(recipe, samples, training_crop(data), world)
    order = BlockShuffle(recipe.seed, len(samples), plan.global_batch, data.block, data.pool)
    blocks = samples.in_blocks(data.block, order.kept(world.size, data.readers))
    if blocks is samples and world.is_main:
        log.warning("data.shuffle block is for shards; this dataset is not packed, so it only shuffles less")
    return _loader(recipe, blocks, training_crop(data), world, order)


def val_loader(recipe: Recipe, samples: Samples, world: World) -> Loader:
    """The loader of the validation split."""
    if recipe.data.shuffle == "block":  # blocks are read one after the other
        samples = samples.in_blocks(recipe.data.block, 2 * recipe.data.readers)
    return _loader(recipe, samples, evaluation_crop(recipe.data), world)


def _loader(recipe: Recipe, samples: Samples, crop: Crop, world: World, order: Order | None = None) -> Loader:
    scaling = recipe.data.dct_scaling and isinstance(crop, RandomResizedCrop)
    if scaling and world.is_main and native.load() is None:
        log.warning("data.dct_scaling has no effect without the native decoder: %s", native.why_not())
    return Loader(
        samples,
        crop,
        seed=recipe.seed,
        workers=recipe.data.workers or max(1, cores() // world.place.local_size),
        readers=recipe.data.readers,
        prefetch=recipe.data.prefetch,
        pin=world.device.type == "cuda",
        scaling=scaling,
        order=order,
    )
