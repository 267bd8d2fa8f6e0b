"""One process of a run, from its place in the world to its result: builds the parts and passes them to the loop."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from worldsize import checkpoint, parallel, track
from worldsize.attribution import verdict
from worldsize.checkpoint import retention
from worldsize.config import job_pod, recipe_files
from worldsize.config.recipe import Recipe, own_network
from worldsize.data import open_dataset
from worldsize.data.images import crops
from worldsize.data.images.normalize import Normalise
from worldsize.data.loading.build import class_shares, train_loader, val_loader
from worldsize.data.loading.loader import blank_labels
from worldsize.data.samples import Dataset, EncodedSamples
from worldsize.distributed import device_errors
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.rank import RankInfo
from worldsize.distributed.stop_signals import StopFlag
from worldsize.distributed.world import World, join
from worldsize.errors import Stopped
from worldsize.models import cpu_faults, factory, ghost_batchnorm, pretrained, training_pass
from worldsize.optim import averaging, optimizers, schedules
from worldsize.parallel.base import StrategyInputs
from worldsize.runs import atomic, run_folder, step_hashes
from worldsize.runs.history import History
from worldsize.runs.run_folder import RunFolder
from worldsize.runs.run_lock import RunLock
from worldsize.track import console
from worldsize.track.base import RunFacts, Summary
from worldsize.training import (
    compilation,
    cuda_graph,
    ending,
    environment,
    forward_pass,
    lost_peers,
    new_network,
    out_of_memory,
    precision,
    provenance,
    step_recorder,
    supervision,
    unfreezing,
)
from worldsize.training.asynchronous.trainer import AsyncTrainer
from worldsize.training.base_trainer import BaseTrainer
from worldsize.training.gradients import GradientComputer
from worldsize.training.lost_peers import LostPeers
from worldsize.training.margins import Margins
from worldsize.training.objective import Objective
from worldsize.training.precision import Precision
from worldsize.training.progress import Progress
from worldsize.training.request import TrainRequest, validate
from worldsize.training.resume import autoresumed, check_ranks, fixed_facts, has_ended, locked, snapshot_to_resume
from worldsize.training.saver import Saver
from worldsize.training.state import TrainState
from worldsize.training.supervision import Supervision
from worldsize.training.trainer import Trainer
from worldsize.watchdog import heartbeat
from worldsize.watchdog.watched import watched

log = logging.getLogger(__name__)

# How long a thread that decodes images may keep the training thread from the interpreter. With Python's 5 ms, a loop that
# calls many short operations beside them took 1.1 and 1.5 times as long (300 operations, CIFAR-10 from files, two cores).
_SWITCH_S = 0.001


@dataclass(frozen=True)
class RunContext:
    """What is decided before the model is built, the same on every rank; ``teacher`` is the teacher's checkpoint."""

    request: TrainRequest
    world: World
    dataset: Dataset
    plan: BatchPlan
    precision: Precision
    teacher: Path | None


def train(request: TrainRequest, rank_info: RankInfo, stop: StopFlag) -> Summary | None:
    """Train on this process, together with the others of its world.

    Returns:
        The result; None if the resumed run had already ended, and on a worker of an asynchronous run.
    """
    begun = time.monotonic()
    validate(request, rank_info)
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
    settings = request.recipe.parallel
    with device_errors.explained(rank_info.rank, lambda: out_of_memory.BEFORE_TRAINING), RunLock() as lock:
        _set_determinism(request.recipe.deterministic or parallel.strategy_class(settings).same_bits)
        world = join(rank_info, request.recipe, parallel.threads(settings), parallel.strategy_class(settings).asynchronous)
        with lost_peers.noticed(world) as peers:
            request = locked(autoresumed(request, world), world, lock)
            summary = _train(request, world, lock, stop, begun, peers)
        # Only after success: closing waits for ranks that have failed.
        world.close()
        return summary


