"""Before a run: each fault, in an otherwise healthy cluster, gives its one message and says what to do.

Most clusters here are pretended (`apiserver`): of several nodes, of other versions, with Kueue. The last part asks a real
one.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from apiserver import PLURALS, KeepingWorld, World, gpu_node, node, quota, running, serve
from worldsize import cli
from worldsize.launch import filepod, jobs, preflight, target
from worldsize.launch.answers import ClusterError
from worldsize.launch.cluster import Cluster
from worldsize.launch.follow import Follower
from worldsize.launch.kinds import KINDS
from worldsize.launch.options import Job
from worldsize.launch.pod import network_policy
from worldsize.launch.spec import JobSpec, Placement, Resources, SecretKey

SPEC = JobSpec(
    name="r50",
    namespace="team",
    image="registry.example/worldsize:1",
    recipe="model: {}\n",
    command=("train", "/etc/worldsize/recipe.yaml"),
    nodes=2,
    procs=8,
    resources=Resources(gpus=8, cpu="4", memory="16Gi"),
    volumes=("data",),
)
SIXTEEN_GPUS = replace(SPEC, procs=16, resources=replace(SPEC.resources, gpus=16))
WITH_SECRET = replace(SPEC, secrets=(SecretKey("kaggle", "token", "TOKEN"),))
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
LEAVING = {"deletionTimestamp": "2026-11-20T00:00:00Z"}


@pytest.fixture
def world(use):
    """A healthy `World`; world.cluster talks to it."""
    world = World()
    with serve(world) as address:
        world.cluster = use({"server": address})
        yield world


def look(cluster, spec=SPEC, on="pytorchjob"):
    """All findings for this job."""
    kind = target.load(on)
    return list(preflight.examine(preflight.Context(cluster, (kind.kind,), spec, tuple(kind.render(spec)))))


def the_one(found, level="error"):
    """The only finding that is not ok."""
    bad = [one for one in found if one.level != "ok"]
    assert [one.level for one in bad] == [level], bad
    return bad[0]


@pytest.mark.parametrize("on", target.TARGETS)
def test_a_healthy_cluster_has_nothing_to_be_said_against(world, on):
    found = look(world.cluster, on=on)
    assert {one.level for one in found} == {"ok"}, found
    assert len(found) >= 9
    assert "room for 2 pods of cpu 4, memory 16Gi, nvidia.com/gpu 8" in [one.what for one in found]


@dataclass
class Fault:
    """What is wrong with the world or the job, and what is said of it."""

    what: str  # a pattern
    remedy: str = ""
    plant: Callable[[World], object] = id
    spec: JobSpec = SPEC


def placed(**changes):
    return replace(SPEC, placement=Placement(**changes))


def on_volume(name):
    return replace(SPEC, volumes=(name,))


def with_kueue(world, **queue):
    world.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    world.add("LocalQueue", "team", **queue)


def labelled(world, **labels):
    for name in ("n0", "n1"):
        world.add("Node", **gpu_node(name, 8, labels={key.replace("__", "/"): value for key, value in labels.items()}))


def tainted(world):
    for name in ("n0", "n1"):
        world.add("Node", **gpu_node(name, 8, taints=[TAINT]))


def pending(world, storage_class=None, mode="Immediate"):
    """Volume "late", not bound yet."""
    spec = {"storageClassName": storage_class} if storage_class else {}
    world.volume("late", "ReadWriteMany", phase="Pending", **spec)
    world.add("StorageClass", "standard", volumeBindingMode=mode)


def job(kind, condition=None, **metadata):
    """Plants a job of the same name."""
    conditions = [{"type": condition, "status": "True"}] if condition else []
    return lambda world: world.add(kind, "r50", metadata=metadata, status={"conditions": conditions})


def limited(world):
    made = quota({"requests.nvidia.com/gpu": "16"}, {"requests.nvidia.com/gpu": "8"})
    world.add("ResourceQuota", "gpus", spec=made["spec"], status=made["status"])


ERRORS = {
    "no namespace": Fault(
        "there is no namespace team; there are: other",
        "kubectl create namespace team",
        lambda world: [world.objects.pop("/api/v1/namespaces/team"), world.add("Namespace", "other")],
    ),
    "namespace leaves": Fault(
        "namespace team is being deleted",
        "--namespace",
        lambda world: world.add("Namespace", "team", status={"phase": "Terminating"}),
    ),
    "no operator": Fault(
        "PyTorchJob: the cluster does not know it",
        "training-operator 1.9; this cluster has MPIJob and TrainJob: --on mpijob",
        lambda world: world.served.pop("kubeflow.org/v1"),
    ),
    "operator is down": Fault(
        "training-operator has no pod that is ready",
        "kubectl -n kubeflow describe",
        lambda world: world.add("Deployment", "training-operator", metadata={"namespace": "kubeflow"}),
    ),
    "few rights": Fault(
        "your role in team may not create, watch pytorchjobs; get pods/log",
        "resources: [pytorchjobs]",
        lambda world: world.denied.update({("create", "pytorchjobs"), ("watch", "pytorchjobs"), ("get", "pods/log")}),
    ),
    "no right to logs": Fault(
        "your role in team may not get pods/log",
        "resources: [pods/log]",
        lambda world: world.denied.add(("get", "pods/log")),
    ),
    "no volume": Fault(
        "there is no volume imagenet in team; there are: data",
        "worldsize cluster volume create imagenet",
        spec=on_volume("imagenet"),
    ),
    "volume of one node": Fault(
        r"volume data can be written from one node only \(ReadWriteOnce\); the job has 2",
        "--access rwx",
        lambda world: world.volume("data", "ReadWriteOnce"),
    ),
    "volume of one node of several later": Fault(
        r"volume data can be written from one node only \(ReadWriteOnce\); the job has 4",
        "or use --nodes 1 without --elastic",
        lambda world: world.volume("data", "ReadWriteOnce"),
        replace(SPEC, nodes=1, elastic=(1, 4)),
    ),
    "volume to read": Fault(
        r"volume data \(ReadOnlyMany\) cannot be written",
        "--access rwx",
        lambda world: world.volume("data", "ReadOnlyMany"),
        replace(SPEC, nodes=1),
    ),
    "volume leaves": Fault(
        "volume data is being deleted",
        "--volume",
        lambda world: world.objects["/api/v1/namespaces/team/persistentvolumeclaims/data"]["metadata"].update(LEAVING),
    ),
    "volume is lost": Fault(
        "volume data has lost its storage",
        "ask whoever runs the cluster",
        lambda world: world.volume("data", "ReadWriteMany", phase="Lost"),
    ),
    "volume of no class": Fault("volume late has no StorageClass and is not bound", "--class", pending, on_volume("late")),
    "volume of a wrong class": Fault(
        "volume late names StorageClass fast, which does not exist",
        "there are: standard",
        lambda world: pending(world, "fast"),
        on_volume("late"),
    ),
    "volume is not bound": Fault(
        "volume late is not bound yet",
        "kubectl -n team describe pvc late",
        lambda world: pending(world, "standard"),
        on_volume("late"),
    ),
    "no Secret": Fault(
        "there is no Secret kaggle in team", "worldsize cluster secret create kaggle --from-env token", spec=WITH_SECRET
    ),
    "no key": Fault(
        "Secret kaggle has no key token; its keys: name, word",
        "--secret kaggle/KEY",
        lambda world: world.add("Secret", "kaggle", data={"name": "", "word": ""}),
        WITH_SECRET,
    ),
    "no pull secret": Fault(
        "there is no Secret pull",
        "kubectl -n team create secret docker-registry pull",
        spec=replace(SPEC, pull_secrets=("pull",)),
    ),
    "Secret of another type": Fault(
        "Secret pull is no pull secret: its type is Opaque",
        "docker-registry",
        lambda world: world.add("Secret", "pull", data={}, type="Opaque"),
        replace(SPEC, pull_secrets=("pull",)),
    ),
    "no Kueue": Fault("--queue team: Kueue is not installed", "leave --queue out", spec=placed(queue="team")),
    "no queue": Fault("there is no LocalQueue a in team", "there are team", with_kueue, placed(queue="a")),
    "no Volcano queue": Fault("there is no Volcano queue a", "kubectl get queues", spec=placed(volcano_queue="a")),
    "too many GPUs": Fault(
        "room for 0 of 2 pods even on empty nodes: 16 nvidia.com/gpu per node asked for; the largest node that would take "
        r"this pod has 8 free \(of 8\)",
        "--gpus",
        spec=SIXTEEN_GPUS,
    ),
    "too many nodes": Fault(
        "room for 2 of 3 pods even on empty nodes: each takes cpu 4", "--gpus", spec=replace(SPEC, nodes=3)
    ),
    "other GPUs": Fault(
        "no node offers amd.com/gpu; they offer nvidia.com/gpu",
        "--gpus",
        spec=replace(SPEC, resources=replace(SPEC.resources, gpu_resource="amd.com/gpu")),
    ),
    "no such node": Fault(
        "none of the 2 nodes would take this pod: 2 are not labelled zone=x",
        "--node-selector",
        spec=placed(node_selector=(("zone", "x"),)),
    ),
    "tainted": Fault("2 are tainted nvidia.com/gpu=present:NoSchedule", "--toleration", tainted),
    "quota": Fault(
        "quota gpus does not allow the whole job: requests.nvidia.com/gpu: 16 asked for, 8 of 16 in use",
        "worldsize jobs",
        limited,
    ),
    "Pod Security": Fault(
        "would refuse the job's pods: .*violates PodSecurity",
        "--resource",
        lambda world: world.refuse("Pod", 403, 'pods "r50" is forbidden: violates PodSecurity "restricted:latest"'),
    ),
    "policy": Fault(
        "would refuse the job's pods: .*no team label",
        "",
        lambda world: world.refuse("Pod", 403, "admission webhook denied the request: no team label"),
    ),
    "webhook is away": Fault(
        "the server would refuse PyTorchJob r50: Internal error: failed calling webhook",
        "the operator's webhook does not answer",
        lambda world: world.refuse("PyTorchJob", 500, 'Internal error: failed calling webhook "v": no endpoints'),
    ),
    "job runs": Fault("PyTorchJob r50 is Running already", "worldsize logs r50", job("PyTorchJob", "Running")),
    "job has succeeded": Fault("MPIJob r50 is Succeeded already", "worldsize delete r50", job("MPIJob", "Succeeded")),
    "job leaves": Fault("TrainJob r50 is being deleted", "wait a moment", job("TrainJob", **LEAVING)),
    "job's remains": Fault(
        "there is no job r50, but objects of that name: ConfigMap",
        "kubectl -n team delete configmaps/r50",
        lambda world: world.add("ConfigMap", "r50", metadata={"labels": {"app.kubernetes.io/managed-by": "worldsize"}}),
    ),
    "somebody else's": Fault(
        "there is no job r50, but objects of that name: NetworkPolicy",
        "choose another --name",
        lambda world: world.add("NetworkPolicy", "r50"),
    ),
    "pods leave": Fault(
        "pods of an earlier r50 have not left yet: w0",
        "wait a moment",
        lambda world: world.add("Pod", **running("n0", name="w0", run="r50")),
    ),
}


@pytest.mark.parametrize("fault", ERRORS.values(), ids=ERRORS)
def test_each_fault_gives_one_message_with_a_remedy(world, fault):
    fault.plant(world)
    finding = the_one(look(world.cluster, fault.spec))
    assert re.search(fault.what, finding.what)
    assert fault.remedy in finding.remedy


def busy(world):
    world.add("Pod", **running("n0", gpu=1))


WARNINGS = {
    "old Kubernetes": Fault(
        "v1.27.3-gke.1: .* ask for 1.28 or newer", plant=lambda world: setattr(world, "version", "v1.27.3-gke.1")
    ),
    "busy": Fault(
        "2 pods asked for, and room for 1 at present: each takes cpu 4, memory 16Gi, nvidia.com/gpu 8; of the other nodes "
        r"the largest has 7 nvidia.com/gpu free \(of 8\)",
        "wait until other work ends",
        busy,
    ),
    "autoscaler": Fault(
        "16 nvidia.com/gpu per node asked for",
        "the cluster may add nodes",
        lambda world: world.add("ConfigMap", "cluster-autoscaler-status", metadata={"namespace": "kube-system"}),
        SIXTEEN_GPUS,
    ),
    "nodes cannot be seen": Fault(
        "cannot look at nodes: your role may not list nodes", plant=lambda world: world.denied.add(("list", "nodes"))
    ),
    "Secrets cannot be seen": Fault(
        "cannot look at secrets: your role may not get secrets",
        plant=lambda world: world.denied.add(("get", "secrets")),
        spec=WITH_SECRET,
    ),
    "old label": Fault(
        "--node-selector failure-domain.beta.kubernetes.io/region: deprecated",
        "topology.kubernetes.io/region=LAS1",
        lambda world: labelled(world, **{"failure-domain.beta.kubernetes.io/region": "LAS1"}),
        placed(node_selector=(("failure-domain.beta.kubernetes.io/region", "LAS1"),)),
    ),
    "queue rests": Fault(
        "LocalQueue team takes no jobs at present: no ClusterQueue",
        plant=lambda world: with_kueue(
            world, status={"conditions": [{"type": "Active", "status": "False", "message": "no ClusterQueue"}]}
        ),
        spec=placed(queue="team"),
    ),
    "no trial": Fault("cannot be tried", plant=lambda w: w.refuse("Pod", 400, 'webhook "x" does not support dry run')),
}


@pytest.mark.parametrize("fault", WARNINGS.values(), ids=WARNINGS)
def test_what_may_come_right_is_a_warning(world, fault):
    fault.plant(world)
    finding = the_one(look(world.cluster, fault.spec), "warning")
    assert re.search(fault.what, finding.what)
    assert fault.remedy in finding.remedy


def test_a_busy_cluster_still_gives_all_answers_within_three_seconds(world):
    world.latency = 0.15
    begin = time.monotonic()
    found = look(world.cluster, WITH_SECRET, on="trainjob")
    assert time.monotonic() - begin < 3.0
    assert the_one(found).what == "there is no Secret kaggle in team"
    # One after another they would take far longer.
    assert world.requests * world.latency > 5.0


def test_a_server_that_is_away_is_one_error(use):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    begin = time.monotonic()
    assert f"the API server {address} does not answer" in the_one(look(use({"server": address}))).what
    assert time.monotonic() - begin < 3.0


def test_a_server_that_goes_away_is_one_error(world):
    world.dead |= {"/api/v1/nodes", "/api/v1/namespaces/team/pods", "/api/v1/namespaces/team/resourcequotas"}
    assert "does not answer" in the_one(look(world.cluster)).what


def test_a_server_of_something_else(world):
    world.version = None
    world.answer = lambda *_: (200, "welcome")
    assert "is no Kubernetes API server" in the_one(look(world.cluster)).what


def test_whoever_may_do_nothing_is_told_so_once_and_what_was_not_looked_at(world):
    for plural in PLURALS:
        world.denied |= {(verb, plural) for verb in ("get", "list", "watch", "create", "patch", "delete")}
    found = look(world.cluster, WITH_SECRET)
    errors = [one for one in found if one.level == "error"]
    assert len(errors) == 1
    role = yaml.safe_load(errors[0].remedy.partition("\n")[2])
    assert role["kind"] == "Role" and role["metadata"]["namespace"] == "team"
    rules = {(rule["apiGroups"][0], rule["resources"][0]): set(rule["verbs"]) for rule in role["rules"]}
    assert rules["kubeflow.org", "pytorchjobs"] == {"create", "get", "list", "watch", "patch", "delete"}
    assert rules["", "pods"] == {"list", "watch"}
    unseen = [one.what for one in found if "your role may not" in one.what and one.level == "warning"]
    for what in ("look at namespace", "look at nodes", "look at volumes", "look at secrets", "be tried"):
        assert any(what in line for line in unseen), what


class NotingWorld(KeepingWorld):
    """Keeps the rights that requests needed, and those that a review was asked for, as (verb, resource)."""

    def __init__(self):
        super().__init__()
        self.needed, self.reviewed = set(), set()

    def answer(self, method, path, query, body):
        if (body or {}).get("kind") == "SelfSubjectAccessReview":
            asked = body["spec"]["resourceAttributes"]
            self.reviewed.add((asked["verb"], "/".join(filter(None, (asked["resource"], asked["subresource"])))))
        else:
            *_, before, last = path.split("/")
            resource = "pods/log" if last == "log" else last if last in PLURALS else before
            verb = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[method]
            if verb == "get" and last in PLURALS:
                verb = "watch" if "watch" in query else "list"
            self.needed.add((verb, resource))
        return super().answer(method, path, query, body)


@pytest.mark.parametrize("on", target.TARGETS)
def test_the_rights_that_are_looked_at_are_those_that_commands_need(use, on):
    world, kind = NotingWorld(), target.load(on)
    with serve(world) as address:
        cluster = use({"server": address})
        world.refuse(kind.kind, 422, "no")
        with pytest.raises(ClusterError):  # and what was sent before it is taken back
            jobs.submit(cluster, SPEC, kind.render(SPEC))
        world.refusals.clear()
        jobs.submit(cluster, SPEC, kind.render(SPEC))
        status = {"phase": "Running", "containerStatuses": [{"name": kind.container, "state": {"running": {}}}]}
        of_the_job = dict(pair.split("=") for pair in kind.selector("r50").split(","))
        world.add("Pod", "r50-0", metadata={"labels": of_the_job}, spec={}, status=status)
        events = Follower(cluster, kind, "r50").events()
        wait_for(lambda: [next(events)] and ("get", "pods/log") in world.needed)
        events.close()
        world.objects = {path: one for path, one in world.objects.items() if not path.endswith("/r50-0")}
        jobs.stop(cluster, jobs.find(cluster, "r50"))
        jobs.delete(cluster, jobs.find(cluster, "r50"))
        # Listing goes through all kinds, and leaves out what the user may not see.
        others = {("list", KINDS[name].plural) for name in ("PyTorchJob", "MPIJob", "TrainJob", "Job") if name != kind.kind}
        by_commands = world.needed - others
        look(cluster, on=on)
        assert by_commands <= world.reviewed <= world.needed


def test_rights_that_one_kind_or_one_command_lacks_forbid_no_other(world, capsys):
    world.denied = {("create", "pods/exec"), ("list", "deployments"), ("list", "namespaces"), ("get", "mpijobs")}
    assert preflight.check(preflight.ClusterCheck(), world.cluster) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warning  your role in team may not get mpijobs" in lines
    assert "warning  `worldsize cluster files` may not work: your role may not create pods/exec" in lines
    assert {one.level for one in look(world.cluster)} == {"ok"}
    world.denied.add(("create", "trainingruntimes"))
    assert preflight.check(preflight.ClusterCheck(), world.cluster) == 0
    world.denied.add(("list", "pytorchjobs"))
    assert preflight.check(preflight.ClusterCheck(), world.cluster) == 2


UNUSABLE = {
    "MPIJob v1": (
        "mpijob",
        lambda world: world.served.update({"kubeflow.org/v1": ["pytorchjobs", "mpijobs"], "kubeflow.org/v2beta1": []}),
        "MPIJob: the cluster has only v1, training-operator's",
    ),
    "no MPIJob": ("mpijob", lambda w: w.served.pop("kubeflow.org/v2beta1"), "no mpijobs in kubeflow.org/v2beta1"),
    "no TrainJob": ("trainjob", lambda w: w.served.pop("trainer.kubeflow.org/v1alpha1"), "the cluster does not know it"),
    "no JobSet": ("trainjob", lambda w: w.served.pop("jobset.x-k8s.io/v1alpha2"), "there is no JobSet"),
    "old TrainJob": ("trainjob", lambda w: w.trainjob_fields.remove("runtimePatches"), "older than 2.2"),
}


@pytest.mark.parametrize(("on", "plant", "what"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_kind_that_cannot_be_used(world, on, plant, what):
    plant(world)
    finding = the_one(look(world.cluster, on=on))
    assert what in finding.what
    assert "ask whoever runs the cluster to install Kubeflow" in finding.remedy


def test_the_runtime_that_is_named_must_be_there_and_only_then_is_its_job_tried(world):
    named = replace(SPEC, runtime="torch-distributed")
    world.refuse("TrainJob", 400, "the server has tried it")
    world.add("ClusterTrainingRuntime", "deepspeed")
    missing = the_one(look(world.cluster, named, on="trainjob"))
    assert missing.what == "there is no ClusterTrainingRuntime torch-distributed" and "there are deepspeed" in missing.remedy
    world.add("ClusterTrainingRuntime", "torch-distributed")
    assert "the server has tried it" in the_one(look(world.cluster, named, on="trainjob")).what
    # A runtime that comes with the job is not there yet, and so the job would be refused.
    found = look(world.cluster, on="trainjob")
    assert {one.level for one in found} == {"ok"}
    assert "the server would accept ConfigMap, NetworkPolicy, TrainingRuntime" in [one.what for one in found]


def test_the_launcher_of_an_mpijob_needs_a_place_too(world):
    for name in ("n0", "n1"):
        world.add("Node", **gpu_node(name, 8, cpu="4"))
    assert {one.level for one in look(world.cluster)} == {"ok"}
    assert "room for 1 of 2 pods even on empty nodes" in the_one(look(world.cluster, on="mpijob")).what
    world.add("Node", **node("n2", cpu="1"))
    assert {one.level for one in look(world.cluster, on="mpijob")} == {"ok"}


@pytest.mark.parametrize("phase", ["Failed", "Suspended"])
def test_a_job_that_failed_or_was_stopped_makes_way(world, phase):
    world.add("PyTorchJob", "r50", status={"conditions": [{"type": phase, "status": "True"}]})
    world.add("ConfigMap", "r50")
    found = look(world.cluster)
    assert {one.level for one in found} == {"ok"}
    assert f"PyTorchJob r50 is {phase}; it makes way, and its run goes on" in [one.what for one in found]


def test_a_job_in_kueues_queue_does_not(world):
    labels = {"kueue.x-k8s.io/queue-name": "team"}
    status = {"conditions": [{"type": "Suspended", "status": "True"}]}
    world.add("PyTorchJob", "r50", metadata={"labels": labels}, status=status)
    found = the_one(look(world.cluster))
    assert found.level == "error" and "worldsize delete r50 --namespace team ends it" in found.remedy


def test_a_run_may_be_called_like_a_volume_that_somebody_looks_into(world):
    look_into = filepod.manifest(filepod.FilePod("r50", "team", "worldsize:1", "abcde"))
    world.add("Pod", metadata=look_into["metadata"], spec=look_into["spec"], status={"phase": "Running"})
    assert {one.level for one in look(world.cluster)} == {"ok"}
    chosen = network_policy(SPEC)["spec"]["podSelector"]["matchLabels"]
    assert not chosen.items() <= look_into["metadata"]["labels"].items()


def test_an_elastic_job_needs_room_for_its_fewest_nodes(world):
    elastic = replace(SPEC, nodes=3, elastic=(2, 4))
    assert "3 pods asked for, and room for 2 at present" in the_one(look(world.cluster, elastic), "warning").what
    assert "room for 2 of 3 pods" in the_one(look(world.cluster, replace(elastic, elastic=(3, 4)))).what


def test_other_things_worth_saying(world):
    world.add("Namespace", "team", metadata={"labels": {"istio-injection": "enabled"}})
    world.volume("data", "ReadWriteMany", phase="Pending", storageClassName="lazy")
    world.add("StorageClass", "lazy", volumeBindingMode="WaitForFirstConsumer")
    there = {"metadata": {"namespace": "kubeflow"}, "status": {"availableReplicas": 1}}
    world.add("Deployment", "training-operator", **there)
    world.denied.add(("list", "pods"))
    said = [one.what for one in look(world.cluster) if one.level == "ok"]
    assert "namespace team (Istio adds sidecars here; the job's pods opt out)" in said
    assert "volume data will be bound when the first pod needs it" in said
    assert "training-operator runs" in said
    assert "room for 2 pods on empty nodes (your role may not see what runs on them)" in said


def test_trainer_asks_for_a_newer_kubernetes_than_the_others(world):
    world.version = "v1.30.4"
    assert {one.level for one in look(world.cluster)} == {"ok"}
    assert "v1.30.4: Kubeflow's operators ask for 1.31" in the_one(look(world.cluster, on="trainjob"), "warning").what


def test_data_may_be_on_a_volume_that_can_only_be_read(world):
    world.volume("pictures", "ReadOnlyMany")
    assert {one.level for one in look(world.cluster, replace(SPEC, volumes=("data", "pictures")))} == {"ok"}
    assert "cannot be written" in the_one(look(world.cluster, replace(SPEC, nodes=1, volumes=("pictures", "data")))).what


@pytest.mark.parametrize("on", target.TARGETS)
def test_a_volume_of_one_pod_is_enough_for_one_node(world, on):
    """An MPIJob's launcher is a second pod, but mounts no volume."""
    world.volume("data", "ReadWriteOncePod")
    assert {one.level for one in look(world.cluster, replace(SPEC, nodes=1), on)} == {"ok"}
    assert "from one node only" in the_one(look(world.cluster, SPEC, on)).what


