"""Jobs on a cluster: sending one, following, listing, stopping and removing them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from worldsize.errors import UserError
from worldsize.launch import pod, reasons, target
from worldsize.launch.answers import ClusterError
from worldsize.launch.cluster import Cluster
from worldsize.launch.show import note, seconds_since
from worldsize.launch.spec import JobSpec
from worldsize.launch.target import Object, State, Target

# Data sets are fetched by jobs as well.
_KINDS = (*target.TARGETS, "datajob")
_OURS = "app.kubernetes.io/managed-by=worldsize"
_GONE_S = 60.0  # for a job to go, beyond the time that its pods have to save


@dataclass(frozen=True)
class Job:
    """A job that is on the cluster."""

    target: Target
    object: Object
    state: State
    pods: list[Object]

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def queue(self) -> str | None:
        """As of `pod.queue_of`."""
        return pod.queue_of(self.object)

    @property
    def end(self) -> str:
        """The command of worldsize that ends it in good order: what others suspend, Kueue starts again."""
        return "stop" if self.queue is None else "delete"

    @property
    def age_s(self) -> float:
        """Seconds since it was created."""
        return seconds_since(self.object["metadata"]["creationTimestamp"])


def find(cluster: Cluster, name: str) -> Job:
    """Our job of this name, of whatever kind.

    Raises:
        UserError: there is none.
    """
    found = every(cluster)
    for job in found:
        if job.name == name:
            return job
    names = [job.name for job in found]
    there = f"there are: {', '.join(names)}" if names else "there is no job of worldsize at all"
    raise UserError(f"namespace {cluster.namespace} has no job {name!r}; {there}")


def every(cluster: Cluster) -> list[Job]:
    """All jobs of worldsize in the namespace, the newest first."""
    jobs: list[Job] = []
    for kind in _KINDS:
        one = target.load(kind)
        try:
            found = cluster.list(one.kind, _OURS)
        except ClusterError as error:
            if error.status in (403, 404):  # not for this user, or its operator is not installed
                continue
            raise
        for item in found:
            pods = cluster.list("Pod", one.selector(item["metadata"]["name"]))
            jobs.append(Job(one, item, one.state(item, pods), pods))
    return sorted(jobs, key=lambda job: job.age_s)


def submit(cluster: Cluster, spec: JobSpec, manifests: list[Object]) -> None:
    """Create the job's objects. A job of the same name that failed or was stopped makes way: its run goes on.

    Raises:
        UserError: a job of this name runs, or has succeeded.
        ClusterError: the API server refuses one of the objects, or does not answer; then none is left, if it can be reached.
    """
    for old in (job for job in every(cluster) if job.name == spec.name):
        _make_way(cluster, old)
    created: list[Object] = []
    try:
        # Not applied: that would change what somebody else has made in this moment.
        for manifest in manifests:
            created.append(cluster.create(manifest))
    except BaseException as error:
        refused = isinstance(error, ClusterError) and 400 <= error.status < 500
        _undo(cluster, created, None if refused else next(iter(manifests[len(created) :]), None))
        raise
    try:
        _adopt(cluster, created[-1], created[:-1])
    except ClusterError as error:
        note(f"{spec.name} is sent; what was made for it goes with it only where worldsize deletes it: {error}")


def _undo(cluster: Cluster, created: list[Object], unsure: Object | None) -> None:
    """Delete what was created; of what was sent and not answered, what is there with the labels that it was sent with."""
    with suppress(ClusterError):
        there = cluster.get(unsure["kind"], unsure["metadata"]["name"]) if unsure else None
        if unsure and there and unsure["metadata"]["labels"].items() <= there["metadata"].get("labels", {}).items():
            created = [*created, unsure]
    for manifest in created:
        with suppress(ClusterError):
            cluster.delete(manifest["kind"], manifest["metadata"]["name"])


def _make_way(cluster: Cluster, old: Job) -> None:
    name = old.name
    if old.state.phase == "Succeeded":
        raise UserError(
            f"{name} has succeeded already: its run is on the volume. For another run choose another --name, or remove "
            f"the job with: {cluster.command('delete', name)}"
        )
    waits = old.state.phase == "Suspended" and old.queue is not None
    if waits or old.state.phase not in ("Failed", "Suspended"):
        phase = f"Suspended, in Kueue's queue {old.queue}," if waits else old.state.phase
        logs, end = cluster.command("logs", name), cluster.command(old.end, name)
        raise UserError(f"{name} is {phase} already: {logs} follows it, {end} ends it")
    delete(cluster, old)


def _adopt(cluster: Cluster, job: Object, others: Iterable[Object]) -> None:
    """Have the others deleted with the job, whoever deletes it."""
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"]}
    owner |= {key: job["metadata"][key] for key in ("name", "uid")}
    for other in others:
        cluster.patch(other["kind"], other["metadata"]["name"], {"metadata": {"ownerReferences": [owner]}})


def stop(cluster: Cluster, job: Job) -> None:
    """Ask the job's pods to save and leave; the job stays, and training again under its name goes on.

    Raises:
        UserError: it has ended already, or Kueue would start it again.
    """
    if job.state.ended:
        raise UserError(f"{job.name} has {job.state.phase.lower()} already")
    if job.queue is not None:
        raise UserError(
            f"Kueue decides when {job.name} runs, and would start it again. {cluster.command(job.end, job.name)} "
            "lets its pods save and leave; the run stays on the volume, and training under the same name goes on"
        )
    cluster.patch(job.target.kind, job.name, job.target.suspension())
    _wait_until_gone(cluster, job, all_of_them=False)


def delete(cluster: Cluster, job: Job) -> None:
    """Remove the job and all that was made for it, but for the run on its volume. Returns when its pods are gone."""
    cluster.delete(job.target.kind, job.name)
    _wait_until_gone(cluster, job, all_of_them=True)
    for kind in ("ConfigMap", "NetworkPolicy", *(["TrainingRuntime"] if job.target.kind == "TrainJob" else [])):
        if any(item["metadata"]["name"] == job.name for item in cluster.list(kind, _OURS)):
            cluster.delete(kind, job.name)


def older_than(jobs: list[Job], age: timedelta) -> list[Job]:
    """Those that have ended or were stopped, and were created longer ago than ``age``."""

    def rests(job: Job) -> bool:
        return job.state.ended or (job.state.phase == "Suspended" and job.queue is None)

    return [job for job in jobs if rests(job) and job.age_s > age.total_seconds()]


def _wait_until_gone(cluster: Cluster, job: Job, all_of_them: bool) -> None:
    """Wait for the job's pods to end, or with ``all_of_them`` for them and the job itself to be removed.

    Pods that are still leaving share names and labels with those of a job that is created anew.

    Raises:
        ClusterError: they do not leave.
    """
    graces = [one["spec"].get("terminationGracePeriodSeconds") or 30 for one in job.pods]
    patience = _GONE_S + max(graces, default=0)
    deadline = time.monotonic() + patience
    while left := _there(cluster, job, all_of_them):
        if time.monotonic() > deadline:
            raise ClusterError(f"of {job.name}, this did not go within {patience:.0f} s: {', '.join(left)}")
        time.sleep(0.5)


def _there(cluster: Cluster, job: Job, all_of_them: bool) -> list[str]:
    pods = cluster.list("Pod", job.target.selector(job.name))
    ended = ("Succeeded", "Failed")
    left = [p["metadata"]["name"] for p in pods if all_of_them or p["status"].get("phase") not in ended]
    return left or ([job.target.kind] if all_of_them and cluster.get(job.target.kind, job.name) is not None else [])


def pods_of(job: Job) -> list[tuple[str, str, int, str, str]]:
    """(short name, phase, restarts, node, why it waits or how it ended) of each pod, in rank order."""
    rows = []
    for one in sorted(job.pods, key=job.target.place):
        statuses = one["status"].get("containerStatuses", [])
        why = reasons.waiting(job.target, [one]) + reasons.failures(job.target, [one])
        rows.append(
            (
                job.target.place(one)[1],
                "Terminating" if one["metadata"].get("deletionTimestamp") else str(one["status"].get("phase", "")),
                sum(status.get("restartCount", 0) for status in statuses),
                str(one["spec"].get("nodeName", "")),
                why[0].partition(" ")[2].splitlines()[0] if why else "",
            )
        )
    return rows