def _train(
    request: TrainRequest, world: World, lock: RunLock, stop: StopFlag, begun: float, peers: LostPeers
) -> Summary | None:
    setting = _setting(request, world)
    facts = fixed_facts(request.recipe, setting.plan, setting.dataset, setting.precision, world, setting.teacher)
    check_ranks(world, facts, parallel.strategy_class(request.recipe.parallel).same_bits)
    snapshot, facts = snapshot_to_resume(request, facts, world)
    if snapshot is not None and has_ended(snapshot.state, facts):
        world.collectively(lambda: _complete(request, setting, snapshot) if world.is_main else None)
        return None
    weights = request.recipe.model.weights if snapshot is None else None
    one_downloads = weights is not None and pretrained.downloads(weights)
    network = world.collectively(lambda: _network(setting, weights is not None), local_first=one_downloads)
    device, number_format = world.device, setting.precision
    plan = world.collectively(lambda: forward_pass.default_plan(request.recipe, setting.plan, network, device.type))
    aims = world.collectively(lambda: _aims(setting))
    label = blank_labels(setting.dataset.train, 1)[0]
    setting = replace(
        setting, plan=forward_pass.fitting_plan(request.recipe, plan, network, world, number_format, aims, label)
    )
    stop.arm()
    folder = _folder(request, world, lock)
    with world.collectively(lambda: run_folder.RunLog(folder, world.rank)):
        if request.autoresume:
            step = snapshot.state["step"] if snapshot is not None else 0
            world.collectively(lambda: run_folder.count_start(folder, step, request.retries) if world.is_main else None)
        trainer = _assemble(setting, network, aims, folder, snapshot, facts, stop, lock)
        if request.resume is not None:  # only now: a run whose checkpoint does not fit changed settings keeps its own
            world.collectively(lambda: _write_recipe(folder, request) if world.is_main else None)
        hosts = world.gather(socket.gethostname())
        history = History(folder.history).running(lambda: trainer.progress.step, request.command, hosts)
        watch = watched(world.rank_info, request.recipe.parallel.stall_s, folder.path, world.from_main)
        # The processes of an asynchronous run do not wait for each other.
        with history if world.is_main else nullcontext(), nullcontext() if trainer.state.strategy.asynchronous else watch:
            summary = _run(trainer, folder, setting, begun, peers)
        if summary is not None and world.is_main and (lost := verdict.of(folder)) is not None:
            console.say(lost)
    return summary


def _complete(request: TrainRequest, setting: RunContext, snapshot: checkpoint.Snapshot) -> None:
    assert request.resume is not None
    per_epoch = setting.plan.steps_per_epoch(len(setting.dataset.train))
    ending.complete(request.resume, snapshot.state, checkpoint.newest_valid(request.resume.checkpoints), per_epoch)


