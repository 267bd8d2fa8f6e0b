"""``worldsize audit``: verifies the records of a run, and computes parts of it again."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from worldsize import checkpoint, parallel
from worldsize.config import recipe_files
from worldsize.config.recipe import Recipe
from worldsize.data import file_sizes, open_dataset
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import CheckpointError, of_system
from worldsize.reproduce import compare, evaluations, promise, scratch_runs
from worldsize.reproduce.compare import StepDifference, processes
from worldsize.reproduce.promise import Promise
from worldsize.runs import step_hashes, world_sizes
from worldsize.runs.run_folder import RunFolder
from worldsize.training.resume import same_names_other_sizes

_RECORDS_ONLY = "pass --windows 0 to verify only its records"


@dataclass(frozen=True)
class Window:
    """Steps between two checkpoints, ``first`` to ``last``, that were computed again with ``procs`` processes.

    ``no_bits`` says why their bits were not compared, see `Promise`; empty: they are equal. Otherwise ``promise`` was, and
    ``loss`` is the relative difference of the last loss, ``weights`` that of all weights and statistics together, averages
    included. ``sha256`` is that of the weights that the network is used with.
    """

    first: int
    last: int
    procs: int
    sha256: str
    no_bits: str = ""
    promise: str = ""
    loss: float = 0.0
    weights: float = 0.0

    def __str__(self) -> str:
        steps = f"steps {self.first:,} to {self.last:,}"
        if not self.no_bits:
            return f"{steps}: bit-identical, {processes(self.procs)}"
        differ = f"after it the loss differs by {self.loss:.1e}, the weights by {self.weights:.1e}"
        return f"{steps}: {self.promise}; {differ}; {processes(self.procs)}"


@dataclass
class Certificate:
    """What an audit found. ``problem`` is the first inconsistency, with its step if it has one; None: there is none."""

    run: str
    steps: int
    recorded: int
    chain: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    environment: dict[str, Any]
    seed: int
    checkpoints: dict[str, str] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    problem: str | None = None
    problem_step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Inconsistent(Exception):
    """The run contradicts itself."""

    def __init__(self, problem: str, step: int | None = None) -> None:
        super().__init__(problem)
        self.step = step


def audit(run: RunFolder, windows: int, seed: int, procs: int | None, tell: Callable[[str], None]) -> Certificate:
    """Verify the run's chain, and compute ``windows`` of the intervals between its checkpoints again.

    Args:
        seed: of the choice of windows.
        procs: number of processes (default: those that computed a window's last step).

    Raises:
        UserError: it has no checkpoint or no metrics, its metrics or environment are damaged, or it cannot be computed
            again here.
        StoreUnreachable: its disk or the network does not answer.
        ComputationFailed: the training of a window failed, or was stopped or killed.
    """
    recipe = recipe_files.load(str(run.recipe))
    if windows:
        scratch_runs.check_order(run, recipe, f": {_RECORDS_ONLY}")
        scratch_runs.check_device(run, f", or {_RECORDS_ONLY}")
    found = scratch_runs.checkpoints(run)
    records = scratch_runs.steps_of(run)
    last = found[max(found)][1]
    recorded = sum(bool(record.get("chain")) for record in records)
    dataset = open_dataset(recipe.data, run.path.parent / ".cache")
    data, looked_at = dataset.fingerprint, file_sizes.digest(dataset)
    certificate = Certificate(
        run=str(run.path),
        steps=len(records),
        recorded=recorded,
        chain=records[-1].get("chain", "") if records else "",
        recipe=parallel.identity(recipe),
        data=data,
        environment=scratch_runs.environment_of(run),
        seed=seed,
    )
    for warning in scratch_runs.warnings(run, recipe, procs or int(certificate.environment["world_size"])):
        tell(f"the bits may differ: {warning}")
    try:
        _verify_origin(recipe, data, looked_at, last)
        chains = verify_chain(records, last)
        for path in reversed(checkpoint.list_checkpoints(run.checkpoints)):
            certificate.checkpoints[path.name] = _verify_checkpoint(path, chains)
        result = _result(run)
        _verify_result(result, chains)
        _verify_evaluations(run, result, found)
        _replay_windows(run, records, found, certificate, windows, procs, tell)
    except Inconsistent as inconsistent:
        certificate.problem, certificate.problem_step = str(inconsistent), inconsistent.step
    return certificate


def _verify_origin(recipe: Recipe, data: dict[str, Any], looked_at: dict[str, str], state: dict[str, Any]) -> None:
    recorded = copy.deepcopy(state["identity"])
    recorded.get("parallel", {}).pop("processes", None)
    if parallel.identity(recipe) != parallel.completed(recorded):
        raise Inconsistent("recipe.yaml is not the recipe that the checkpoints were trained with")
    if data != state["data"] or same_names_other_sizes(state, {"sizes": looked_at}):
        raise Inconsistent("the dataset is not the one that the checkpoints were trained with")


def verify_chain(records: list[dict[str, Any]], state: dict[str, Any]) -> dict[int, str]:
    """The chain after each recorded step.

    Args:
        records: of metrics.jsonl.
        state: state.json of a checkpoint.

    Raises:
        Inconsistent: a step is missing, or was changed.
    """
    head = step_hashes.run_hash(state) if records and records[0].get("chain") else step_hashes.NOT_RECORDED
    chains: dict[int, str] = {}
    for expected, record in enumerate(records, start=1):
        if record["step"] != expected:
            raise Inconsistent(f"step {expected:,} is missing in metrics.jsonl", expected)
        if not record.get("chain") and not chains:
            continue
        head = step_hashes.link(head, dict.fromkeys(step_hashes.COVERED) | record)
        if record.get("chain") != head:
            origin = ", or the recipe or the data changed during the run" if expected == 1 else ""
            raise Inconsistent(f"step {expected:,} in metrics.jsonl was changed{origin}", expected)
        chains[expected] = head
    return chains


def _verify_checkpoint(path: Path, chains: dict[int, str]) -> str:
    """The SHA-256 of the weights that its network is used with."""
    try:
        checkpoint.check(path)
        state = checkpoint.read_state(path)
    except CheckpointError as error:
        raise Inconsistent(str(error)) from None
    expected = chains.get(state["step"]) if state["step"] else step_hashes.run_hash(state)
    if state.get("chain") and expected != state["chain"]:
        raise Inconsistent(f"{path.name} belongs to another run, or metrics.jsonl was changed", state["step"])
    return checkpoint.network_digest(path)


def _result(run: RunFolder) -> dict[str, Any] | None:
    """result.json; None if there is none, as before the end of a run."""
    try:
        result = json.loads(run.result.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise of_system(f"{run.result}: {error.strerror}", error) from None
    except ValueError:
        raise Inconsistent("result.json is damaged: it is not JSON") from None
    if not isinstance(result, dict) or not isinstance(result.get("steps"), int):
        raise Inconsistent("result.json is damaged: it does not have the number of steps")
    return result


def _verify_result(result: dict[str, Any] | None, chains: dict[int, str]) -> None:
    if result is None or not chains:
        return
    if result.get("chain") != chains.get(result["steps"]):
        raise Inconsistent("result.json does not belong to the last step of metrics.jsonl", result["steps"])


def _verify_evaluations(
    run: RunFolder, result: dict[str, Any] | None, found: dict[int, tuple[Path, dict[str, Any]]]
) -> None:
    states = {path.name: state for path, state in found.values()}
    if contradiction := evaluations.contradiction(scratch_runs.records_of(run, "epoch"), states, result):
        raise Inconsistent(*contradiction)


def _replay_windows(
    run: RunFolder,
    records: list[dict[str, Any]],
    found: dict[int, tuple[Path, dict[str, Any]]],
    certificate: Certificate,
    windows: int,
    procs: int | None,
    tell: Callable[[str], None],
) -> None:
    recipe = recipe_files.load(str(run.recipe))
    pairs = [(a, b) for a, b in itertools.pairwise([0, *sorted(found)]) if b > a]
    chosen = sorted(random.Random(certificate.seed).sample(pairs, min(windows, len(pairs))))
    for first, last in chosen:
        sizes = world_sizes.of_steps(run, first + 1, last, int(found[last][1]["world_size"]))
        size = procs or sizes[-1]
        tell(f"computing steps {first + 1:,} to {last:,} again, with {processes(size)}")
        with temporary_folder("worldsize-audit-") as folder:
            again = scratch_runs.compute_again(run, found[first][0] if first else None, last, size, folder)
            kept = promise.of(certificate.environment, recipe, world_sizes.to_compare(sizes, size), size)
            _compare(records[first:last], again, found[last][0], kept)
            window = Window(first + 1, last, size, checkpoint.network_digest(again.checkpoint))
            certificate.windows.append(_measured(window, kept, records[last - 1], again, found[last][0]))


def _compare(records: list[dict[str, Any]], again: scratch_runs.Steps, expected: Path, kept: Promise) -> None:
    if found := kept.broken(records, again.records):
        raise Inconsistent(
            f"step {found.step:,}: {found.name} is {found.a} in metrics.jsonl and {found.b} when computed again", found.step
        )
    last = again.records[-1]["step"]
    if (expected / checkpoint.AVERAGE).exists() != (again.checkpoint / checkpoint.AVERAGE).exists():
        raise Inconsistent(f"{expected.name} has averaged weights, or lacks them, unlike what its steps compute", last)
    if kept.no_bits:
        return
    for file in (*_networks(expected), "optimizer.safetensors"):
        if (expected / file).read_bytes() != (again.checkpoint / file).read_bytes():
            raise Inconsistent(f"{expected.name}/{file} is not what its steps compute", last)


def _networks(path: Path) -> list[str]:
    """The files of a checkpoint that have weights of the network."""
    return [name for name in ("model.safetensors", checkpoint.AVERAGE) if (path / name).exists()]


def _weights(path: Path) -> dict[str, Any]:
    """All weights and statistics of a checkpoint, by file and name."""
    files = {name: load_file(path / name) for name in _networks(path)}
    return {f"{file}/{name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def _measured(window: Window, kept: Promise, last: dict[str, Any], again: scratch_runs.Steps, expected: Path) -> Window:
    """The window with how far it is from what the run recorded, if not bit-identical."""
    if not kept.no_bits:
        return window
    loss = StepDifference(window.last, "loss", last["loss"], again.records[-1]["loss"]).relative
    own, theirs = (_weights(path) for path in (again.checkpoint, expected))
    return replace(window, no_bits=kept.no_bits, promise=str(kept), loss=loss, weights=compare.overall(own, theirs))


def text(certificate: Certificate) -> list[str]:
    """The certificate for people."""
    environment = certificate.environment
    lines = [
        "",
        f"run          {certificate.run}",
        f"steps        {certificate.steps:,}, of which {certificate.recorded:,} have a fingerprint"
        + (" (the others: not recorded)" if certificate.recorded < certificate.steps else ""),
        f"chain        {certificate.chain or 'not recorded'}",
        f"data         {certificate.data['train_samples']:,} training images, {certificate.data['train'][:16]}",
        f"environment  {environment['device']}, torch {environment['versions']['torch']}, {environment['precision']}, "
        f"{environment['strategy']}, {processes(environment['world_size'])}",
        *(f"checkpoint   {name}  sha256 {sha256[:16]}" for name, sha256 in certificate.checkpoints.items()),
        *(f"window       {window}" for window in certificate.windows),
        f"seed         {certificate.seed}",
        "",
    ]
    rounded = next((window.no_bits for window in certificate.windows if window.no_bits), "")
    if certificate.problem is None and rounded:
        return [*lines, f"CONSISTENT up to rounding: the records agree; bits are not promised, because {rounded}."]
    if certificate.problem is None and not certificate.windows:
        return [*lines, "CONSISTENT: the records agree; no window was computed again."]
    if certificate.problem is None:
        return [*lines, "CONSISTENT: the records agree, and every window leads from one checkpoint's bits to the next."]
    return [*lines, f"INCONSISTENT: {certificate.problem}"]
