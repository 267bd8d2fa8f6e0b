"""Jobs on a fake cluster: submitting, replacing, stopping and deleting."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
import yaml

from fake_cluster import BrokenOff, KeepingCluster, is_in
from specs import PLAIN, TORCH
from worldsize import cli
from worldsize.cluster.api.client import Cluster
from worldsize.cluster.api.errors import ClusterError, Unreachable
from worldsize.cluster.jobs import manage
from worldsize.cluster.jobs.manage import ClusterJob
from worldsize.cluster.jobs.scheduler import KubernetesJob
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.spec import Placement
from worldsize.cluster.objects import labels
from worldsize.errors import UserError

FAKE_CLUSTER = KeepingCluster
SPEC = replace(PLAIN, namespace="team")


def submit(fake_cluster, spec=SPEC, on=TORCH):
    manage.submit(fake_cluster.cluster, spec, on.render(spec))


def created(fake_cluster):
    """(kind, name) of the objects that the test created, without the cluster's own."""
    own = {*KeepingCluster().objects}
    return sorted((path.split("/")[-2], path.split("/")[-1]) for path in fake_cluster.objects if path not in own)


@pytest.mark.parametrize("on", TARGETS)
def test_all_objects_are_deleted_with_their_job_whoever_deletes_it(fake_cluster, on):
    kind = load_target(on)
    submit(fake_cluster, on=kind)
    assert len(created(fake_cluster)) == len(kind.render(SPEC))
    fake_cluster.cluster.delete(kind.kind, "r50")
    assert created(fake_cluster) == []


def test_a_refused_job_leaves_nothing(fake_cluster):
    fake_cluster.refuse("PyTorchJob", 422, "denied by the webhook")
    with pytest.raises(ClusterError, match="denied by the webhook"):
        submit(fake_cluster)
    assert created(fake_cluster) == []


def unanswered(fake_cluster, monkeypatch, method, plural, status=None):
    """Perform requests of this kind, but drop the connection before the answer; or reject them with ``status``."""
    answer = fake_cluster.answer

    def broken(requested, path, query, body):
        if requested != method or path.split("/namespaces/")[1].split("/")[1] != plural:
            return answer(requested, path, query, body)
        if status is not None:
            return status, {"message": "denied by the webhook"}
        answer(requested, path, query, body)
        return 201, BrokenOff(b"{")

    monkeypatch.setattr(fake_cluster, "answer", broken)


@pytest.mark.parametrize("plural", ["configmaps", "networkpolicies", "pytorchjobs"])
def test_a_job_whose_sending_is_not_answered_leaves_nothing(fake_cluster, monkeypatch, plural):
    unanswered(fake_cluster, monkeypatch, "POST", plural)
    with pytest.raises(Unreachable):
        submit(fake_cluster)
    assert created(fake_cluster) == []


@pytest.mark.parametrize("status", [None, 422])
def test_objects_of_others_with_the_jobs_name_stay(fake_cluster, monkeypatch, status):
    """Both if creation gets no answer, and if it is rejected for another reason than that the object already exists."""
    fake_cluster.add("PyTorchJob", "r50", metadata={"labels": labels("r50") if status else {}})
    monkeypatch.setattr(manage, "list_jobs", lambda _: [])
    before = created(fake_cluster)
    unanswered(fake_cluster, monkeypatch, "POST", "pytorchjobs", status)
    with pytest.raises(ClusterError):
        submit(fake_cluster)
    assert created(fake_cluster) == before


def test_a_job_that_runs_is_not_given_up_where_its_objects_cannot_be_made_its_own(fake_cluster, monkeypatch, capsys):
    unanswered(fake_cluster, monkeypatch, "PATCH", "configmaps", 403)
    submit(fake_cluster)
    assert (
        "Submitted r50 without owner references, so only `worldsize delete` removes all its objects"
        in capsys.readouterr().err
    )
    assert ("pytorchjobs", "r50") in created(fake_cluster)


@pytest.mark.parametrize("phase", ["Failed", "Suspended"])
def test_a_failed_or_stopped_job_is_replaced(fake_cluster, phase):
    is_in(fake_cluster, "MPIJob", phase)
    submit(fake_cluster)
    assert [kind for kind, _ in created(fake_cluster)] == ["configmaps", "networkpolicies", "pytorchjobs"]


