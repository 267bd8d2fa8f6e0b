"""One process of a run, from its place in the world to its result: builds the parts and hands them to the loop."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize import catalog, checkpoint, environment, model, optim, parallel, precision, run, track
from worldsize.asynchronous import AsyncTrainer
from worldsize.batch import BatchPlan
from worldsize.compute import Compute
from worldsize.data import native, open_dataset
from worldsize.data.blocks import BlockShuffle
from worldsize.data.crops import Crop, RandomResizedCrop, evaluation_crop, training_crop
from worldsize.data.loader import Loader
from worldsize.data.order import Order
from worldsize.data.pixels import Normalise
from worldsize.data.samples import Dataset, EncodedSamples, Samples
from worldsize.errors import Stopped, UserError
from worldsize.evaluate import Result
from worldsize.loop import Loop
from worldsize.parallel.base import Parts
from worldsize.place import Place, cores
from worldsize.precision import Precision
from worldsize.progress import Progress
from worldsize.recipe import Recipe
from worldsize.request import TrainJob, preflight
from worldsize.run import RunFolder
from worldsize.saver import Saver
from worldsize.signals import StopFlag
from worldsize.state import State
from worldsize.track.base import Facts, Summary
from worldsize.train import Trainer
from worldsize.world import World, join

log = logging.getLogger(__name__)


def train(job: TrainJob, place: Place, stop: StopFlag) -> Summary | None:
    """Train on this process, together with the others of its world.

    Returns:
        What came out; None where the resumed run had already ended, and on a worker of an asynchronous run.
    """
    begun = time.monotonic()
    preflight(job, place)
    _set_determinism(job.recipe.deterministic)
    world = join(place, job.recipe)
    job = _found_again(job, world)
    dataset = world.together(lambda: open_dataset(job.recipe.data, job.cache), local_first=True)
    plan = parallel.batch_plan(job.recipe, world.size)
    facts = _fixed_facts(job.recipe, plan, dataset, precision.resolve(job.recipe.precision, world.device), world)
    _same_everywhere(world, facts)
    snapshot = _snapshot(job, facts, world)
    if snapshot is not None and _ended(snapshot.state, facts):
        world.close()
        return None
    network = world.together(lambda: _network(job.recipe, plan, world, dataset))
    stop.arm()
    folder = _folder(job, world)
    with world.together(lambda: run.RunLog(folder, world.rank)):
        if job.autoresume:
            step = snapshot.state["step"] if snapshot is not None else 0
            world.together(lambda: run.count_start(folder, step, job.retries) if world.is_main else None)
        trainer = _assemble(job, plan, world, dataset, network, folder, snapshot, facts, stop)
        summary = _run(trainer, job, folder, dataset, begun)
    # Only after success: a group with ranks that failed would be waited for.
    world.close()
    return summary


def _found_again(job: TrainJob, world: World) -> TrainJob:
    """With --autoresume, the same job as one that goes on, if rank 0 finds its run."""
    if not job.autoresume or job.name is None:
        return job
    folder = RunFolder(job.out / job.name)
    return replace(job, resume=folder) if world.gather(folder.path.exists())[0] else job


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _fixed_facts(
    recipe: Recipe, plan: BatchPlan, dataset: Dataset, number_format: Precision, world: World
) -> dict[str, Any]:
    """What must not change while a run goes on; part of every checkpoint."""
    identity = recipe.identity()
    if parallel.depends_on_world_size(recipe.parallel):
        identity["parallel"]["processes"] = world.size
    return {
        "identity": identity,
        "data": dataset.fingerprint,
        "classes": list(dataset.classes),
        "precision": number_format.name,
        "global_batch": plan.global_batch,
        "total_steps": plan.total_steps(recipe, len(dataset.train)),
    }


def _same_everywhere(world: World, facts: dict[str, Any]) -> None:
    """Refuse ranks with different data or libraries: they would disagree in silence."""
    own = {"data": facts["data"], "precision": facts["precision"], "versions": environment.versions()}
    values = world.gather(own)
    for rank, other in enumerate(values):
        for what in own:
            if other[what] != values[0][what]:
                raise UserError(f"{what} of ranks 0 and {rank} differ: {values[0][what]} and {other[what]}")


def _snapshot(job: TrainJob, facts: dict[str, Any], world: World) -> checkpoint.Snapshot | None:
    """The state to go on from, the same on all ranks; None for a new run, or one that was never saved."""
    if job.resume is None:
        return None
    folder = job.resume.checkpoints
    newest = world.together(lambda: checkpoint.newest_valid(folder) if world.is_main else None)
    path = world.gather(newest)[0]
    if path is None:
        return None
    snapshot = world.together(lambda: checkpoint.read(path))
    _check_unchanged(job, snapshot, facts)
    return snapshot


def _check_unchanged(job: TrainJob, snapshot: checkpoint.Snapshot, facts: dict[str, Any]) -> None:
    old = snapshot.state
    if old["global_batch"] != facts["global_batch"]:
        raise UserError(
            f"this run has a global batch of {old['global_batch']} and cannot go on with {facts['global_batch']}: "
            "steps, epochs and learning rate would mean something else. Start a new run with --model.weights "
            "CHECKPOINT/model.safetensors" + (", or resume on as many processes" if job.recipe.per_process_batch else "")
        )
    changes = _changes(old["identity"], facts["identity"]) + _changes(
        {"precision in use": old["precision"]}, {"precision in use": facts["precision"]}
    )
    if old["data"] != facts["data"]:
        changes.append(f"the data set: was {_brief(old['data'])}, is {_brief(facts['data'])}")
    if changes and not job.allow_changes:
        raise UserError(
            "this run cannot go on as it was, because something changed:\n  "
            + "\n  ".join(changes)
            + "\nUndo that, or say --allow-changes to go on all the same."
        )
    for change in changes:
        log.warning("going on although this changed: %s", change)


def _changes(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) or isinstance(after, dict):
            found += _changes(before or {}, after or {}, f"{prefix}{key}.")
        elif before != after:
            found.append(f"{prefix}{key}: was {before}, is {after}")
    return found


def _brief(fingerprint: dict[str, Any]) -> str:
    return f"{fingerprint['train_samples']:,}+{fingerprint['val_samples']:,} pictures ({fingerprint['train'][:8]})"


def _ended(state: dict[str, Any], facts: dict[str, Any]) -> bool:
    return bool(state["step"] >= facts["total_steps"] and state["evaluated_step"] == state["step"])


def _network(recipe: Recipe, plan: BatchPlan, world: World, dataset: Dataset) -> nn.Module:
    """The fresh model, after checking that it, the batches and the pictures' sizes go together."""
    plan.steps_per_epoch(len(dataset.train))
    number_format = precision.resolve(recipe.precision, world.device)
    network = model.build(recipe, len(dataset.classes), world.device, number_format.weights)
    for size in {recipe.data.train_crop_size, recipe.data.val_crop_size}:
        model.takes(network, size, recipe.micro_batch, recipe.model.name)
    return network


