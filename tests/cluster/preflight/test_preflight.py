"""Preflight checks: unreachable servers, permissions, unavailable kinds, earlier jobs, and the command."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
import yaml
from urllib3.util import connection

from fake_cluster import PLURALS, FakeCluster, KeepingCluster, gpu_node, node, serve
from findings import SPEC, WITH_SECRET, occupy_gpu, only_problem, preflight
from processes import free_port
from waiting import until
from worldsize import cli
from worldsize.cluster import options
from worldsize.cluster.api.errors import ClusterError
from worldsize.cluster.jobs import manage
from worldsize.cluster.jobs.follow import Follower
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.pod import network_policy
from worldsize.cluster.manifests.spec import Placement
from worldsize.cluster.preflight import runner
from worldsize.cluster.storage import file_pod


@pytest.mark.parametrize("on", TARGETS)
def test_a_healthy_cluster_has_no_problems(fake_cluster, on):
    found = preflight(fake_cluster.cluster, on=on)
    assert {one.level for one in found} == {"ok"}, found
    assert len(found) >= 9
    assert "capacity for 2 pods of cpu 4, memory 16Gi, nvidia.com/gpu 8" in [one.what for one in found]


class GatheringCluster(FakeCluster):
    """After the first two requests, it answers none until 40 wait for an answer at once."""

    def __init__(self):
        super().__init__()
        self.gathering = threading.Barrier(40)

    def answer(self, method, path, query, body):
        if path not in ("/version", "/api/v1/namespaces/team") and not self.gathering.broken:
            with suppress(threading.BrokenBarrierError):
                self.gathering.wait(60)
                self.gathering.abort()  # the others need not wait
        return super().answer(method, path, query, body)


def test_a_slow_server_is_asked_for_everything_at_once(use):
    fake_cluster = GatheringCluster()
    with serve(fake_cluster) as address:
        found = preflight(use({"server": address}), WITH_SECRET, on="trainjob")
    assert only_problem(found).what == "Secret kaggle does not exist in namespace team"


def test_an_unreachable_server_is_one_error_after_one_attempt(use, monkeypatch):
    attempts, connect = [], connection.create_connection
    monkeypatch.setattr(connection, "create_connection", lambda *a, **k: attempts.append(a) or connect(*a, **k))
    address = f"http://127.0.0.1:{free_port()}"
    assert f"no response from the API server {address}" in only_problem(preflight(use({"server": address}))).what
    assert len(attempts) == 1


def test_a_server_lost_during_the_checks_is_one_error(fake_cluster):
    fake_cluster.dead |= {"/api/v1/nodes", "/api/v1/namespaces/team/pods", "/api/v1/namespaces/team/resourcequotas"}
    assert "no response from" in only_problem(preflight(fake_cluster.cluster)).what


def test_a_server_that_is_not_a_kubernetes_api_server(fake_cluster):
    fake_cluster.version = None
    fake_cluster.answer = lambda *_: (200, "welcome")
    assert "is not a Kubernetes API server" in only_problem(preflight(fake_cluster.cluster)).what


def test_without_any_permission_one_error_lists_them_all_and_warnings_name_the_skipped_checks(fake_cluster):
    for plural in PLURALS:
        fake_cluster.denied |= {(verb, plural) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    found = preflight(fake_cluster.cluster, WITH_SECRET)
    errors = [one for one in found if one.level == "error"]
    assert len(errors) == 1
    role = yaml.safe_load(errors[0].remedy.partition("\n")[2])
    assert role["kind"] == "Role" and role["metadata"]["namespace"] == "team"
    rules = {(rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"]) for rule in role["rules"]}
    assert rules["kubeflow.org", "pytorchjobs"] == {"create", "get", "list", "watch", "patch", "delete"}
    assert rules["", "pods"] == {"list", "watch"}
    skipped = [one.what for one in found if "no permission to" in one.what and one.level == "warning"]
    for what in ("check namespace", "check nodes", "check volumes", "check secrets", "check whether the namespace admits"):
        assert any(what in line for line in skipped), what


class RecordingCluster(KeepingCluster):
    """Records, as (verb, resource), the permissions that requests require and those that access reviews ask for."""

    def __init__(self):
        super().__init__()
        self.needed, self.reviewed = set(), set()

    def answer(self, method, path, query, body):
        if (body or {}).get("kind") == "SelfSubjectAccessReview":
            attributes = body["spec"]["resourceAttributes"]
            self.reviewed.add(
                (attributes["verb"], "/".join(filter(None, (attributes["resource"], attributes["subresource"]))))
            )
        else:
            *_, before, last = path.split("/")
            resource = "pods/log" if last == "log" else last if last in PLURALS else before
            verb = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
            if verb == "get" and last in PLURALS:
                verb = "watch" if "watch" in query else "list"
            self.needed.add((verb, resource))
        return super().answer(method, path, query, body)


@pytest.mark.parametrize("on", TARGETS)
def test_preflight_checks_exactly_the_permissions_that_the_commands_require(use, on):
    fake_cluster, kind = RecordingCluster(), load_target(on)
    with serve(fake_cluster) as address:
        cluster = use({"server": address})
        fake_cluster.refuse(kind.kind, 422, "no")
        with pytest.raises(ClusterError):  # also deletes the objects created before the error
            manage.submit(cluster, SPEC, kind.render(SPEC))
        fake_cluster.refusals.clear()
        manage.submit(cluster, SPEC, kind.render(SPEC))
        status = {"phase": "Running", "containerStatuses": [{"name": kind.container, "state": {"running": {}}}]}
        of_the_job = dict(pair.split("=") for pair in kind.selector("r50").split(","))
        fake_cluster.add("Pod", "r50-0", metadata={"labels": of_the_job}, spec={}, status=status)
        events = Follower(cluster, kind, "r50").events()
        until(lambda: [next(events)] and ("get", "pods/log") in fake_cluster.needed, "the log is read")
        watched = {("watch", KINDS[name].plural) for name in (kind.kind, "Pod", "Event")}
        until(lambda: watched <= fake_cluster.needed, "everything is watched")  # each in a thread of its own
        events.close()
        fake_cluster.objects = {path: one for path, one in fake_cluster.objects.items() if not path.endswith("/r50-0")}
        manage.stop(cluster, manage.find(cluster, "r50"))
        manage.delete(cluster, manage.find(cluster, "r50"))
        # Listing queries all kinds, and skips those that the user may not list.
        others = {("list", KINDS[name].plural) for name in ("PyTorchJob", "MPIJob", "TrainJob", "Job") if name != kind.kind}
        by_commands = fake_cluster.needed - others
        preflight(cluster, on=on)
        assert by_commands <= fake_cluster.reviewed <= fake_cluster.needed


def test_missing_permissions_for_one_kind_or_command_do_not_block_the_others(fake_cluster, capsys):
    fake_cluster.denied = {("create", "pods/exec"), ("create", "jobs"), ("get", "mpijobs")}
    fake_cluster.denied |= {("list", "deployments"), ("list", "namespaces")}
    assert runner.check(runner.ClusterCheck(), fake_cluster.cluster) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warning  missing permissions in namespace team: get mpijobs" in lines
    assert "warning  `worldsize cluster files` may not work; missing permissions: create pods/exec" in lines
    assert "warning  `worldsize cluster data fetch` may not work; missing permissions: create jobs" in lines
    assert {one.level for one in preflight(fake_cluster.cluster)} == {"ok"}
    fake_cluster.denied.add(("create", "trainingruntimes"))
    assert runner.check(runner.ClusterCheck(), fake_cluster.cluster) == 0
    fake_cluster.denied.add(("list", "pytorchjobs"))
    assert runner.check(runner.ClusterCheck(), fake_cluster.cluster) == 2


UNUSABLE = {
    "MPIJob v1": (
        "mpijob",
        lambda fake: fake.served.update({"kubeflow.org/v1": ["pytorchjobs", "mpijobs"], "kubeflow.org/v2beta1": []}),
        "MPIJob: the cluster has v1 (training-operator), but v2beta1",
    ),
    "no MPIJob": ("mpijob", lambda fake: fake.served.pop("kubeflow.org/v2beta1"), "no mpijobs in kubeflow.org/v2beta1"),
    "no TrainJob": (
        "trainjob",
        lambda fake: fake.served.pop("trainer.kubeflow.org/v1alpha1"),
        "not installed on this cluster",
    ),
    "no JobSet": ("trainjob", lambda fake: fake.served.pop("jobset.x-k8s.io/v1alpha2"), "JobSet is not installed"),
    "old TrainJob": ("trainjob", lambda fake: fake.trainjob_fields.remove("runtimePatches"), "older than 2.2"),
}


@pytest.mark.parametrize(("on", "plant", "what"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_kind_that_is_not_available(fake_cluster, on, plant, what):
    plant(fake_cluster)
    finding = only_problem(preflight(fake_cluster.cluster, on=on))
    assert what in finding.what
    assert "ask your cluster administrator to install Kubeflow" in finding.remedy


def test_the_requested_runtime_must_exist_before_the_dry_run_of_its_job(fake_cluster):
    with_runtime = replace(SPEC, runtime="torch-distributed")
    fake_cluster.refuse("TrainJob", 400, "the server has tried it")
    fake_cluster.add("ClusterTrainingRuntime", "deepspeed")
    missing = only_problem(preflight(fake_cluster.cluster, with_runtime, on="trainjob"))
    assert (
        missing.what == "ClusterTrainingRuntime torch-distributed does not exist"
        and "existing runtimes: deepspeed" in missing.remedy
    )
    fake_cluster.add("ClusterTrainingRuntime", "torch-distributed")
    assert "the server has tried it" in only_problem(preflight(fake_cluster.cluster, with_runtime, on="trainjob")).what
    # The job's own runtime does not exist yet, so a dry run of the job would be rejected.
    found = preflight(fake_cluster.cluster, on="trainjob")
    assert {one.level for one in found} == {"ok"}
    assert "the server would accept ConfigMap, NetworkPolicy, TrainingRuntime" in [one.what for one in found]


def test_a_grace_period_that_the_trainer_would_drop_is_refused_with_the_required_version(fake_cluster):
    fake_cluster.add("ClusterTrainingRuntime", "torch", metadata={"namespace": None})
    message = "runtimePatches[0].trainingRuntimeSpec.template.spec.terminationGracePeriodSeconds"
    fake_cluster.refuse("TrainJob", 400, f'strict decoding error: unknown field "spec.{message}"')
    problem = only_problem(preflight(fake_cluster.cluster, replace(SPEC, runtime="torch"), "trainjob"))
    assert "--grace with --runtime requires Kubeflow Trainer 2.3 or newer" in problem.remedy


@pytest.mark.parametrize(
    ("on", "name", "flag"),
    [
        ("pytorchjob", "training-operator", "--gang-scheduler-name=volcano"),
        ("mpijob", "mpi-operator", "--gang-scheduling=volcano"),
    ],
)
def test_an_operator_that_ignores_the_volcano_queue_is_a_warning(fake_cluster, on, name, flag):
    fake_cluster.objects["/apis/scheduling.volcano.sh/v1beta1/queues/ml"] = {"metadata": {"name": "ml"}}
    spec = replace(SPEC, placement=Placement(volcano_queue="ml"))

    def with_arguments(*arguments):
        template = {"spec": {"containers": [{"command": ["manager"], "args": [*arguments]}]}}
        body = {"spec": {"template": template}, "status": {"availableReplicas": 1}}
        fake_cluster.add("Deployment", name, metadata={"namespace": "kubeflow"}, **body)
        return preflight(fake_cluster.cluster, spec, on)

    assert f"{name} runs without {flag}, so it ignores --volcano-queue" in only_problem(with_arguments(), "warning").what
    for words in ([flag], flag.split("="), [flag.removeprefix("-")], ["sh", "-c", f"exec manager {flag} -v=1"]):
        assert {one.level for one in with_arguments(*words)} == {"ok"}
    only_problem(with_arguments(flag.replace("volcano", "scheduler-plugins-scheduler")), "warning")
    only_problem(with_arguments(flag.partition("=")[0], "scheduler-plugins-scheduler"), "warning")


def test_the_launcher_of_an_mpijob_needs_capacity_too(fake_cluster):
    for name in ("n0", "n1"):
        fake_cluster.add("Node", **gpu_node(name, 8, cpu="4"))
    assert {one.level for one in preflight(fake_cluster.cluster)} == {"ok"}
    assert "capacity for 1 of 2 pods even on empty nodes" in only_problem(preflight(fake_cluster.cluster, on="mpijob")).what
    fake_cluster.add("Node", **node("n2", cpu="1"))
    assert {one.level for one in preflight(fake_cluster.cluster, on="mpijob")} == {"ok"}


@pytest.mark.parametrize("phase", ["Failed", "Suspended"])
def test_a_failed_or_stopped_job_will_be_replaced(fake_cluster, phase):
    fake_cluster.add("PyTorchJob", "r50", status={"conditions": [{"type": phase, "status": "True"}]})
    fake_cluster.add("ConfigMap", "r50")
    found = preflight(fake_cluster.cluster)
    assert {one.level for one in found} == {"ok"}
    assert f"PyTorchJob r50 is {phase}; it will be replaced, and its run resumes" in [one.what for one in found]


def test_a_suspended_job_in_a_kueue_queue_is_not_replaced(fake_cluster):
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    status = {"conditions": [{"type": "Suspended", "status": "True"}]}
    fake_cluster.add("PyTorchJob", "r50", metadata={"labels": labels}, status=status)
    found = only_problem(preflight(fake_cluster.cluster))
    assert found.level == "error" and "worldsize delete r50 --namespace team ends it" in found.remedy


def test_a_run_may_have_the_name_of_a_volume_with_a_file_pod(fake_cluster):
    existing = file_pod.manifest(file_pod.FilePod("r50", "team", "worldsize:1", "abcde"))
    fake_cluster.add("Pod", metadata=existing["metadata"], spec=existing["spec"], status={"phase": "Running"})
    assert {one.level for one in preflight(fake_cluster.cluster)} == {"ok"}
    selected = network_policy(SPEC)["spec"]["podSelector"]["matchLabels"]
    assert not selected.items() <= existing["metadata"]["labels"].items()


def test_an_elastic_job_needs_capacity_for_its_minimum_number_of_nodes(fake_cluster):
    elastic = replace(SPEC, nodes=3, elastic=(2, 4))
    assert "3 pods requested, current capacity 2" in only_problem(preflight(fake_cluster.cluster, elastic), "warning").what
    assert "capacity for 2 of 3 pods" in only_problem(preflight(fake_cluster.cluster, replace(elastic, elastic=(3, 4)))).what


def test_other_ok_findings(fake_cluster):
    fake_cluster.add("Namespace", "team", metadata={"labels": {"istio-injection": "enabled"}})
    fake_cluster.volume("data", "ReadWriteMany", phase="Pending", storageClassName="lazy")
    fake_cluster.add("StorageClass", "lazy", volumeBindingMode="WaitForFirstConsumer")
    deployment = {"metadata": {"namespace": "kubeflow"}, "status": {"availableReplicas": 1}}
    fake_cluster.add("Deployment", "training-operator", **deployment)
    fake_cluster.denied.add(("list", "pods"))
    found = [one.what for one in preflight(fake_cluster.cluster) if one.level == "ok"]
    assert "namespace team (Istio injects sidecars here; the job's pods opt out)" in found
    assert "volume data will be bound when the first pod uses it" in found
    assert "training-operator is running" in found
    assert "capacity for 2 pods on empty nodes (no permission to list the pods that use them)" in found


def test_trainer_requires_a_newer_kubernetes_than_the_others(fake_cluster):
    fake_cluster.version = "v1.30.4"
    assert {one.level for one in preflight(fake_cluster.cluster)} == {"ok"}
    assert (
        "v1.30.4: Kubeflow's operators require 1.31"
        in only_problem(preflight(fake_cluster.cluster, on="trainjob"), "warning").what
    )


@pytest.mark.parametrize("kind", ["kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"])
def test_both_types_of_pull_secrets_are_accepted(fake_cluster, kind):
    fake_cluster.add("Secret", "pull", data={}, type=kind)
    found = preflight(fake_cluster.cluster, replace(SPEC, pull_secrets=("pull",)))
    assert {one.level for one in found} == {"ok"}


def test_data_may_be_on_a_read_only_volume(fake_cluster):
    fake_cluster.volume("images-data", "ReadOnlyMany")
    assert {one.level for one in preflight(fake_cluster.cluster, replace(SPEC, volumes=("data", "images-data")))} == {"ok"}
    assert (
        "is not writable"
        in only_problem(preflight(fake_cluster.cluster, replace(SPEC, nodes=1, volumes=("images-data", "data")))).what
    )


@pytest.mark.parametrize("on", TARGETS)
def test_a_single_pod_volume_is_enough_for_one_node(fake_cluster, on):
    """The launcher of an MPIJob is a second pod, but it mounts no volume."""
    fake_cluster.volume("data", "ReadWriteOncePod")
    assert {one.level for one in preflight(fake_cluster.cluster, replace(SPEC, nodes=1), on)} == {"ok"}
    assert "from one node only" in only_problem(preflight(fake_cluster.cluster, SPEC, on)).what


# The command ----------------------------------------------------------------------------------------------------------


def test_cluster_check_prints_every_finding_with_its_remedy(fake_cluster, capsys):
    fake_cluster.served.pop("kubeflow.org/v2beta1")
    check_options = runner.ClusterCheck(options.JobOptions(nodes=2, gpus=16, volume=("data",)))
    assert runner.check(check_options, fake_cluster.cluster) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "ok       PyTorchJob (kubeflow.org/v1) is available" in lines
    assert any(line.startswith("warning  MPIJob: not installed on this cluster") for line in lines)
    at = next(
        i for i, line in enumerate(lines) if line.startswith("error    capacity for 0 of 2 pods even on empty nodes: 16 ")
    )
    assert lines[at + 1].startswith("         request less per node")
    assert re.fullmatch(r"\d+ ok, 1 warning, 1 error, \d\.\d s", lines[-1])


def test_cluster_check_checks_only_what_was_requested(fake_cluster, capsys):
    fake_cluster.objects = {path: one for path, one in fake_cluster.objects.items() if not path.startswith("/api/v1/nodes")}
    fake_cluster.add("Node", **node("small", cpu="1"))
    assert runner.check(runner.ClusterCheck(), fake_cluster.cluster) == 0
    assert runner.check(runner.ClusterCheck(on="mpijob"), fake_cluster.cluster) == 0
    out = capsys.readouterr().out
    assert "the server would accept ConfigMap, NetworkPolicy, MPIJob" in out
    assert "0 warnings, 0 errors" in out
    # Capacity for a launcher is only checked with --on mpijob.
    fake_cluster.add("Node", **node("small", pods="1"))
    assert runner.check(runner.ClusterCheck(), fake_cluster.cluster) == 0
    assert runner.check(runner.ClusterCheck(on="mpijob"), fake_cluster.cluster) == 2


def test_cluster_check_rejects_invalid_amounts_like_train(fake_cluster, capsys):
    amounts = ("--nodes", "0", "--memory", "64GB")
    assert cli.main(["cluster", "check", *amounts]) == 64
    refused = capsys.readouterr().err
    assert "--memory '64GB': expected a quantity such as 8, 500m or 16Gi\n  --nodes 0 must be at least 1" in refused
    words = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "data")
    assert cli.main(["train", "digits", *words, *amounts]) == 64
    assert capsys.readouterr().err == refused


def test_quiet_preflight_prints_only_problems(fake_cluster, capsys):
    manifests = load_target("pytorchjob").render(SPEC)
    assert runner.run(fake_cluster.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert runner.run(fake_cluster.cluster, "pytorchjob", SPEC, manifests)
    assert "ok       volume data\n" in capsys.readouterr().err
    occupy_gpu(fake_cluster)
    assert runner.run(fake_cluster.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    assert capsys.readouterr().err.startswith("warning  2 pods requested, current capacity 1")
    fake_cluster.objects.pop("/api/v1/namespaces/team/persistentvolumeclaims/data")
    assert not runner.run(fake_cluster.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    out, err = capsys.readouterr()
    assert out == "" and "error    volume data does not exist in namespace team" in err