def test_a_quota_that_admission_names_too_is_told_once(world):
    limited(world)
    world.refuse("Pod", 403, "exceeded quota: gpus")
    assert "quota gpus does not allow the whole job" in the_one(look(world.cluster)).what
    world.objects.pop("/api/v1/namespaces/team/resourcequotas/gpus")
    assert "would refuse the job's pods: exceeded quota: gpus" in the_one(look(world.cluster)).what


# The command ----------------------------------------------------------------------------------------------------------


def test_cluster_check_prints_a_line_for_each_finding_and_the_remedies(world, capsys):
    world.served.pop("kubeflow.org/v2beta1")
    asked = preflight.ClusterCheck(Job(nodes=2, gpus=16, volume=("data",)))
    assert preflight.check(asked, world.cluster) == 2
    lines = capsys.readouterr().out.splitlines()
    assert "ok       PyTorchJob (kubeflow.org/v1) can be used" in lines
    assert any(line.startswith("warning  MPIJob: the cluster does not know it") for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("error    room for 0 of 2 pods even on empty nodes: 16 "))
    assert lines[at + 1].startswith("         ask for less on each node")
    assert re.fullmatch(r"\d+ ok, 1 warning, 1 error, \d\.\d s", lines[-1])


def test_cluster_check_asks_for_nothing_that_was_not_asked_for(world, capsys):
    world.objects = {path: one for path, one in world.objects.items() if not path.startswith("/api/v1/nodes")}
    world.add("Node", **node("small", cpu="1"))
    assert preflight.check(preflight.ClusterCheck(), world.cluster) == 0
    assert preflight.check(preflight.ClusterCheck(on="mpijob"), world.cluster) == 0
    out = capsys.readouterr().out
    assert "the server would accept ConfigMap, NetworkPolicy, MPIJob" in out
    assert "0 warnings, 0 errors" in out
    # A launcher is needed where an MPIJob is asked about, and not in general.
    world.add("Node", **node("small", pods="1"))
    assert preflight.check(preflight.ClusterCheck(), world.cluster) == 0
    assert preflight.check(preflight.ClusterCheck(on="mpijob"), world.cluster) == 2


