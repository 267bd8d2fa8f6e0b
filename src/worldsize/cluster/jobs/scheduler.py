"""The jobs of a Kubernetes cluster, for the commands that do not depend on the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unreachable
from worldsize.cluster.jobs import diagnose, manage
from worldsize.cluster.jobs.follow import Follower
from worldsize.cluster.jobs.manage import ClusterJob
from worldsize.cluster.manifests.spec import RECIPE
from worldsize.errors import UserError
from worldsize.jobs.base import Job, Part, Scheduler, Where
from worldsize.jobs.progress import TAIL
from worldsize.jobs.state import JobState
from worldsize.jobs.terminal import age, seconds_since


class KubernetesJob(Job):
    """A job in pods."""

    def __init__(self, cluster: Cluster, job: ClusterJob) -> None:
        self._cluster = cluster
        self._job = job

    @property
    def name(self) -> str:
        return self._job.name

    @property
    def kind(self) -> str:
        return self._job.target.kind

    @property
    def state(self) -> JobState:
        return self._job.state

    @property
    def age_s(self) -> float:
        return self._job.age_s

    @property
    def inactive(self) -> bool:
        return self._job.inactive

    @property
    def end_command(self) -> str:
        return self._job.end_command

    def parts(self) -> Sequence[Part]:
        target, found = self._job.target, []
        for one in sorted(self._job.pods, key=target.place):
            reasons = diagnose.waiting(target, [one]) + diagnose.failures(target, [one])
            found.append(
                Part(
                    name=target.place(one)[1],
                    phase="Terminating" if one["metadata"].get("deletionTimestamp") else str(one["status"].get("phase", "")),
                    restarts=sum(status.get("restartCount", 0) for status in one["status"].get("containerStatuses", [])),
                    machine=str(one["spec"].get("nodeName", "")),
                    reason=_one_line(reasons[0].partition(" ")[2]) if reasons else "",
                )
            )
        return found

    def warnings(self) -> Sequence[str]:
        """Of the job's events: a pod that could not be created is not among the parts."""
        if self._job.inactive:
            return ()
        try:
            events = self._cluster.list("Event")
        except ClusterError:  # no permission
            return ()
        last = diagnose.last_warnings(self._job.target, events, self._job.object)
        return [f"{text} ({age(seconds_since(at))} ago)" for text, at in last]

    def metrics(self) -> str:
        """From the volume, through a running pod."""
        containers = [(one, part) for one in self._job.pods for part in one["spec"]["containers"]]
        words = [word for _, part in containers for word in part.get("command", [])]
        if "--out" not in words:
            return ""
        path = f"{words[words.index('--out') + 1]}/{self.name}/metrics.jsonl"
        for one, part in containers:
            # An MPIJob's launcher has the command, but no volume.
            folders = [mount["mountPath"].rstrip("/") + "/" for mount in part.get("volumeMounts", [])]
            if one["status"].get("phase") != "Running" or not path.startswith(tuple(folders)):
                continue
            try:
                session = self._cluster.exec(
                    one["metadata"]["name"], self._job.target.container, ["tail", "-c", str(TAIL), path]
                )
                try:
                    return session.rest().decode("utf-8", "replace")
                finally:
                    session.close()
            except (ClusterError, Unreachable):  # no permission, or no metrics yet
                continue
        return ""

    def recipe(self) -> str:
        found = self._cluster.get("ConfigMap", self.name)
        return str((found or {}).get("data", {}).get(RECIPE.name, ""))

    def follower(self, logs: bool) -> Follower:
        return Follower(self._cluster, self._job.target, self.name, logs)

    def stop(self) -> None:
        manage.stop(self._cluster, self._job)

    def delete(self) -> None:
        manage.delete(self._cluster, self._job)


def _one_line(reason: str) -> str:
    """The first line, with the one after it that a colon announces, such as the message after an exit code."""
    first, *more = [line.strip() for line in reason.splitlines() if line.strip()] or [""]
    return f"{first} {more[0]}" if more and first.endswith(":") else first.removesuffix(":")


class Jobs(Scheduler):
    """The jobs in one namespace of a cluster."""

    part = "pod"

    def __init__(self, where: Where) -> None:
        self._cluster = Cluster(where.context, where.namespace)

    @classmethod
    def of(cls, cluster: Cluster) -> Jobs:
        """The jobs of a cluster that is already connected."""
        jobs = cls.__new__(cls)
        jobs._cluster = cluster
        return jobs

    @property
    def place(self) -> str:
        return f"in namespace {self._cluster.namespace}"

    def jobs(self) -> list[Job]:
        found = manage.list_jobs(self._cluster)
        if not found:
            self._check_namespace()
        return [KubernetesJob(self._cluster, job) for job in found]

    def _check_namespace(self) -> None:
        """Raise UserError if the namespace does not exist: the server lists objects of any name."""
        name = self._cluster.namespace
        with suppress(ClusterError):  # who may not read namespaces does not learn it
            if self._cluster.get("Namespace", name) is None:
                raise UserError(f"namespace {name} does not exist; pass another --namespace or --context")

    def find(self, name: str) -> KubernetesJob:
        """The job of this name, see `manage.find`."""
        return KubernetesJob(self._cluster, manage.find(self._cluster, name))

    def command(self, *words: str) -> str:
        return self._cluster.command(*words)