def test_a_job_in_a_kueue_queue_is_neither_replaced_nor_stopped_nor_deleted_by_age(fake_cluster):
    """Kueue itself suspends the jobs in its queues, and restarts jobs that others suspend."""
    queued = replace(SPEC, placement=Placement(queue="team"))
    submit(fake_cluster, queued)
    fake_cluster.cluster.patch("PyTorchJob", "r50", {"status": {"conditions": [{"type": "Suspended", "status": "True"}]}})
    before = created(fake_cluster)
    with pytest.raises(
        UserError, match=r"exists and is Suspended in Kueue queue team\..* worldsize delete r50 --namespace team$"
    ):
        submit(fake_cluster, queued)
    job = manage.find(fake_cluster.cluster, "r50")
    with pytest.raises(UserError, match="cannot stop r50: Kueue would restart it"):
        manage.stop(fake_cluster.cluster, job)
    assert not job.inactive
    assert created(fake_cluster) == before


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ("Succeeded", "has already succeeded.*worldsize delete r50 --namespace team"),
        ("Running", "already exists and is Running"),
        ("Restarting", "already exists and is Restarting"),
        ("Created", "already exists and is Pending"),
        (None, "already exists and is Created"),
    ],
)
def test_an_active_or_succeeded_job_is_not_replaced(fake_cluster, phase, message):
    is_in(fake_cluster, "PyTorchJob", phase)
    before = created(fake_cluster)
    with pytest.raises(UserError, match=message):
        submit(fake_cluster)
    assert created(fake_cluster) == before


def test_stopping_suspends_and_what_has_ended_cannot_be_stopped(fake_cluster):
    for on in TARGETS:
        kind = load_target(on)
        submit(fake_cluster, replace(SPEC, name=f"a-{on}"), kind)
        manage.stop(fake_cluster.cluster, manage.find(fake_cluster.cluster, f"a-{on}"))
        job = fake_cluster.cluster.get(kind.kind, f"a-{on}")
        # Kubeflow's API reference: in the runPolicy of PyTorchJob and MPIJob, and in the spec of TrainJob.
        assert (job["spec"] if on == "trainjob" else job["spec"]["runPolicy"])["suspend"] is True
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    with pytest.raises(UserError, match="r50 has already succeeded"):
        manage.stop(fake_cluster.cluster, manage.find(fake_cluster.cluster, "r50"))


def test_deleting_takes_all_that_was_made_for_the_job_and_nothing_else(fake_cluster):
    submit(fake_cluster, on=load_target("trainjob"))
    # As if the client had been killed before it set the owner references.
    for one in fake_cluster.objects.values():
        one["metadata"].pop("ownerReferences", None)
    is_in(fake_cluster, "PyTorchJob", "Failed", "other")
    fake_cluster.add("ConfigMap", "other", metadata={"labels": labels("other")})
    assert cli.main(["delete", "r50", "--namespace", "team"]) == 0
    assert created(fake_cluster) == [("configmaps", "other"), ("pytorchjobs", "other")]


def test_delete_all_older_deletes_only_old_inactive_jobs(fake_cluster, capsys):
    for name, phase, days in (("a", "Failed", 8), ("b", "Succeeded", 9), ("c", "Running", 9), ("d", "Suspended", 8)):
        creation = datetime.now(timezone.utc) - timedelta(days=days)
        is_in(fake_cluster, "PyTorchJob", phase, name, creationTimestamp=f"{creation:%Y-%m-%dT%H:%M:%SZ}")
    left = [["abcd", "10d"], ["ac d", "205h"], ["c", "8640m"]]
    for names, older in left:
        assert cli.main(["delete", "--all", "--older", older, "--namespace", "team"]) == 0
        assert [name for _, name in created(fake_cluster)] == [*names.replace(" ", "")]
    assert "nothing to delete" in capsys.readouterr().out
    for wrong in (["--older", "7d"], ["a", "--all"], [], ["--all", "--older", "7"], ["--all", "--older", "1w"]):
        assert cli.main(["delete", *wrong, "--namespace", "team"]) == 64
    assert [name for _, name in created(fake_cluster)] == ["c"]


@pytest.mark.parametrize(
    ("context", "namespace", "options"),
    [(None, None, ""), (None, "team", " --namespace team"), ("c", "team", " --namespace team --context c")],
)
def test_commands_to_type_name_the_cluster_as_it_was_named(fake_cluster, context, namespace, options):
    assert Cluster(context, namespace).command("logs", "r50") == f"worldsize logs r50{options}"


def test_what_preflight_refuses_ends_with_2_and_is_not_sent(fake_cluster, capsys):
    # The volume does not exist.
    job = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "absent", "--name", "r50", "--gpus", "0")
    assert cli.main(["train", "digits", *job, "--namespace", "team"]) == 2
    assert "volume absent does not exist" in capsys.readouterr().err
    assert cli.main(["train", "digits", *job, "--check-only", "--namespace", "team"]) == 2
    assert created(fake_cluster) == []
    assert cli.main(["train", "digits", *job, "--no-preflight", "--detach", "--namespace", "team"]) == 0
    assert ("pytorchjobs", "r50") in created(fake_cluster)


