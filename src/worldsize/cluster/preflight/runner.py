"""Runs the preflight checks: finds everything that would prevent a run on this cluster, and how to fix it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

from rich.console import Console
from rich.text import Text

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import Unauthenticated, Unreachable
from worldsize.cluster.manifests import TARGETS, load_target, pod
from worldsize.cluster.manifests.spec import PodJobSpec, amount_problems, reference_problems
from worldsize.cluster.objects import Object
from worldsize.cluster.options import JobOptions, Where, to_spec
from worldsize.cluster.preflight import capacity
from worldsize.cluster.preflight import cluster as cluster_checks
from worldsize.cluster.preflight import job as job_checks
from worldsize.cluster.preflight.base import Check, Context, Finding, findings_of
from worldsize.config import tables
from worldsize.config.command_line import Flat
from worldsize.config.recipe import Recipe
from worldsize.errors import PREFLIGHT_FAILED, SUCCESS
from worldsize.jobs.spec import refuse

# If one of these reports an error, the other checks cannot run.
GATES: tuple[Check, ...] = (cluster_checks.server, cluster_checks.namespace)

CHECKS: tuple[Check, ...] = (
    cluster_checks.kinds,
    cluster_checks.operators,
    cluster_checks.permissions,
    job_checks.runtime,
    job_checks.volumes,
    job_checks.secrets,
    job_checks.queue,
    job_checks.old_labels,
    capacity.memory,
    capacity.nodes,
    capacity.admission,
    job_checks.leftovers,
    job_checks.dry_run,
)

# Also includes checks that do not matter for a job that is about to be submitted.
GENERAL: tuple[Check, ...] = (*CHECKS, cluster_checks.files, cluster_checks.fetches)

_COLORS = {"ok": "green", "warning": "yellow", "error": "bold red"}
_INDENT = " " * 9


@dataclass(frozen=True)
class ClusterCheck:
    """Check whether a cluster can run a job of this size, and report how to fix each problem.

    Without --on, all three kinds of jobs are checked. Exit code: 0, or 2 if there is an error.
    """

    job: Flat[JobOptions] = field(default_factory=JobOptions)
    where: Flat[Where] = field(default_factory=Where)
    on: Literal["pytorchjob", "mpijob", "trainjob"] | None = None
    """Kind of job: PyTorchJob, MPIJob or TrainJob."""


def check(options: ClusterCheck, cluster: Cluster) -> int:
    """``worldsize cluster check``: print every finding. Returns the exit code.

    Raises:
        UserError: a requested amount is invalid.
    """
    start = time.monotonic()
    counts = _show(tables.console(), examine(_general_context(options, cluster), GENERAL))
    print(f"{_summary(counts)}, {time.monotonic() - start:.1f} s")
    return PREFLIGHT_FAILED if counts["error"] else SUCCESS


def run(cluster: Cluster, on: str, spec: PodJobSpec, manifests: Sequence[Object], quiet: bool = False) -> bool:
    """Whether the job can run. Prints the findings to stderr; ``quiet``: only warnings and errors."""
    context = Context(cluster, (load_target(on).kind,), spec, tuple(manifests))
    found = (finding for finding in examine(context) if not quiet or finding.level != "ok")
    return not _show(tables.console(stderr=True), found)["error"]


def examine(context: Context, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Run the checks concurrently; yield their findings in the order of the checks.

    A cluster about which nothing could be found out is an error, too.
    """
    try:
        for gate in GATES:
            found = findings_of(gate, context)
            yield from found
            if any(finding.level == "error" for finding in found):
                return
        unchecked, known = 0, 0
        with ThreadPoolExecutor(len(checks)) as pool:
            for check, found in zip(checks, pool.map(lambda check: findings_of(check, context), checks), strict=True):
                unchecked += sum(finding.unchecked for finding in found)
                # Every user may see which kinds a cluster has.
                known += check is not cluster_checks.kinds and sum(not finding.unchecked for finding in found)
                yield from found
    except (Unreachable, Unauthenticated) as error:
        yield Finding("error", str(error))
        return
    if unchecked and not known:
        remedy = "ask your cluster administrator for access to the namespace, or check the user in your kubeconfig"
        yield Finding("error", f"nothing could be checked in namespace {context.cluster.namespace}", remedy)


def _general_context(options: ClusterCheck, cluster: Cluster) -> Context:
    """The context for a job with the given options; options that are not set are not checked."""
    name = options.job.name or "worldsize-check"
    gpus = options.job.gpus if options.job.gpus is not None else options.job.procs if options.job.procs > 1 else 0
    job = replace(options.job, name=name, gpus=gpus, procs=gpus or options.job.procs, image=options.job.image or "worldsize")
    recipe = Recipe(per_process_batch=Recipe().micro_batch)  # any number of processes can share its batch
    spec = to_spec(recipe, "check", options.on or "pytorchjob", cluster.namespace, job)
    refuse([*reference_problems(spec), *amount_problems(spec)])
    if options.on is None:
        return Context(cluster, tuple(load_target(on).kind for on in TARGETS), spec)
    target = load_target(options.on)
    return Context(cluster, (target.kind,), spec, (pod.config_map(spec), pod.network_policy(spec), *target.job(spec)))


def _show(console: Console, findings: Iterable[Finding]) -> dict[str, int]:
    """Print each finding as it arrives. Returns the number of findings per level."""
    counts = dict.fromkeys(_COLORS, 0)
    for finding in findings:
        counts[finding.level] += 1
        head = Text(f"{finding.level:<9}", _COLORS[finding.level])
        console.print(head + Text(finding.what.replace("\n", f"\n{_INDENT}"), ""), soft_wrap=True)
        for line in finding.remedy.splitlines():
            console.print(Text(_INDENT + line, "dim"), soft_wrap=True)
    return counts


def _summary(counts: dict[str, int]) -> str:
    plural = {level: "" if level == "ok" or counts[level] == 1 else "s" for level in counts}
    return ", ".join(f"{count} {level}{plural[level]}" for level, count in counts.items())
