"""A data set onto a volume: a batch/v1 Job that runs ``worldsize data fetch`` in a pod."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from worldsize.data.fetching.kaggle import SECRET, TOKEN
from worldsize.data.fetching.known import KAGGLE, KNOWN, Name
from worldsize.errors import DataError, UserError
from worldsize.launch import checks_job, jobs, options, pod, show
from worldsize.launch.answers import ClusterError
from worldsize.launch.checks import Context, findings_of
from worldsize.launch.cluster import Cluster
from worldsize.launch.follow import Follower
from worldsize.launch.options import Where
from worldsize.launch.spec import VOLUMES, JobSpec, general_problems, refuse
from worldsize.launch.target import Object, Phase, State, from_conditions
from worldsize.launch.target import Target as Base
from worldsize.recipe import Recipe

_COMPONENT = "data"
_KAGGLE_FOLDER = "/etc/kaggle"
# Each attempt goes on where the last one was, so these are for a network that fails for long.
_RETRIES = 4
_FOLDER = re.compile(r"[a-z0-9]([-a-z0-9]{0,55}[a-z0-9])?")
# A container of Azure's stands in the same place: abfs://CONTAINER@ACCOUNT...
_USER_IN_URL = re.compile(r"https?://[^/?#]*@|[^:/?#]+://[^/?#@]*:[^/?#@]*@")


@dataclass(frozen=True)
class Fetch:
    """Fetch a data set onto a volume, where `worldsize train --on ... --volume VOLUME` finds it.

    A Job on the cluster downloads, verifies and unpacks it; this command follows its log. Ctrl-C leaves it running, and
    the same command follows it again. Exit codes: 0 the data set is there, 1 failed, 130 detached.
    """

    dataset: tyro.conf.Positional[Name]
    """What to fetch: `imagenet` comes from Kaggle, `cifar10` from its authors, `folder` is any pictures in an archive."""
    volume: str
    """The volume; the data set DATASET goes to its folder data/DATASET."""
    image: str
    """Container image, by tag or digest (worldsize image build)."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Another source of the archive (.zip, .tar, .tar.gz): a URL (https, s3, gs, ...; nothing secret), or
    kaggle:COMPETITION."""
    sha256: str | None = None
    """Checksum of the archive."""
    keep_archive: bool = False
    """Do not remove the downloaded archive at the end."""
    subset: bool = False
    """The archive holds a part of the data set: do not insist on its known number of pictures."""
    folder: str | None = None
    """Another name for the folder below data."""
    cpu: str = "2"
    """CPU cores for the pod."""
    memory: str = "4Gi"
    """Memory for the pod; the names of ImageNet's two million files take most of it."""
    secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A Secret's key as an environment variable, for an object store: SECRET/KEY or SECRET/KEY=VARIABLE."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable, as NAME=VALUE; nothing secret."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret that the image is pulled with."""
    node_selector: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Only nodes with this label, as KEY=VALUE."""
    toleration: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also nodes with this taint: KEY, KEY=VALUE or KEY=VALUE:EFFECT."""
    detach: bool = False
    """Return as soon as the Job is there."""
    where: tyro.conf.OmitArgPrefixes[Where] = field(default_factory=Where)


def to_spec(asked: Fetch, namespace: str) -> JobSpec:
    """The job in full, without a recipe; a pure function of what was typed.

    Raises:
        UserError: an option that cannot be read.
    """
    folder = asked.folder or asked.dataset
    if not _FOLDER.fullmatch(folder):
        raise UserError(
            f"--folder {folder!r}: use at most 57 lower-case letters, digits and '-'; the Job is called fetch-FOLDER"
        )
    if asked.source and _USER_IN_URL.match(asked.source):
        raise UserError("--from: a user or password in the URL could be read by all who see the Job: use --secret instead")
    command = ["data", "fetch", asked.dataset, "--to", str(VOLUMES / asked.volume / "data" / folder)]
    command += ["--from", asked.source] if asked.source else []
    command += ["--sha256", asked.sha256] if asked.sha256 else []
    command += [flag for flag, said in (("--keep-archive", asked.keep_archive), ("--subset", asked.subset)) if said]
    token = (f"KAGGLE_CONFIG_DIR={_KAGGLE_FOLDER}",) if _from_kaggle(asked) else ()
    job = options.Job(
        name=f"fetch-{folder}",
        image=asked.image,
        volume=(asked.volume,),
        cpu=asked.cpu,
        memory=asked.memory,
        shm="64Mi",  # one process shares nothing
        env=(*asked.env, *token),
        secret=asked.secret,
        pull_secret=asked.pull_secret,
        node_selector=asked.node_selector,
        toleration=asked.toleration,
        grace=30,
    )
    # Its options mean what they mean for training.
    training = options.to_spec(Recipe(device="cpu"), "", "", namespace, job)
    return replace(training, recipe="", command=tuple(command), retries=_RETRIES)