def test_cluster_check_refuses_amounts_as_train_does(world, capsys):
    amounts = ("--nodes", "0", "--memory", "64GB")
    assert cli.main(["cluster", "check", *amounts]) == 64
    refused = capsys.readouterr().err
    assert "--memory '64GB': a quantity such as 8, 500m, 16Gi\n  --nodes 0: at least 1" in refused
    words = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "data")
    assert cli.main(["train", "digits", *words, *amounts]) == 64
    assert capsys.readouterr().err == refused


def test_before_a_job_only_what_is_wrong_is_said(world, capsys):
    manifests = target.load("pytorchjob").render(SPEC)
    assert preflight.run(world.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert preflight.run(world.cluster, "pytorchjob", SPEC, manifests)
    assert "ok       volume data\n" in capsys.readouterr().err
    busy(world)
    assert preflight.run(world.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    assert capsys.readouterr().err.startswith("warning  2 pods asked for, and room for 1")
    world.objects.pop("/api/v1/namespaces/team/persistentvolumeclaims/data")
    assert not preflight.run(world.cluster, "pytorchjob", SPEC, manifests, quiet=True)
    out, err = capsys.readouterr()
    assert out == "" and "error    there is no volume data in team" in err


# A real cluster -------------------------------------------------------------------------------------------------------


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def tiny(cluster, **changes):
    """A job that fits everywhere, and its volume; it is never sent."""
    small = {"procs": 1, "resources": Resources(cpu="50m", memory="64Mi", shm="16Mi")}
    claim(cluster, "data", "ReadWriteMany")
    return replace(SPEC, namespace=cluster.namespace, **{**small, **changes})


def claim(cluster, name, mode):
    make(cluster, "PersistentVolumeClaim", name, accessModes=[mode], resources={"requests": {"storage": "1Mi"}})
    wait_for(lambda: cluster.get("PersistentVolumeClaim", name)["status"]["phase"] == "Bound")


def make(cluster, kind, name, **spec):
    cluster.create(
        {"apiVersion": KINDS[kind].group_version, "kind": kind, "metadata": {"name": name}}
        | ({"spec": spec} if spec else {})
    )


def limit_all(cluster, **hard):
    make(cluster, "ResourceQuota", "bounds", hard={key.replace("__", "."): value for key, value in hard.items()})
    wait_for(lambda: cluster.get("ResourceQuota", "bounds").get("status", {}).get("hard"))


def limit_each(cluster, kind, **bounds):
    make(cluster, "LimitRange", "bounds", limits=[{"type": kind, **bounds}])


def enforce(cluster, level):
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.patch("Namespace", cluster.namespace, {"metadata": {"labels": labels}})


def with_key(cluster):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kaggle"}, "stringData": {"name": "me"}}
    cluster.create(secret)


@pytest.mark.cluster
@pytest.mark.parametrize("on", target.TARGETS)
def test_a_job_that_can_run_is_found_in_order_within_three_seconds(cluster, on):
    enforce(cluster, "restricted")
    spec = tiny(cluster)
    begin = time.monotonic()
    found = look(cluster, spec, on)
    assert time.monotonic() - begin < 3.0
    assert {one.level for one in found} == {"ok"}, found
    # Looking has left nothing behind.
    assert cluster.list("Pod") == cluster.list("NetworkPolicy") == cluster.list(target.load(on).kind) == []
    assert cluster.get("ConfigMap", spec.name) is None


SECRET = {"secrets": (SecretKey("kaggle", "token", "TOKEN"),)}
REAL = {
    "no volume": (None, {"volumes": ("imagenet",)}, "there is no volume imagenet"),
    "volume of one node": (
        lambda cluster: claim(cluster, "one", "ReadWriteOnce"),
        {"volumes": ("one",)},
        "volume one can be written from one node only",
    ),
    "no Secret": (None, SECRET, "there is no Secret kaggle"),
    "no key": (with_key, SECRET, "Secret kaggle has no key token; its keys: name"),
    "quota": (
        lambda cluster: limit_all(cluster, pods="1"),
        {},
        "quota bounds does not allow the whole job: pods: 2 asked for, 0 of 1 in use",
    ),
    "quota below one pod": (
        lambda cluster: limit_all(cluster, requests__memory="32Mi"),
        {},
        "quota bounds does not allow the whole job: requests.memory: 128Mi asked for, 0Mi of 32Mi in use",
    ),
    "quota on what is not asked for": (
        lambda cluster: limit_all(cluster, requests__cpu="1"),
        {"resources": Resources(memory="64Mi", shm="16Mi")},
        "failed quota: bounds: must specify requests.cpu",
    ),
    "upper limit": (
        lambda cluster: limit_each(cluster, "Container", max={"cpu": "40m"}),
        {},
        "maximum cpu usage per Container is 40m",
    ),
    "lower limit": (
        lambda cluster: limit_each(cluster, "Pod", min={"memory": "1Gi"}),
        {},
        "minimum memory usage per Pod is 1Gi",
    ),
    "GPUs": (None, {"procs": 512, "resources": Resources(gpus=512)}, "room for 0 of 2 pods even on empty nodes: "),
    "priority": (None, {"placement": Placement(priority="none-such")}, "no PriorityClass with name none-such was found"),
    "no such node": (None, {"placement": Placement(node_selector=(("zone", "none"),))}, "not labelled zone=none"),
    "somebody else's": (
        lambda cluster: cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "r50"}}),
        {},
        "there is no job r50, but objects of that name: ConfigMap",
    ),
}