def _folder(job: TrainJob, world: World) -> RunFolder:
    """The run's folder, made or opened by rank 0; on all ranks."""

    def prepare() -> Path:
        if job.resume is not None:
            checkpoint.remove_leftovers(job.resume.checkpoints)
            return job.resume.path
        if not world.is_main:
            return job.out
        return run.create(job.out, job.name, job.stem).path

    folder = RunFolder(world.gather(world.together(prepare))[0])

    world.together(lambda: run.write_text(folder.recipe, catalog.to_yaml(job.recipe)) if world.is_main else None)
    return folder


def _assemble(
    job: TrainJob,
    plan: BatchPlan,
    world: World,
    dataset: Dataset,
    network: nn.Module,
    folder: RunFolder,
    snapshot: checkpoint.Snapshot | None,
    facts: dict[str, Any],
    stop: StopFlag,
) -> Loop:
    recipe = job.recipe
    number_format = precision.resolve(recipe.precision, world.device)
    state = _state(recipe, plan, world, network, number_format, plan.steps_per_epoch(len(dataset.train)))
    # Asynchronous ranks share nothing: each works, and rank 0 saves, as if it were alone.
    mine = world.alone() if state.strategy.asynchronous else world
    if snapshot is not None:
        world.together(lambda: state.restore(snapshot, mine))
    progress = Progress.from_dict(snapshot.state) if snapshot is not None else Progress()
    normalise = Normalise(recipe.data, world.device, number_format.weights)
    return (AsyncTrainer if state.strategy.asynchronous else Trainer)(
        recipe=recipe,
        plan=plan,
        world=world,
        state=state,
        compute=Compute(recipe, plan, mine.rank, world.device, state, number_format, normalise),
        lr_batch=parallel.lr_batch(recipe.parallel, plan, world.place),
        training=_training_loader(recipe, dataset.train, plan, world),
        validation=loader_for(recipe, dataset.val, evaluation_crop(recipe.data), world),
        trackers=track.build(recipe.track, folder, progress.step) if world.is_main else track.silent(),
        saver=Saver(recipe.checkpoint, folder.checkpoints, mine, state, catalog.to_yaml(recipe), facts),
        stop=stop,
        progress=progress,
    )