def render(spec: JobSpec) -> list[Object]:
    """The Job. Where the environment names a folder for Kaggle's token, the Secret is mounted there.

    Raises:
        UserError: all that is wrong with the spec.
    """
    refuse(general_problems(spec))
    labels = pod.labels(spec.name, _COMPONENT)
    template = pod.template(spec, {"command": ["worldsize", *spec.command], "name": Target.container})
    template["metadata"]["labels"] |= labels
    inside = template["spec"]
    inside["restartPolicy"] = "Never"  # every attempt keeps its log
    if _KAGGLE_FOLDER in dict(spec.env).values():
        inside["volumes"].append({"name": SECRET, "secret": {"defaultMode": 0o440, "secretName": SECRET}})
        mount = {"mountPath": _KAGGLE_FOLDER, "name": SECRET, "readOnly": True}
        inside["containers"][0]["volumeMounts"].append(mount)
    codes = sorted(kind.exit_code for kind in (UserError, DataError))
    return [
        {
            "apiVersion": "batch/v1",
            "kind": Target.kind,
            "metadata": pod.job_metadata(spec) | {"labels": labels},
            "spec": {
                "backoffLimit": spec.retries,
                "podFailurePolicy": {
                    "rules": [
                        # What the user has to mend would fail again.
                        {
                            "action": "FailJob",
                            "onExitCodes": {"containerName": Target.container, "operator": "In", "values": codes},
                        },
                        {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
                    ]
                },
                "template": template,
            },
        }
    ]


def fetch(asked: Fetch, cluster: Cluster) -> int:
    """``worldsize cluster data fetch``: send the Job and follow it. Returns the exit code.

    Raises:
        UserError: no such volume or Secret, or the Job is busy with something else.
    """
    spec = to_spec(asked, cluster.namespace)
    [job] = render(spec)
    _look_for_what_it_needs(asked, spec, cluster)
    _make_way(job, cluster)
    again = "the same command follows it again"
    if asked.detach:
        show.note(f"Job {spec.name} is in namespace {cluster.namespace}; {again}")
        return 0
    follower = Follower(cluster, Target(), spec.name)
    try:
        state = show.follow(follower)
    except KeyboardInterrupt:
        show.note(f"{spec.name} goes on; {again}")
        return 130
    show.ending(state, follower.failures())
    return 0 if state.phase == "Succeeded" else 1


class Target(Base):
    """The Job, as far as following it goes."""

    kind = "Job"
    container = "fetch"

    def problems(self, spec: JobSpec) -> Iterable[str]:
        return ()

    def job(self, spec: JobSpec) -> list[Object]:
        return render(spec)

    def state(self, job: Object, pods: list[Object]) -> State:
        order: tuple[tuple[str, Phase], ...] = (("Failed", "Failed"), ("Complete", "Succeeded"), ("Suspended", "Suspended"))
        newest = max(pods, key=lambda one: str(one["metadata"]["creationTimestamp"]), default=None)
        begun = newest is not None and newest["status"].get("phase") != "Pending"
        return from_conditions(job, order, "Running" if begun else "Pending")

    def place(self, one: Object) -> tuple[int, str]:
        return 0, self.container

    def suspension(self) -> Object:
        return {"spec": {"suspend": True}}

    def selector(self, name: str) -> str:
        return f"{pod.RUN_LABEL}={name},app.kubernetes.io/component={_COMPONENT}"


def _from_kaggle(asked: Fetch) -> bool:
    return (asked.source or KNOWN[asked.dataset].source or "").startswith(KAGGLE)


def _look_for_what_it_needs(asked: Fetch, spec: JobSpec, cluster: Cluster) -> None:
    """A pod would wait forever for a volume or a Secret that is not there."""
    if cluster.get("PersistentVolumeClaim", asked.volume) is None:
        raise UserError(
            f"namespace {cluster.namespace} has no volume {asked.volume!r}: "
            f"worldsize cluster volume create {asked.volume} --size 400Gi"
        )
    for finding in findings_of(checks_job.secrets, Context(cluster, (Target.kind,), spec)):
        if finding.level == "error":
            raise UserError(f"{finding.what}: {finding.remedy}")
    if not _from_kaggle(asked):
        return
    try:
        secret = cluster.get("Secret", SECRET)
    except ClusterError as error:
        if error.status == 403:  # who may not read Secrets can use them all the same
            return
        raise
    if secret is None or TOKEN not in secret.get("data", {}):
        raise UserError(
            f"Kaggle wants a token, and namespace {cluster.namespace} has no Secret {SECRET} with a key {TOKEN}: "
            f"make one at https://www.kaggle.com/settings/api, then: "
            f"worldsize cluster secret create {SECRET} --from ~/.kaggle/{TOKEN}"
        )


def _make_way(job: Object, cluster: Cluster) -> None:
    """Create the Job; one that has ended or was stopped makes way, and one that is at the same work is left to it."""
    name, target = job["metadata"]["name"], Target()
    old = cluster.get(Target.kind, name)
    if old is not None:
        state = target.state(old, [])
        stopped = state.phase == "Suspended" and pod.queue_of(old) is None
        if not state.ended and not stopped:
            if _work(old) != _work(job):
                raise UserError(f"Job {name} is busy with something else: wait for it, or use another --folder")
            show.note(f"{name} is at work already")
            return
        jobs.delete(cluster, jobs.Job(target, old, state, []))
    cluster.create(job)


def _work(job: Object) -> tuple[list[str], list[str]]:
    """What a Job does, and to which volumes."""
    inside = job["spec"]["template"]["spec"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in inside["volumes"] if "persistentVolumeClaim" in v]
    return inside["containers"][0]["command"], claims
