"""One process of a run, from its place in the world to its result: builds the parts and hands them to the loop."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from worldsize import batch, catalog, checkpoint, environment, model, optim, parallel, precision, run, track
from worldsize.data import open_dataset
from worldsize.data.crops import Crop, evaluation_crop, training_crop
from worldsize.data.loader import Loader
from worldsize.data.pixels import Normalise
from worldsize.data.samples import Dataset, Samples
from worldsize.errors import CheckpointError, Stopped, UserError, WorldsizeError
from worldsize.evaluate import Result, evaluate
from worldsize.progress import Progress
from worldsize.recipe import Recipe
from worldsize.request import TrainJob, preflight
from worldsize.run import RunFolder
from worldsize.saver import Saver
from worldsize.signals import StopFlag
from worldsize.state import State
from worldsize.track.base import Facts, Summary
from worldsize.train import Trainer
from worldsize.world import Place, World, cores, join

log = logging.getLogger(__name__)

T = TypeVar("T")


def train(job: TrainJob, place: Place, stop: StopFlag) -> Summary | None:
    """Train on this process, together with the others of its world.

    Returns:
        What came out; None where the resumed run had already ended.
    """
    begun = time.monotonic()
    preflight(job, place.size)
    world = join(place, job.recipe)
    _set_determinism(job.recipe.deterministic)
    try:
        dataset = together(world, lambda: open_dataset(job.recipe.data, job.cache), local_first=True)
        _same_everywhere(world, dataset)
        snapshot = together(world, lambda: _snapshot(job, dataset))
        if snapshot is not None and _ended(snapshot.state):
            return None
        network = together(world, lambda: _network(job.recipe, world, dataset))
        folder = _folder(job, world)
        trainer = _assemble(job, world, dataset, network, folder, snapshot, stop)
        return _run(trainer, job, folder, dataset, begun)
    finally:
        world.close()


def together(world: World, work: Callable[[], T], local_first: bool = False) -> T:
    """Do ``work`` on every rank; where one fails for a reason worth telling, all raise that.

    Args:
        local_first: one rank per machine goes ahead, so that the others find what it cached.
    """
    result: T | None = None
    failure: WorldsizeError | None = None
    for ahead in (True, False) if local_first else (None,):
        if ahead in (None, world.place.local_rank == 0):
            try:
                result = work()
            except WorldsizeError as error:
                failure = error
        if ahead:
            world.barrier()
    world.agree(failure)
    return result  # type: ignore[return-value]


def evaluate_checkpoint(path: Path, recipe: Recipe, cache: Path, place: Place, stop: StopFlag) -> Result | None:
    """The result of the checkpoint ``path`` on the recipe's validation set; None when stopped by a signal."""
    world = join(place, recipe)
    try:
        dataset = together(world, lambda: open_dataset(recipe.data, cache), local_first=True)
        number_format = precision.resolve(recipe.precision, world.device)

        def ready() -> nn.Module:
            snapshot = checkpoint.read(path)
            without_weights = recipe.model_copy(update={"model": recipe.model.model_copy(update={"weights": None})})
            network = model.build(without_weights, len(dataset.classes), world.device, number_format.weights)
            try:
                network.load_state_dict(snapshot.model)
            except RuntimeError:
                raise CheckpointError(
                    f"{path} does not fit {recipe.model.name} with the {len(dataset.classes)} classes of this data set"
                ) from None
            return network

        network = together(world, ready)
        loader = _loader(recipe, dataset.val, evaluation_crop(recipe.data), world)
        normalise = Normalise(recipe.data, world.device, number_format.weights)
        try:
            return evaluate(network, loader, normalise, number_format, world, recipe.micro_batch, lambda: bool(stop))
        finally:
            loader.close()
    finally:
        world.close()


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _same_everywhere(world: World, dataset: Dataset) -> None:
    """Refuse ranks with different data or libraries: they would disagree in silence."""
    for what, value in (("the data set differs", dataset.fingerprint), ("versions differ", environment.versions())):
        values = world.gather(value)
        if odd := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise UserError(f"{what} between ranks 0 and {odd[0]}: {values[0]} and {values[odd[0]]}")