def _set_determinism(deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time only
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def _setting(request: TrainRequest, world: World) -> RunContext:
    recipe = request.recipe
    dataset = world.collectively(lambda: open_dataset(recipe.data, request.cache), local_first=True)
    world.collectively(lambda: class_shares(recipe.data, dataset.train))
    plan = parallel.batch_plan(recipe, world.size)
    number_format = precision.resolve(recipe, world.device)
    strategy = parallel.resolve_strategy(recipe.parallel, world.size)
    cuda_graph.check(recipe, world.device, strategy)
    number_format.apply()
    teacher = world.collectively(lambda: supervision.teacher_checkpoint(recipe))
    return RunContext(request, world, dataset, plan, number_format, teacher)


def _network(setting: RunContext, weights: bool) -> nn.Module:
    """The initial model, after checking that it, the batches and the image sizes are compatible.

    Args:
        weights: load the recipe's initial weights.
    """
    recipe, dataset = setting.request.recipe, setting.dataset
    if setting.request.resume is None:  # older runs may have an average that nothing enters
        averaging.check(recipe.average, recipe.epochs, setting.plan.steps_per_epoch(len(dataset.train)))
    network = new_network.build(recipe, len(dataset.classes), setting.precision)
    if weights:
        pretrained.load(network, recipe, dataset.classes)
    unfreezes = recipe.model.unfreeze_epoch is not None
    for size in {recipe.data.val_crop_size, *crops.crop_sizes(recipe.data, recipe.epochs)}:
        factory.check_input(network, size, recipe.micro_batch, recipe.model.name, len(dataset.classes), unfreezes)
    shared = setting.world.size > 1 or parallel.strategy_class(recipe.parallel).same_bits
    refuses = shared and setting.request.resume is None  # older runs may have such a network
    training_pass.check(network, recipe, len(dataset.classes), setting.world, refuses)
    return network


def _aims(setting: RunContext) -> Supervision:
    return supervision.build(setting.request.recipe, setting.dataset, setting.teacher, setting.precision)


def _folder(request: TrainRequest, world: World, lock: RunLock) -> RunFolder:
    """The run folder, created or opened by rank 0; on all ranks."""

    def prepare() -> Path:
        if request.resume is not None:
            retention.remove_leftovers(request.resume.checkpoints)
            return request.resume.path
        if not world.is_main:
            return request.out
        created = run_folder.create(request.out, request.name, request.stem)
        with run_folder.removed_if_unwritten(created):
            lock.acquire(created.lock)
            _write_recipe(created, request)
        return created.path

    return RunFolder(world.from_main(world.collectively(prepare)))


def _write_recipe(folder: RunFolder, request: TrainRequest) -> None:
    atomic.write_text(folder.recipe, recipe_files.to_yaml(request.recipe), durable=True)
    folder.result.unlink(missing_ok=True)  # of a run that had ended and continues; if killed before this, it still does


def _assemble(
    setting: RunContext,
    network: nn.Module,
    aims: Supervision,
    folder: RunFolder,
    snapshot: checkpoint.Snapshot | None,
    facts: dict[str, Any],
    stop: StopFlag,
    lock: RunLock,
) -> BaseTrainer:
    recipe, world, plan, dataset = setting.request.recipe, setting.world, setting.plan, setting.dataset
    per_epoch = plan.steps_per_epoch(len(dataset.train))
    state = build_state(recipe, network, plan, world, setting.precision, per_epoch, aims)
    if recipe.track.margins and not dataset.multilabel and not state.strategy.asynchronous:
        state = replace(state, margins=Margins(len(dataset.train), recipe.data.weighted))
    # Asynchronous ranks share nothing: each works, and rank 0 saves, as if it were alone.
    mine = world.alone() if state.strategy.asynchronous else world
    compute = GradientComputer(
        recipe,
        plan,
        mine.rank,
        world.device,
        state,
        step_recorder.from_environment(world.rank, dataset.train, dataset.classes),
        blank_labels(dataset.train, 1)[0],
    )
    chain = step_hashes.NOT_RECORDED if state.strategy.asynchronous else step_hashes.run_hash(facts)
    progress = Progress.from_dict(snapshot.state) if snapshot is not None else Progress(chain=chain)
    if unfreezing.done(recipe.model, progress):
        unfreezing.unfreeze(compute)
    if snapshot is not None:
        world.collectively(lambda: state.restore(snapshot, mine, recipe if setting.request.allow_changes else None))
    saved = partial(History(folder.history).add, "saved")
    gone = partial(run_folder.is_gone, folder, lock.taken_over)
    return (AsyncTrainer if state.strategy.asynchronous else Trainer)(
        recipe=recipe,
        plan=plan,
        world=world,
        state=state,
        compute=compute,
        lr_batch=parallel.lr_batch(recipe.parallel, plan, world.rank_info),
        train_loader=train_loader(recipe, dataset.train, plan, world),
        val_loader=val_loader(recipe, dataset.val, world),
        trackers=world.collectively(lambda: track.build(recipe.track, folder, progress.step, world.rank)),
        saver=Saver(recipe.checkpoint, folder.checkpoints, mine, state, recipe_files.to_yaml(recipe), facts, saved, gone),
        stop=stop,
        stop_after=setting.request.stop_after,
        progress=progress,
    )


def build_state(
    recipe: Recipe,
    network: nn.Module,
    plan: BatchPlan,
    world: World,
    number_format: Precision,
    steps_per_epoch: int,
    aims: Supervision | None = None,
) -> TrainState:
    """The optimizer, the strategy and the rest of a rank's state around its network. All ranks must call it."""
    aims = aims or Supervision()
    if ghost_batchnorm.wanted(plan, world.device):
        ghost_batchnorm.split_norms(network, plan.micro_batch, plan.groups)
    compiles = compilation.wanted(recipe, plan, world)
    graphs = cuda_graph.wanted(recipe, world, number_format, compiles) and cuda_graph.repeats(network, recipe)
    peak = schedules.peak_lr(recipe.optimizer, parallel.lr_batch(recipe.parallel, plan, world.rank_info))
    optimizer = optimizers.build(network, recipe.optimizer, world.device, graphs, peak)
    normalise = Normalise(recipe.data, world.device, number_format.weights, recipe.model.channels_last)
    objective = Objective(network, normalise, number_format, recipe, aims.class_weights, aims.teacher)
    module = compilation.compiled(objective, recipe) if compiles else objective
    skips = training_pass.skips(network, recipe)
    strategy = parallel.build(
        StrategyInputs(network, module, optimizer, recipe.parallel, world, plan.accumulation, steps_per_epoch, *skips)
    )
    # After the strategy, which may replace the network's norm layers (SyncBatchNorm).
    statistics = factory.RunningStatistics(network, own_network.is_own(recipe.model.name))
    scaler = number_format.scaler(strategy.local_gradients)
    averages = recipe.average.name != "none"
    average = averaging.Averaging(recipe.average, network, statistics, steps_per_epoch) if averages else None
    return TrainState(objective, strategy.optimizer, scaler, statistics, strategy, average, compiled=compiles, graphs=graphs)


def _run(trainer: BaseTrainer, folder: RunFolder, setting: RunContext, begun: float, peers: LostPeers) -> Summary | None:
    facts = _facts(trainer, folder, setting.dataset)
    summary = None
    archived = provenance.describe(setting.request.command) if trainer.world.is_main else {}
    _note(trainer.world, folder.environment, facts.environment | archived)
    try:
        trainer.trackers.begin(facts)
        fault = cpu_faults.warning(
            trainer.state.model,
            trainer.world.device,
            facts.environment["precision"],
            setting.request.recipe.model.channels_last,
        )
        for note in (*setting.dataset.notes, *filter(None, [fault])) if trainer.world.is_main else ():
            log.warning("%s", note)
        with device_errors.explained(trainer.world.rank, lambda: out_of_memory.remedy(trainer.compute)):
            result = trainer.fit()
        heartbeat.beat(heartbeat.ENDING)
        if result is None:
            return None
        newest, batch = trainer.saver.newest(), setting.plan.global_batch
        last = ending.summary(trainer.progress, result, newest, batch, trainer.steps_per_epoch, time.monotonic() - begun)
        # The workers of an asynchronous run do not come here.
        together = trainer.world.alone() if trainer.state.strategy.asynchronous else trainer.world
        together.collectively(lambda: ending.write(folder, last) if together.is_main else None)
        summary = last  # trackers report a run without its result.json as one that failed
        return summary
    except Stopped as stopped:
        raise Stopped(f"{stopped}; the state is saved. Continue with: {job_pod.continuing(folder.path)}") from None
    finally:
        peers.leave()  # what follows may take long on one rank, such as a tracker's last upload
        trainer.stop.disarm()
        trainer.train_loader.close()
        trainer.val_loader.close()
        trainer.saver.close()
        trainer.trackers.end(summary)


def _note(world: World, path: Path, value: dict[str, Any]) -> None:
    """Write a file of the run folder; training continues if it cannot be written."""
    if not world.is_main:
        return
    try:
        atomic.write_json(path, value)
    except OSError as error:
        log.warning("cannot write %s: %s", path, error.strerror)


def _facts(trainer: BaseTrainer, folder: RunFolder, dataset: Dataset) -> RunFacts:
    recipe, plan, world = trainer.recipe, trainer.plan, trainer.world
    state = trainer.state
    machine = environment.describe(world, state.objective.precision.name, state.strategy, state.compiled, state.graphs)
    return RunFacts(
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
        multilabel=dataset.multilabel,
        validates_on=dataset.validates_on,
        evaluates_first=trainer.evaluates_first,
    )


def _decoder(dataset: Dataset) -> str | None:
    """The image decoder; None if the images are in memory."""
    return environment.decoder() if isinstance(dataset.train, EncodedSamples) else None