@pytest.mark.cluster
@pytest.mark.parametrize(("plant", "changes", "what"), REAL.values(), ids=REAL)
def test_each_fault_on_a_real_cluster(cluster, plant, changes, what):
    spec = tiny(cluster, **changes)
    if plant:
        plant(cluster)
    finding = the_one(look(cluster, spec))
    assert what in finding.what and finding.remedy


@pytest.mark.cluster
def test_memory_that_may_be_locked_is_refused_under_restricted(cluster):
    rdma = Resources(cpu="50m", memory="64Mi", shm="16Mi", devices=(("rdma/ib", 1),))
    spec = tiny(cluster, resources=rdma)
    enforce(cluster, "restricted")
    errors = [one for one in look(cluster, spec) if one.level == "error"]
    assert any("no node offers rdma/ib" in one.what for one in errors)
    refused = next(one for one in errors if "violates PodSecurity" in one.what)
    assert "IPC_LOCK" in refused.what and "--resource" in refused.remedy


@pytest.mark.cluster
def test_a_runtime_that_is_not_there(cluster):
    finding = the_one(look(cluster, tiny(cluster, runtime="none-such"), "trainjob"))
    assert finding.what == "there is no ClusterTrainingRuntime none-such"


@pytest.mark.cluster
def test_a_namespace_that_is_not_there(cluster):
    missing = Cluster(namespace=f"{cluster.namespace}-not")
    assert f"there is no namespace {missing.namespace}; there are: " in the_one(look(missing)).what