def test_a_job_that_somebody_else_submits_at_the_same_moment_is_named_and_left_alone(fake_cluster):
    *first, last = TORCH.render(SPEC)
    fake_cluster.cluster.create(last)  # the PyTorchJob, after this command has looked for one
    before = dict(fake_cluster.objects)
    with pytest.raises(UserError, match=r"PyTorchJob r50 already exists .*: somebody else may be submitting that job"):
        manage.submit(fake_cluster.cluster, replace(SPEC, name="other"), [*first, last])
    assert fake_cluster.objects == before


def test_check_only_shows_every_finding_and_submits_nothing(fake_cluster, capsys):
    fake_cluster.add("PersistentVolumeClaim", "data", spec={"accessModes": ["ReadWriteMany"]}, status={"phase": "Bound"})
    job = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "data", "--gpus", "0")
    assert cli.main(["train", "digits", *job, "--check-only", "--namespace", "team"]) == 0
    assert "volume data" in capsys.readouterr().err
    assert created(fake_cluster) == []


@pytest.mark.parametrize("on", ["pytorchjob", "mpijob"])
def test_a_jobs_selector_finds_its_pods_and_not_those_that_look_into_a_volume_of_its_name(on):
    kind = load_target(on)
    wanted = dict(pair.split("=") for pair in kind.selector("r50").split(",")).items()
    assert wanted <= labels("r50").items()
    assert not wanted <= labels("r50", "files").items() and not wanted <= labels("r50", "data").items()
    assert not wanted <= labels("other").items()


def test_jobs_and_status_show_what_the_cluster_has(fake_cluster, capsys):
    submit(fake_cluster)
    pod = {"metadata": {"labels": labels("r50") | {"training.kubeflow.org/replica-index": "0"}}}
    fake_cluster.add("Pod", "r50-worker-0", **pod, spec={"nodeName": "n1", "containers": []}, status={"phase": "Running"})
    assert cli.main(["jobs", "--namespace", "team"]) == 0
    assert "r50   PyTorchJob  Created  1 pod" in capsys.readouterr().out
    assert cli.main(["status", "r50", "--namespace", "team"]) == 0
    assert "worker-0  Running  0         n1" in capsys.readouterr().out
    assert cli.main(["status", "r51", "--namespace", "team"]) == 64
    assert "no job 'r51' in namespace team; existing jobs: r50" in capsys.readouterr().err


