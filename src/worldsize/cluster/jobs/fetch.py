"""Downloads a dataset to a volume: a batch/v1 Job that runs ``worldsize data fetch`` in a pod."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated

import tyro

from worldsize.cluster import options
from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.jobs import manage
from worldsize.cluster.jobs.follow import Follower
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.fetchjob import KAGGLE_FOLDER, Target, render
from worldsize.cluster.manifests.spec import VOLUMES, PodJobSpec
from worldsize.cluster.objects import Object
from worldsize.cluster.options import Where
from worldsize.cluster.preflight import job as job_checks
from worldsize.cluster.preflight.base import Context, findings_of
from worldsize.config.command_line import Flat
from worldsize.config.recipe import Recipe
from worldsize.data.fetch.kaggle import ACCESS_TOKENS, CREATE, SECRET, TOKEN, USER_AND_KEY
from worldsize.data.fetch.known import KAGGLE, KNOWN, Name
from worldsize.distributed.stop_signals import interrupts_held, nothing_was
from worldsize.errors import DETACHED, FAILED, SUCCESS, UserError
from worldsize.jobs import display
from worldsize.jobs.options import refuse_empty
from worldsize.jobs.spec import refuse
from worldsize.jobs.terminal import note

# Each attempt resumes the previous one, so these cover a long network outage.
_RETRIES = 4
_FOLDER = re.compile(r"[a-z0-9]([-a-z0-9]{0,55}[a-z0-9])?")
# Requires a colon in the user part: Azure has its container there, as in abfs://CONTAINER@ACCOUNT...
_USER_IN_URL = re.compile(r"https?://[^/?#]*@|[^:/?#]+://[^/?#@]*:[^/?#@]*@")


@dataclass(frozen=True)
class Fetch:
    """Download a dataset to a volume, where `worldsize train --on ... --volume VOLUME` finds it.

    A Job on the cluster downloads, verifies and unpacks it; this command follows its log. Ctrl-C detaches; the Job keeps
    running, and the same command follows it again. Exit codes: 0 succeeded, 1 failed, 130 detached.
    """

    dataset: tyro.conf.Positional[Name]
    """Dataset: `imagenet` is downloaded from Kaggle, `cifar10` from its authors; `folder` is any archive of images."""
    volume: str
    """Volume; the dataset is stored in its folder data/DATASET."""
    image: str
    """Container image, by tag or digest (worldsize image build)."""
    source: Annotated[str | None, tyro.conf.arg(name="from")] = None
    """Other source of the archive (.zip, .tar, .tar.gz): a URL (https, s3, gs, ...; without secrets), or
    kaggle:COMPETITION."""
    sha256: str | None = None
    """Checksum of the archive."""
    keep_archive: bool = False
    """Keep the downloaded archive after unpacking."""
    subset: bool = False
    """The archive has only part of the dataset: do not check the number of images."""
    folder: str | None = None
    """Name of the folder below data (default: DATASET)."""
    cpu: str = "2"
    """CPU cores for the pod."""
    memory: str = "4Gi"
    """Memory for the pod; ImageNet needs most of it for the names of its two million files."""
    secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable from a Secret, for an object store: SECRET/KEY or SECRET/KEY=VARIABLE."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Environment variable, as NAME=VALUE; for secret values, use --secret."""
    pull_secret: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Secret for pulling the container image."""
    node_selector: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Use only nodes with this label, as KEY=VALUE."""
    toleration: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Also use nodes with this taint: KEY, KEY=VALUE or KEY=VALUE:EFFECT."""
    fixed_user: bool = True
    """Run as user 1000 of the container image; --no-fixed-user leaves the user to the cluster, as OpenShift requires."""
    detach: bool = False
    """Return as soon as the Job is created."""
    where: Flat[Where] = field(default_factory=Where)


def to_spec(asked: Fetch, namespace: str) -> PodJobSpec:
    """The complete job, without a recipe; a pure function of the command line.

    Raises:
        UserError: an invalid option.
    """
    refuse_empty(asked)
    folder = asked.folder or asked.dataset
    if not _FOLDER.fullmatch(folder):
        raise UserError(
            f"--folder {folder!r}: use at most 57 lower-case letters, digits and '-'; the Job's name is fetch-FOLDER"
        )
    if asked.source and _USER_IN_URL.match(asked.source):
        raise UserError(
            "--from: the URL has a user name or password that everyone who can read the Job would see; use --secret instead"
        )
    if asked.source and not asked.source.startswith(KAGGLE):
        refuse(options.local_path("from", asked.source, (asked.volume,)))
    command = ["data", "fetch", asked.dataset, "--to", str(VOLUMES / asked.volume / "data" / folder)]
    command += ["--from", asked.source] if asked.source else []
    command += ["--sha256", asked.sha256] if asked.sha256 else []
    flags = (("--keep-archive", asked.keep_archive), ("--subset", asked.subset))
    command += [flag for flag, value in flags if value]
    token = (f"KAGGLE_CONFIG_DIR={KAGGLE_FOLDER}",) if _needs_kaggle_secret(asked) else ()
    job = options.JobOptions(
        name=f"fetch-{folder}",
        image=asked.image,
        volume=(asked.volume,),
        cpu=asked.cpu,
        memory=asked.memory,
        shm="64Mi",  # a single process shares no memory
        env=(*asked.env, *token),
        secret=asked.secret,
        pull_secret=asked.pull_secret,
        node_selector=asked.node_selector,
        toleration=asked.toleration,
        grace=30,
        fixed_user=asked.fixed_user,
    )
    # The options have the same meaning as for training.
    training = options.to_spec(Recipe(device="cpu"), "", "", namespace, job)
    return replace(training, recipe="", command=tuple(command), retries=_RETRIES)


def fetch(asked: Fetch, cluster: Cluster) -> int:
    """``worldsize cluster data fetch``: submit the Job and follow it. Returns the exit code.

    Raises:
        UserError: no such volume or Secret, or the Job is already running a different fetch.
    """
    with nothing_was("submitted"):
        spec = to_spec(asked, cluster.namespace)
        [job] = render(spec)
        _check_requirements(asked, spec, cluster)
        runs = _runs_already(job, cluster)
        with interrupts_held() as held:
            if not runs:
                cluster.create(job)
    again = "run the same command again to follow it"
    if asked.detach:
        note(f"Job {spec.name} is in namespace {cluster.namespace}; {again}")
        return SUCCESS
    follower = Follower(cluster, Target(), spec.name)
    try:
        if held:
            raise KeyboardInterrupt
        state = display.follow(follower)
    except KeyboardInterrupt:
        note(f"Detached; {spec.name} keeps running; {again}")
        return DETACHED
    display.ending(state, follower.failures())
    return SUCCESS if state.phase == "Succeeded" else FAILED


def _needs_kaggle_secret(asked: Fetch) -> bool:
    """Whether the dataset comes from Kaggle, and --secret and --env have no token for it."""
    if not (asked.source or KNOWN[asked.dataset].source or "").startswith(KAGGLE):
        return False
    variables = {text.partition("=")[0] for text in asked.env}
    variables |= {text.partition("=")[2] or text.partition("/")[2] for text in asked.secret}
    return "KAGGLE_API_TOKEN" not in variables and not variables >= {*USER_AND_KEY}


def _check_requirements(asked: Fetch, spec: PodJobSpec, cluster: Cluster) -> None:
    """Check the volume and the Secrets: a pod would wait forever for a missing one."""
    if cluster.get("PersistentVolumeClaim", asked.volume) is None:
        raise UserError(
            f"no volume {asked.volume!r} in namespace {cluster.namespace}; create it with: "
            f"worldsize cluster volume create {asked.volume} --size 400Gi"
        )
    context = Context(cluster, (Target.kind,), spec)
    for finding in [*findings_of(job_checks.volumes, context), *findings_of(job_checks.secrets, context)]:
        if finding.level == "error":
            raise UserError(f"{finding.what}: {finding.remedy}")
    if not _needs_kaggle_secret(asked):
        return
    try:
        secret = cluster.get("Secret", SECRET)
    except ClusterError as error:
        if error.status == 403:  # a job can use Secrets that the user may not read
            return
        raise
    keys = set((secret or {}).get("data") or {})
    if not keys & {TOKEN, *ACCESS_TOKENS} and not keys >= {*USER_AND_KEY}:
        raise UserError(
            f"Kaggle requires a token, and namespace {cluster.namespace} has no Secret {SECRET} with a key {TOKEN}, "
            f"{', '.join(ACCESS_TOKENS)}, or {' and '.join(USER_AND_KEY)}: {CREATE}"
        )


def _runs_already(job: Object, cluster: Cluster) -> bool:
    """Whether a Job runs the same fetch. Deletes a Job of this name that has ended or is stopped."""
    name, target = job["metadata"]["name"], Target()
    old = cluster.get(Target.kind, name)
    if old is None:
        return False
    state = target.state(old, [])
    stopped = state.phase == "Suspended" and pod.queue_of(old) is None
    if state.ended or stopped:
        manage.delete(cluster, manage.ClusterJob(target, old, state, []))
        return False
    if _work(old) != _work(job):
        raise UserError(f"Job {name} is already running a different fetch: wait until it ends, or pass another --folder")
    note(f"Job {name} is already running")
    return True


def _work(job: Object) -> tuple[list[str], list[str]]:
    """A Job's command, and the volumes that it mounts."""
    pod_spec = job["spec"]["template"]["spec"]
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod_spec["volumes"] if "persistentVolumeClaim" in v]
    return pod_spec["containers"][0]["command"], claims
