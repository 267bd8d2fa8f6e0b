"""The loaders of a run: which samples, cropped how, in which order, with how many threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from worldsize.config.recipe import Data, Recipe
from worldsize.data.augmentation import policies
from worldsize.data.augmentation.mixing import Mixing
from worldsize.data.images import native
from worldsize.data.images.crops import Crop, RandomResizedCrop, crop_size, evaluation_crop, training_crop
from worldsize.data.loading.loader import Loader, Treatment
from worldsize.data.samples import Samples
from worldsize.data.sampling.block_shuffle import BlockShuffle
from worldsize.data.sampling.order import Order
from worldsize.data.sampling.weighted import WeightedShuffle
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import cores
from worldsize.distributed.world import World
from worldsize.errors import UserError

log = logging.getLogger(__name__)


def train_loader(recipe: Recipe, samples: Samples, plan: BatchPlan, world: World) -> Loader:
    """The loader of the training split."""
    data = recipe.data
    crop = training_crop(data, data.train_crop_size)
    treatment = _treatment(recipe, plan.micro_batch)
    if data.shuffle == "full":
        return _loader(recipe, samples, crop, world, _weighted(recipe, samples, plan), treatment)
    order = BlockShuffle(recipe.seed, len(samples), plan.global_batch, data.block, data.pool)
    blocks = samples.in_blocks(data.block, order.kept(world.size, data.readers))
    if blocks is samples and world.is_main:
        log.warning("data.shuffle block is for shards; this dataset is not packed, so it only shuffles less")
    return _loader(recipe, blocks, crop, world, order, treatment)


def class_shares(data: Data, samples: Samples) -> NDArray[np.float64] | None:
    """How often weighted sampling draws the images of each class together, relative to other classes, (classes,).

    None if each image appears once.

    Raises:
        UserError: the recipe has weights for another number of classes, or only for classes without images.
    """
    if not data.weighted:
        return None
    counts, weights = samples.class_counts(), data.sampling_weights
    if data.sampling == "balanced":
        return (counts > 0).astype(np.float64)
    if len(weights) != len(counts):
        raise UserError(f"--data.sampling-weights has {len(weights)} weights, but the dataset has {len(counts)} classes")
    shares = counts * np.array(weights)
    if not shares.any():
        raise UserError("--data.sampling-weights leaves no image: the classes with a weight above 0 have no training images")
    return shares


def _weighted(recipe: Recipe, samples: Samples, plan: BatchPlan) -> WeightedShuffle | None:
    shares = class_shares(recipe.data, samples)
    if shares is None:
        return None
    distinct = -(-plan.global_batch // recipe.augment.repeats)  # positions that a step uses, see `order.repeated`
    return WeightedShuffle(recipe.seed, samples.labels, shares, plan.steps_per_epoch(len(samples)) * distinct)


def _treatment(recipe: Recipe, micro_batch: int) -> Callable[[int], Treatment]:
    """What happens to the training images of an epoch (0-based)."""

    @cache
    def of(size: int) -> Treatment:
        mixing = Mixing(recipe.augment, recipe.seed, micro_batch, size) if recipe.augment.mixes else None
        policy = policies.build(recipe.augment, recipe.data.mean, size)
        return Treatment(training_crop(recipe.data, size), policy, mixing)

    return lambda epoch: of(crop_size(recipe.data, epoch))


def val_loader(recipe: Recipe, samples: Samples, world: World) -> Loader:
    """The loader of the validation split."""
    if recipe.data.shuffle == "block":  # blocks are read one after the other
        samples = samples.in_blocks(recipe.data.block, 2 * recipe.data.readers)
    return _loader(recipe, samples, evaluation_crop(recipe.data), world)


def _loader(
    recipe: Recipe,
    samples: Samples,
    crop: Crop,
    world: World,
    order: Order | None = None,
    treatment: Callable[[int], Treatment] | None = None,
) -> Loader:
    scaling = recipe.data.dct_scaling and isinstance(crop, RandomResizedCrop)
    if scaling and world.is_main and native.load() is None:
        log.warning("data.dct_scaling has no effect without the native decoder: %s", native.reason_missing())
    return Loader(
        samples,
        crop,
        seed=recipe.seed,
        workers=recipe.data.workers or max(1, cores() // world.rank_info.local_size),
        readers=recipe.data.readers,
        prefetch=recipe.data.prefetch,
        pin=world.device.type == "cuda",
        scaling=scaling,
        order=order,
        treatment=treatment,
        repeats=recipe.augment.repeats,
        fill=policies.fill_color(recipe.augment, recipe.data.mean),
    )