def test_status_shows_why_a_pod_is_missing(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Created")
    job = fake_cluster.objects["/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50"]["metadata"]
    messages = ["exceeded quota: team, used: 1", "exceeded quota: team, used: 2", "exceeded quota: team, used: 1"]
    for number, message in enumerate(messages):
        about = {"kind": "PyTorchJob", "name": "r50", "uid": job["uid"]}
        event = {"involvedObject": about, "type": "Warning", "reason": "FailedCreatePod", "message": message}
        at = datetime.now(timezone.utc) - timedelta(minutes=30 - 10 * number)
        fake_cluster.add("Event", f"r50.{number}", lastTimestamp=f"{at:%Y-%m-%dT%H:%M:%SZ}", **event)
    assert cli.main(["status", "r50", "--namespace", "team"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2:4] == [
        "  FailedCreatePod: exceeded quota: team, used: 2 (20m ago)",
        "  FailedCreatePod: exceeded quota: team, used: 1 (10m ago)",
    ]
    fake_cluster.denied = {("list", "events")}
    assert cli.main(["status", "r50", "--namespace", "team"]) == 0
    assert "FailedCreatePod" not in capsys.readouterr().out


@pytest.mark.parametrize(("on", "replicas"), [("pytorchjob", "pytorchReplicaSpecs"), ("mpijob", "mpiReplicaSpecs")])
def test_progress_is_read_where_the_volume_is(capsys, on, replicas):
    """An MPIJob's launcher has the command, but no volume."""
    options = ("--image", "worldsize:1", "--volume", "data", "--gpus", "0", "--name", "r50")
    assert cli.main(["render", "digits", "--on", on, *options]) == 0
    job = list(yaml.safe_load_all(capsys.readouterr().out))[-1]
    pods = [
        {"metadata": {"name": role}, "spec": replica["template"]["spec"], "status": {"phase": "Running"}}
        for role, replica in job["spec"][replicas].items()
    ]
    asked = []

    class Session:
        def rest(self) -> bytes:
            return b"metrics"

        def close(self) -> None:
            pass

    class Cluster:
        def exec(self, name: str, container: str, command: list[str]) -> Session:
            mounts = next(one for one in pods if one["metadata"]["name"] == name)["spec"]["containers"][0]["volumeMounts"]
            asked.append((command[-1], "/mnt/data" in [mount["mountPath"] for mount in mounts]))
            return Session()

    target = load_target(on)
    assert KubernetesJob(Cluster(), ClusterJob(target, job, None, pods)).metrics() == "metrics"
    assert asked == [("/mnt/data/runs/r50/metrics.jsonl", True)]


def test_a_refused_list_is_not_an_empty_one(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Running")
    fake_cluster.denied = {("list", "pytorchjobs")}
    fake_cluster.served["kubeflow.org/v2beta1"] = []
    for command in (["jobs"], ["status", "r50"], ["delete", "--all"], ["delete", "r50"]):
        assert cli.main([*command, "--namespace", "team"]) in (0, 64)
        assert (
            'PyTorchJobs are not listed, because you have no permission: pytorchjobs is forbidden: User "me" cannot list'
            in (capsys.readouterr().err)
        )
    fake_cluster.denied |= {("list", kind) for kind in ("mpijobs", "trainjobs", "jobs")}
    for command in (["jobs"], ["status", "r50"], ["delete", "--all"], ["delete", "r50"]):
        assert cli.main([*command, "--namespace", "team"]) == 1
        err = capsys.readouterr().err
        assert "you have no permission to list pytorchjobs, trainjobs, jobs in namespace team" in err


@pytest.mark.parametrize("command", [["jobs"], ["stop", "r50"], ["delete", "--all"]])
def test_a_namespace_that_does_not_exist_is_not_an_empty_one(fake_cluster, capsys, command):
    assert cli.main([*command, "--namespace", "nosuch"]) == 64
    assert "namespace nosuch does not exist; pass another --namespace" in capsys.readouterr().err
    fake_cluster.denied = {("get", "namespaces")}
    assert cli.main([*command, "--namespace", "nosuch"]) == (64 if command[0] == "stop" else 0)
    said = "".join(capsys.readouterr())
    assert "does not exist" not in said and ("namespace nosuch" in said or "nothing to delete" in said)


def test_a_kind_that_the_cluster_does_not_have_is_not_a_missing_permission(fake_cluster, capsys):
    """An API server checks permissions first, also for kinds that it does not serve."""
    fake_cluster.served["kubeflow.org/v2beta1"] = []
    fake_cluster.served.pop("trainer.kubeflow.org/v1alpha1")
    fake_cluster.denied = {("list", "mpijobs"), ("list", "trainjobs")}
    assert cli.main(["jobs", "--namespace", "team"]) == 0
    assert capsys.readouterr().err == ""
    fake_cluster.denied.add(("list", "pytorchjobs"))
    assert cli.main(["jobs", "--namespace", "team"]) == 1
    assert "no permission to list pytorchjobs in namespace team" in capsys.readouterr().err


def test_an_anonymous_user_gets_one_error(fake_cluster, capsys):
    answer = fake_cluster.answer

    def anonymous(method, path, query, body):
        if path == "/version":
            return answer(method, path, query, body)
        return 403, {"message": f'User "system:anonymous" cannot {method} {path}', "reason": "Forbidden"}

    fake_cluster.answer = anonymous
    assert cli.main(["jobs", "--namespace", "team"]) == 1
    assert "the API server received no credentials of yours" in capsys.readouterr().err
    assert cli.main(["cluster", "check", "--namespace", "team"]) == 2
    out = capsys.readouterr().out
    assert out.count("received no credentials of yours") == 1 and ", 1 error, " in out


def test_a_check_that_could_not_check_anything_does_not_pass(fake_cluster, capsys):
    answer = fake_cluster.answer
    forbidden = (403, {"message": 'User "me" cannot create resource "everything"', "reason": "Forbidden"})
    fake_cluster.answer = lambda method, path, *more: answer(method, path, *more) if path == "/version" else forbidden
    assert cli.main(["cluster", "check", "--namespace", "team"]) == 2
    assert "nothing could be checked in namespace team" in capsys.readouterr().out


def test_what_the_server_tells_everybody_is_not_a_check(fake_cluster, capsys):
    """Every user may see which kinds a cluster serves."""
    answer = fake_cluster.answer
    forbidden = (403, {"message": 'User "me" cannot create resource "everything"', "reason": "Forbidden"})
    open_to_all = ("/version", "/apis/kubeflow", "/apis/trainer", "/apis/jobset", "/openapi")
    fake_cluster.answer = lambda method, path, *more: (
        answer(method, path, *more) if path.startswith(open_to_all) and "/namespaces/" not in path else forbidden
    )
    assert cli.main(["cluster", "check", "--namespace", "team"]) == 2
    assert "nothing could be checked in namespace team" in capsys.readouterr().out