def _snapshot(job: TrainJob, dataset: Dataset) -> checkpoint.Snapshot | None:
    """The state to go on from; None for a new run, or one that was never saved."""
    if job.resume is None:
        return None
    path = checkpoint.newest_valid(job.resume.checkpoints)
    if path is None:
        return None
    snapshot = checkpoint.read(path)
    changes = _changes(snapshot.state["identity"], job.recipe.identity())
    if snapshot.state["data"] != dataset.fingerprint:
        changes.append(f"the data set: {_brief(snapshot.state['data'])} was {_brief(dataset.fingerprint)} is")
    if changes and not job.allow_changes:
        raise UserError(
            f"{job.resume.path} cannot go on as it was, because these changed:\n  "
            + "\n  ".join(changes)
            + "\nUndo that, or say --allow-changes to go on all the same."
        )
    for change in changes:
        log.warning("going on although this changed: %s", change)
    return snapshot


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            found += _changes(before, after, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: was {before}, is {after}")
    return found


def _brief(fingerprint: dict[str, Any]) -> str:
    return f"{fingerprint['train_samples']:,}+{fingerprint['val_samples']:,} pictures ({fingerprint['train'][:8]})"


def _ended(state: dict[str, Any]) -> bool:
    return bool(state["step"] >= state["total_steps"] and state["evaluated_step"] == state["step"])


def _network(recipe: Recipe, world: World, dataset: Dataset) -> nn.Module:
    """The fresh model, after checking that it, the batches and the pictures' sizes go together."""
    batch.plan(recipe, world.size).steps_per_epoch(len(dataset.train))
    number_format = precision.resolve(recipe.precision, world.device)
    network = model.build(recipe, len(dataset.classes), world.device, number_format.weights)
    for size in {recipe.data.train_crop_size, recipe.data.val_crop_size}:
        model.takes_size(network, size, recipe.model.name)
    return network


def _folder(job: TrainJob, world: World) -> RunFolder:
    """The run's folder, made or opened by rank 0; on all ranks."""

    def prepare() -> Path:
        if job.resume is not None:
            checkpoint.remove_leftovers(job.resume.checkpoints)
            return job.resume.path
        if not world.is_main:
            return job.out
        folder = run.create(job.out, job.name, job.stem)
        folder.recipe.write_text(catalog.to_yaml(job.recipe))
        return folder.path

    folder = RunFolder(world.gather(together(world, prepare))[0])
    run.attach_log(folder, world.rank)
    return folder


def _assemble(
    job: TrainJob,
    world: World,
    dataset: Dataset,
    network: nn.Module,
    folder: RunFolder,
    snapshot: checkpoint.Snapshot | None,
    stop: StopFlag,
) -> Trainer:
    recipe = job.recipe
    plan = batch.plan(recipe, world.size)
    number_format = precision.resolve(recipe.precision, world.device)
    optimizer = optim.build(network, recipe.optimizer, world.device)
    strategy = parallel.build(_compiled(network, recipe), recipe.parallel, world)
    statistics = model.RunningStatistics(network, plan.accumulation)
    state = State(network, optimizer, number_format.scaler(), statistics, strategy)
    facts = {
        "identity": recipe.identity(),
        "data": dataset.fingerprint,
        "classes": list(dataset.classes),
        "global_batch": plan.global_batch,
        "total_steps": plan.total_steps(recipe, len(dataset.train)),
    }
    if snapshot is not None:
        state.restore(snapshot, world)
    progress = Progress.from_dict(snapshot.state) if snapshot is not None else Progress()
    return Trainer(
        recipe=recipe,
        plan=plan,
        world=world,
        state=state,
        precision=number_format,
        normalise=Normalise(recipe.data, world.device, number_format.weights),
        training=_loader(recipe, dataset.train, training_crop(recipe.data), world),
        validation=_loader(recipe, dataset.val, evaluation_crop(recipe.data), world),
        trackers=track.build(recipe.track, folder, progress.step) if world.is_main else track.silent(),
        saver=Saver(recipe.checkpoint, folder.checkpoints, world, state, catalog.to_yaml(recipe), facts),
        stop=stop,
        progress=progress,
    )


def _compiled(network: nn.Module, recipe: Recipe) -> nn.Module:
    return torch.compile(network) if recipe.model.compile else network  # type: ignore[return-value]


def _loader(recipe: Recipe, samples: Samples, crop: Crop, world: World) -> Loader:
    return Loader(
        samples,
        crop,
        seed=recipe.seed,
        workers=recipe.data.workers or max(1, cores() // world.place.local_size),
        prefetch=recipe.data.prefetch,
        pin=world.device.type == "cuda",
    )


def _run(trainer: Trainer, job: TrainJob, folder: RunFolder, dataset: Dataset, begun: float) -> Summary:
    facts = _facts(trainer, folder, dataset)
    if trainer.world.is_main:
        folder.recipe.write_text(catalog.to_yaml(job.recipe))
        run.write_json(folder.environment, facts.environment)
    summary = None
    try:
        trainer.trackers.begin(facts)
        result = trainer.fit()
        summary = _summary(trainer, result, time.monotonic() - begun)
        if trainer.world.is_main:
            run.write_json(folder.result, asdict(summary))
        return summary
    except Stopped as stopped:
        raise Stopped(f"{stopped}; {_how_to_go_on(trainer.saver, folder)}") from None
    except WorldsizeError as error:
        log.info("%s", error)
        raise
    finally:
        # From here on there is nothing left that a signal could save.
        trainer.stop.ignore_more()
        trainer.training.close()
        trainer.validation.close()
        trainer.saver.close()
        trainer.trackers.end(summary)


def _how_to_go_on(saver: Saver, folder: RunFolder) -> str:
    command = f"go on with: worldsize train --resume {folder.path}"
    if saver.failed is None:
        return f"all is saved. {command}"
    return f"its state could NOT be saved ({saver.failed}). Last good checkpoint: {saver.newest() or 'none'}; {command}"


def _facts(trainer: Trainer, folder: RunFolder, dataset: Dataset) -> Facts:
    recipe, plan, world = trainer.recipe, trainer.plan, trainer.world
    machine = environment.describe(world, trainer.precision.name, trainer.state.strategy.name)
    return Facts(
        name=folder.name,
        folder=str(folder.path),
        recipe=recipe.model_dump(mode="json"),
        environment=machine | {"data": dataset.fingerprint},
        model=recipe.model.name,
        parameters=sum(p.numel() for p in trainer.state.model.parameters()),
        train_samples=len(dataset.train),
        val_samples=len(dataset.val),
        classes=len(dataset.classes),
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        peak_lr=trainer.peak_lr,
        steps_per_epoch=trainer.steps_per_epoch,
        total_steps=trainer.total_steps,
        first_step=trainer.progress.step,
    )


def _summary(trainer: Trainer, result: Result, seconds: float) -> Summary:
    at = trainer.progress
    newest = trainer.saver.newest() if trainer.world.is_main else None
    return Summary(
        top1=result.top1,
        top5=result.top5,
        loss=result.loss,
        best_top1=at.best_top1,
        best_epoch=at.best_epoch,
        steps=at.step,
        epochs=round(at.step / trainer.steps_per_epoch, 3),
        images_per_s=at.step * trainer.plan.global_batch / max(at.train_s, 1e-9),
        seconds=seconds,
        checkpoint=str(newest) if newest else None,
    )