def _state(
    recipe: Recipe, plan: BatchPlan, world: World, network: nn.Module, number_format: Precision, steps_per_epoch: int
) -> State:
    optimizer = optim.build(network, recipe.optimizer, world.device)
    module = _compiled(network, recipe, plan.accumulation)
    strategy = parallel.build(Parts(network, module, optimizer, recipe.parallel, world, plan.accumulation, steps_per_epoch))
    # After the strategy, which may have put other norm layers into the network.
    statistics = model.RunningStatistics(network, plan.accumulation)
    scaler = number_format.scaler(strategy.local_gradients)
    return State(network, strategy.optimizer, scaler, statistics, strategy)


def _compiled(network: nn.Module, recipe: Recipe, accumulation: int) -> nn.Module:
    if not recipe.model.compile:
        return network
    # Each of a step's micro-batches has a BatchNorm momentum of its own, and with it a compiled form of its own.
    torch._dynamo.config.recompile_limit = accumulation + 8
    return torch.compile(network)  # type: ignore[return-value]


def _training_loader(recipe: Recipe, samples: Samples, plan: BatchPlan, world: World) -> Loader:
    data = recipe.data
    if data.shuffle == "full":
        return loader_for(recipe, samples, training_crop(data), world)
    order = BlockShuffle(recipe.seed, len(samples), plan.global_batch, data.block, data.pool)
    blocks = samples.in_blocks(data.block, order.kept(world.size, data.readers))
    if blocks is samples and world.is_main:
        log.warning("--data.shuffle block reads shards; these pictures are not packed, so it only shuffles them less")
    return loader_for(recipe, blocks, training_crop(data), world, order)


def loader_for(recipe: Recipe, samples: Samples, crop: Crop, world: World, order: Order | None = None) -> Loader:
    """The split's loader, with the threads that this process may use."""
    if recipe.data.shuffle == "block" and order is None:  # one after the other
        samples = samples.in_blocks(recipe.data.block, 2 * recipe.data.readers)
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


def _run(trainer: Loop, job: TrainJob, folder: RunFolder, dataset: Dataset, begun: float) -> Summary | None:
    facts = _facts(trainer, folder, dataset)
    summary = None
    _note(trainer.world, folder.environment, facts.environment)
    try:
        trainer.trackers.begin(facts)
        result = trainer.fit()
        if result is None:
            return None
        summary = _summary(trainer, result, time.monotonic() - begun)
        _note(trainer.world, folder.result, asdict(summary))
        return summary
    except Stopped as stopped:
        raise Stopped(f"{stopped}; all is saved. Go on with: worldsize train --resume {folder.path}") from None
    except torch.OutOfMemoryError as error:
        what = str(error).split(". ")[0]
        raise UserError(f"the GPU's memory is too small for this: lower --micro-batch ({what})") from None
    finally:
        trainer.stop.disarm()
        trainer.training.close()
        trainer.validation.close()
        trainer.saver.close()
        trainer.trackers.end(summary)


def _note(world: World, path: Path, value: dict[str, Any]) -> None:
    """Write a file of the run folder that training does not depend on."""
    if not world.is_main:
        return
    try:
        run.write_json(path, value)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)


def _facts(trainer: Loop, folder: RunFolder, dataset: Dataset) -> Facts:
    recipe, plan, world = trainer.recipe, trainer.plan, trainer.world
    machine = environment.describe(world, trainer.compute.precision.name, trainer.state.strategy)
    return Facts(
        name=folder.name,
        recipe=recipe.model_dump(mode="json"),
        environment=machine | {"data": dataset.fingerprint, "decoder": _decoder(dataset)},
        model=recipe.model.name,
        parameters=sum(p.numel() for p in trainer.state.model.parameters()),
        train_samples=len(dataset.train),
        val_samples=len(dataset.val),
        classes=len(dataset.classes),
        global_batch=plan.global_batch,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        sharing=plan.world_size * plan.devices,
        peak_lr=trainer.peak_lr,
        lr_batch=trainer.lr_batch,
        steps_per_epoch=trainer.steps_per_epoch,
        total_steps=trainer.total_steps,
        first_step=trainer.progress.step,
    )


def _decoder(dataset: Dataset) -> str | None:
    """What decodes the pictures; None where they are in memory."""
    return environment.decoder() if isinstance(dataset.train, EncodedSamples) else None


def _summary(trainer: Loop, result: Result, seconds: float) -> Summary:
    at = trainer.progress
    newest = trainer.saver.newest()
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
