"""One process of ``worldsize eval``: evaluates a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from worldsize import checkpoint, model, parallel, precision
from worldsize.batch import evaluation_batch
from worldsize.data import open_dataset
from worldsize.data.pixels import Normalise
from worldsize.data.samples import Dataset
from worldsize.errors import CheckpointError, UserError
from worldsize.evaluate import Result, evaluate
from worldsize.loaders import val_loader
from worldsize.place import Place
from worldsize.precision import Precision
from worldsize.recipe import Recipe
from worldsize.world import World, join


def evaluate_checkpoint(path: Path, recipe: Recipe, place: Place) -> Result:
    """The result of the checkpoint ``path`` on the validation set of ``recipe``, the same on every rank.

    Raises:
        CheckpointError: damaged, or of another model.
        UserError: the dataset's classes differ from those it was trained on.
    """
    world = join(place, recipe, parallel.threads(recipe.parallel))
    # Of RUN/checkpoints/step-N: listings are cached next to the run.
    cache = path.absolute().parents[2] / ".cache"
    dataset = world.collectively(lambda: open_dataset(recipe.data, cache), local_first=True)
    number_format = precision.resolve(recipe, world.device)
    number_format.apply()
    network = world.collectively(lambda: _load(path, recipe, dataset, world, number_format))
    loader = val_loader(recipe, dataset.val, world)
    normalise = Normalise(recipe.data, world.device, number_format.weights)
    batch = evaluation_batch(recipe.micro_batch, world.device.type)
    try:
        result = evaluate(network, loader, normalise, number_format, world, batch)
    finally:
        loader.close()
    assert result is not None  # nothing asks it to stop
    world.close()
    return result


def _load(path: Path, recipe: Recipe, dataset: Dataset, world: World, number_format: Precision) -> nn.Module:
    snapshot = checkpoint.read(path)
    if (trained := snapshot.state["classes"]) != list(dataset.classes):
        odd = next(iter(set(trained) ^ set(dataset.classes)), "their order")
        raise UserError(f"{path} was trained on other classes than those of this dataset: they differ in {odd}")
    # The initial weights, if any, need not exist any more.
    fresh = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
    network = model.build(fresh, len(dataset.classes), world.device, number_format.weights)
    try:
        network.load_state_dict(snapshot.model)
    except RuntimeError:
        raise CheckpointError(f"{path} does not fit {recipe.model.name}") from None
    return network