@pytest.mark.cluster
def test_an_object_that_a_webhook_refuses(cluster):
    kind = target.load("pytorchjob")
    spec = tiny(cluster)
    *others, job = kind.render(spec)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "other"
    found = preflight.examine(preflight.Context(cluster, (kind.kind,), spec, (*others, job)))
    assert "the server would refuse PyTorchJob r50: " in the_one(list(found)).what


@pytest.mark.cluster
def test_a_job_of_that_name_that_has_not_ended(cluster):
    spec = tiny(cluster)
    for manifest in target.load("pytorchjob").render(spec):
        cluster.create(manifest)
    finding = the_one([one for one in look(cluster, spec, "mpijob") if "room" not in one.what])
    assert re.match(r"PyTorchJob r50 is (Created|Pending|Running) already", finding.what)


@pytest.mark.cluster
def test_a_user_with_few_rights(cluster, use):
    spec = tiny(cluster)
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{cluster.namespace}"
    few = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": "few"}}
    rules = [{"apiGroups": [""], "resources": ["pods", "persistentvolumeclaims"], "verbs": ["get", "list"]}]
    cluster.request("POST", f"{rbac}/roles", body=few | {"kind": "Role", "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": cluster.namespace}
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "few"}
    binding = few | {"kind": "RoleBinding", "roleRef": ref, "subjects": [subject]}
    cluster.request("POST", f"{rbac}/rolebindings", body=binding)
    account = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/default"
    asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.request("POST", f"{account}/token", body=asked)["status"]["token"]
    server = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]
    found = look(use(server, cluster.namespace, token=token), spec)
    errors = [one for one in found if one.level == "error"]
    assert [one.what.partition(" may not ")[0] for one in errors] == [f"your role in {cluster.namespace}"]
    assert "create, get, list, watch, patch, delete pytorchjobs" in errors[0].what
    assert "; watch pods; get pods/log" in errors[0].what
    assert "cannot look at nodes: your role may not list nodes" in [one.what for one in found]
