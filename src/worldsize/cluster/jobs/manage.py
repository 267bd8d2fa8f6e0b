"""Jobs on a cluster: submit, find, list, stop and delete."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unauthenticated, Unreachable
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, load_target, pod
from worldsize.cluster.manifests.base import Target
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import OURS, Object
from worldsize.distributed.stop_signals import interrupts_held
from worldsize.errors import UserError
from worldsize.jobs.state import JobState
from worldsize.jobs.terminal import note, seconds_since

# Datasets are fetched by jobs too.
_KINDS = (*TARGETS, "fetchjob")
_END_S = 60.0  # for a job to end, in addition to its pods' grace period


@dataclass(frozen=True)
class ClusterJob:
    """A job that exists on the cluster."""

    target: Target
    object: Object
    state: JobState
    pods: list[Object]

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def queue(self) -> str | None:
        """The job's Kueue queue, see `pod.queue_of`."""
        return pod.queue_of(self.object)

    @property
    def inactive(self) -> bool:
        """Whether it has ended or is stopped; a job in a Kueue queue waits."""
        return self.state.ended or (self.state.phase == "Suspended" and self.queue is None)

    @property
    def end_command(self) -> str:
        """The worldsize command that ends the job gracefully: Kueue restarts queued jobs that others suspend."""
        return "stop" if self.queue is None else "delete"

    @property
    def age_s(self) -> float:
        """Seconds since it was created."""
        return seconds_since(self.object["metadata"]["creationTimestamp"])


def find(cluster: Cluster, name: str) -> ClusterJob:
    """The worldsize job of this name, of any kind.

    Raises:
        UserError: there is no such job.
    """
    found = list_jobs(cluster)
    for job in found:
        if job.name == name:
            return job
    names = [job.name for job in found]
    existing = f"existing jobs: {', '.join(names)}" if names else "it has no worldsize jobs"
    raise UserError(f"no job {name!r} in namespace {cluster.namespace}; {existing}")


def list_jobs(cluster: Cluster) -> list[ClusterJob]:
    """All worldsize jobs in the namespace, newest first. Names kinds of jobs that the user may not list on stderr.

    Raises:
        ClusterError: the user may list no kind of training job that the cluster has.
    """
    jobs: list[ClusterJob] = []
    refused: dict[str, ClusterError] = {}
    listed: set[str] = set()
    for kind in _KINDS:
        target = load_target(kind)
        try:
            found = cluster.list(target.kind, OURS)
        except ClusterError as error:
            if error.status == 403 and not isinstance(error, Unauthenticated):
                if kind not in TARGETS or _may_be_served(cluster, target.kind):
                    refused[kind] = error
            elif error.status != 404:  # the operator is not installed
                raise
            continue
        listed.add(kind)
        for item in found:
            pods = cluster.list("Pod", target.selector(item["metadata"]["name"]))
            jobs.append(ClusterJob(target, item, target.state(item, pods), pods))
    if refused and not jobs and not listed & set(TARGETS):
        raise _not_listed(cluster, refused)
    for kind, refusal in refused.items():
        what = f"{load_target(kind).kind}s" if kind in TARGETS else "Downloads of datasets"
        note(f"{what} are not listed, because you have no permission: {refusal}")
    return sorted(jobs, key=lambda job: job.age_s)


def _may_be_served(cluster: Cluster, kind: str) -> bool:
    """Whether the API server has this kind, or does not say. It checks permissions first, also for other kinds."""
    try:
        return cluster.serves(kind)
    except ClusterError as error:
        if isinstance(error, Unreachable):
            raise
        return True


def _not_listed(cluster: Cluster, refused: dict[str, ClusterError]) -> ClusterError:
    plurals = ", ".join(KINDS[load_target(kind).kind].plural for kind in refused)
    first = next(iter(refused.values()))
    return ClusterError(
        f"you have no permission to list {plurals} in namespace {cluster.namespace}; `worldsize cluster check` prints the "
        f"role to ask your cluster administrator for ({first})",
        first.status,
    )


def submit(cluster: Cluster, spec: PodJobSpec, manifests: list[Object]) -> bool:
    """Create the job's objects. A failed or stopped job of the same name is deleted first, and its run resumes.

    Ctrl-C before the job exists raises KeyboardInterrupt and leaves no objects.

    Returns:
        Whether Ctrl-C arrived after the job was created.

    Raises:
        UserError: a job of this name is active, or has succeeded, or somebody else submits one.
        ClusterError: the API server rejects an object, or does not answer. No objects are left if it can be reached.
    """
    for old in (job for job in list_jobs(cluster) if job.name == spec.name):
        _delete_inactive(cluster, old)
    created: list[Object] = []
    try:
        # Create, not apply: apply would change an object that somebody else has just created.
        for manifest in manifests:
            created.append(cluster.create(manifest))
    except BaseException as error:
        refused = isinstance(error, ClusterError) and 400 <= error.status < 500
        _undo(cluster, created, None if refused else next(iter(manifests[len(created) :]), None))
        if isinstance(error, ClusterError) and error.reason == "AlreadyExists":
            kind, name = manifests[len(created)]["kind"], manifests[len(created)]["metadata"]["name"]
            raise UserError(
                f"{kind} {name} already exists in namespace {cluster.namespace}: somebody else may be submitting that job. "
                "Run the same command again to see what it is, or choose another --name"
            ) from None
        raise
    with interrupts_held() as held:
        try:
            _adopt(cluster, created[-1], created[:-1])
        except ClusterError as error:
            without = "without owner references, so only `worldsize delete` removes all its objects"
            note(f"Submitted {spec.name} {without}: {error}")
    return bool(held)


