"""Before a run: each fault, in an otherwise healthy cluster, gives its one message and says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from apiserver import World, gpu_node, quota, running
from findings import SPEC, WITH_SECRET, busy, look, the_one
from worldsize.launch.spec import JobSpec, Placement

SIXTEEN_GPUS = replace(SPEC, procs=16, resources=replace(SPEC.resources, gpus=16))
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
LEAVING = {"deletionTimestamp": "2026-11-20T00:00:00Z"}


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
    "little memory": Fault(
        "--memory 3Gi with --procs 8: a process takes more to begin than 384Mi",
        "ask for more",
        spec=replace(SPEC, resources=replace(SPEC.resources, memory="3Gi")),
    ),
    "no trial": Fault("cannot be tried", plant=lambda w: w.refuse("Pod", 400, 'webhook "x" does not support dry run')),
}


@pytest.mark.parametrize("fault", WARNINGS.values(), ids=WARNINGS)
def test_what_may_come_right_is_a_warning(world, fault):
    fault.plant(world)
    finding = the_one(look(world.cluster, fault.spec), "warning")
    assert re.search(fault.what, finding.what)
    assert fault.remedy in finding.remedy


def test_a_quota_that_admission_names_too_is_told_once(world):
    limited(world)
    world.refuse("Pod", 403, "exceeded quota: gpus")
    assert "quota gpus does not allow the whole job" in the_one(look(world.cluster)).what
    world.objects.pop("/api/v1/namespaces/team/resourcequotas/gpus")
    assert "would refuse the job's pods: exceeded quota: gpus" in the_one(look(world.cluster)).what
