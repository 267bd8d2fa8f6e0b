"""Before a run: everything that would stop it on this cluster, each with what to do about it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import tyro
from rich.console import Console
from rich.text import Text

from worldsize.launch import checks_cluster, checks_fit, checks_job, pod, target
from worldsize.launch.answers import Unreachable
from worldsize.launch.checks import Check, Context, Finding, findings_of
from worldsize.launch.cluster import Cluster, Object
from worldsize.launch.options import Job, Where, to_spec
from worldsize.launch.spec import JobSpec, amount_problems, refuse
from worldsize.recipe import Recipe

# Where one of these finds an error, no other can say anything.
GATES: tuple[Check, ...] = (checks_cluster.server, checks_cluster.namespace)

CHECKS: tuple[Check, ...] = (
    checks_cluster.kinds,
    checks_cluster.operators,
    checks_cluster.permissions,
    checks_job.runtime,
    checks_job.volumes,
    checks_job.secrets,
    checks_job.queue,
    checks_job.old_labels,
    checks_fit.memory,
    checks_fit.nodes,
    checks_fit.admission,
    checks_job.leftovers,
    checks_job.dry_run,
)

# What is of no use to a job that is about to be sent.
GENERAL: tuple[Check, ...] = (*CHECKS, checks_cluster.files)

REFUSED = 2
_COLOURS = {"ok": "green", "warning": "yellow", "error": "bold red"}
_INDENT = " " * 9


@dataclass(frozen=True)
class ClusterCheck:
    """Look whether a cluster can run a job of this size, and say what to do about everything that is in the way.

    Without --on, all three kinds of jobs are looked at. Exit codes: 0, or 2 where there is an error.
    """

    job: tyro.conf.OmitArgPrefixes[Job] = field(default_factory=Job)
    where: tyro.conf.OmitArgPrefixes[Where] = field(default_factory=Where)
    on: Literal["pytorchjob", "mpijob", "trainjob"] | None = None
    """What would run the job: PyTorchJob, MPIJob or TrainJob."""


def check(asked: ClusterCheck, cluster: Cluster) -> int:
    """``worldsize cluster check``: print every finding. Returns the exit code.

    Raises:
        UserError: an amount that no job can ask for.
    """
    begin = time.monotonic()
    counts = _show(Console(), examine(_in_general(asked, cluster), GENERAL))
    print(f"{_counted(counts)}, {time.monotonic() - begin:.1f} s")
    return REFUSED if counts["error"] else 0


def run(cluster: Cluster, on: str, spec: JobSpec, manifests: Sequence[Object], quiet: bool = False) -> bool:
    """Whether nothing forbids this job. Findings go to stderr; ``quiet``: only warnings and errors."""
    context = Context(cluster, (target.load(on).kind,), spec, tuple(manifests))
    found = (finding for finding in examine(context) if not quiet or finding.level != "ok")
    return not _show(Console(stderr=True), found)["error"]


def examine(context: Context, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """What the checks find, in their order; they run at the same time."""
    for gate in GATES:
        found = findings_of(gate, context)
        yield from found
        if any(finding.level == "error" for finding in found):
            return
    with ThreadPoolExecutor(len(checks)) as pool:
        try:
            for found in pool.map(lambda check: findings_of(check, context), checks):
                yield from found
        except Unreachable as error:
            yield Finding("error", str(error))


def _in_general(asked: ClusterCheck, cluster: Cluster) -> Context:
    """A job that has what was asked for; what was left out is not looked at."""
    name = asked.job.name or "worldsize-check"
    gpus = asked.job.gpus if asked.job.gpus is not None else asked.job.procs if asked.job.procs > 1 else 0
    job = replace(asked.job, name=name, gpus=gpus, procs=gpus or asked.job.procs, image=asked.job.image or "worldsize")
    spec = to_spec(Recipe(), "check", asked.on or "pytorchjob", cluster.namespace, job)
    refuse(amount_problems(spec))
    if asked.on is None:
        return Context(cluster, tuple(target.load(on).kind for on in target.TARGETS), spec)
    one = target.load(asked.on)
    return Context(cluster, (one.kind,), spec, (pod.config_map(spec), pod.network_policy(spec), *one.job(spec)))


def _show(console: Console, findings: Iterable[Finding]) -> dict[str, int]:
    """Print each finding as it comes. Returns how many there are of each level."""
    counts = dict.fromkeys(_COLOURS, 0)
    for finding in findings:
        counts[finding.level] += 1
        head = Text(f"{finding.level:<9}", _COLOURS[finding.level])
        console.print(head + Text(finding.what.replace("\n", f"\n{_INDENT}"), ""), soft_wrap=True)
        for line in finding.remedy.splitlines():
            console.print(Text(_INDENT + line, "dim"), soft_wrap=True)
    return counts


def _counted(counts: dict[str, int]) -> str:
    plural = {level: "" if level == "ok" or counts[level] == 1 else "s" for level in counts}
    return ", ".join(f"{count} {level}{plural[level]}" for level, count in counts.items())