def _undo(cluster: Cluster, created: list[Object], unsure: Object | None) -> None:
    """Delete the created objects, and the ``unsure`` one (sent, not answered) if it exists with the labels that we sent."""
    with suppress(ClusterError):
        existing = cluster.get(unsure["kind"], unsure["metadata"]["name"]) if unsure else None
        if unsure and existing and unsure["metadata"]["labels"].items() <= existing["metadata"].get("labels", {}).items():
            created = [*created, unsure]
    for manifest in created:
        with suppress(ClusterError):
            cluster.delete(manifest["kind"], manifest["metadata"]["name"])


def _delete_inactive(cluster: Cluster, old: ClusterJob) -> None:
    name = old.name
    if old.state.phase == "Succeeded":
        raise UserError(
            f"{name} has already succeeded; its run is on the volume. For another run, choose another --name, or delete "
            f"the job with: {cluster.command('delete', name)}"
        )
    queued = old.state.phase == "Suspended" and old.queue is not None
    if queued or old.state.phase not in ("Failed", "Suspended"):
        phase = f"Suspended in Kueue queue {old.queue}" if queued else old.state.phase
        logs, end = cluster.command("logs", name), cluster.command(old.end_command, name)
        raise UserError(f"{name} already exists and is {phase}. Follow it with: {logs}. End it with: {end}")
    delete(cluster, old)


def _adopt(cluster: Cluster, job: Object, others: Iterable[Object]) -> None:
    """Make the job the owner of the others, so that they are deleted with it, whoever deletes it."""
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    owner |= {key: job["metadata"][key] for key in ("name", "uid")}
    for other in others:
        cluster.patch(other["kind"], other["metadata"]["name"], {"metadata": {"ownerReferences": [owner]}})


def stop(cluster: Cluster, job: ClusterJob) -> None:
    """Let the job's pods save and exit. The job itself stays, and training with the same name resumes it.

    Raises:
        UserError: the job has already ended, or Kueue would restart it.
    """
    if job.state.ended:
        raise UserError(f"{job.name} has already {job.state.phase.lower()}")
    if job.queue is not None:
        raise UserError(
            f"cannot stop {job.name}: Kueue would restart it. Use: {cluster.command(job.end_command, job.name)} "
            "(its pods save and exit; the run stays on the volume, and training with the same name resumes it)"
        )
    cluster.patch(job.target.kind, job.name, job.target.suspension())
    _wait_for_end(cluster, job, removed=False)


def delete(cluster: Cluster, job: ClusterJob) -> None:
    """Delete the job and its objects, but not the run on its volume. Returns when its pods are gone."""
    cluster.delete(job.target.kind, job.name)
    _wait_for_end(cluster, job, removed=True)
    for kind in ("ConfigMap", "NetworkPolicy", *(["TrainingRuntime"] if job.target.kind == "TrainJob" else [])):
        if any(item["metadata"]["name"] == job.name for item in cluster.list(kind, OURS)):
            cluster.delete(kind, job.name)


def _wait_for_end(cluster: Cluster, job: ClusterJob, removed: bool) -> None:
    """Wait until the job's pods have ended, or with ``removed``, until they and the job itself are removed.

    Terminating pods have the same names and labels as the pods of a new job of this name.

    Raises:
        ClusterError: the timeout expired.
    """
    graces = [one["spec"].get("terminationGracePeriodSeconds") or 30 for one in job.pods]
    timeout = _END_S + max(graces, default=0)
    deadline = time.monotonic() + timeout
    while left := _remaining(cluster, job, removed):
        if time.monotonic() > deadline:
            raise ClusterError(f"{job.name} did not end within {timeout:.0f} s; remaining: {', '.join(left)}")
        time.sleep(0.5)


def _remaining(cluster: Cluster, job: ClusterJob, removed: bool) -> list[str]:
    pods = cluster.list("Pod", job.target.selector(job.name))
    left = [p["metadata"]["name"] for p in pods if removed or p["status"].get("phase") not in pod.ENDED]
    return left or ([job.target.kind] if removed and cluster.get(job.target.kind, job.name) is not None else [])
