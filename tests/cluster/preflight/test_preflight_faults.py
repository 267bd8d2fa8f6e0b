"""Preflight checks: each fault in an otherwise healthy cluster gives exactly one message with a remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from fake_cluster import FakeCluster, gpu_node, quota, running
from findings import SPEC, WITH_SECRET, occupy_gpu, only_problem, preflight
from worldsize.cluster.manifests.spec import Placement, PodJobSpec

SIXTEEN_GPUS = replace(SPEC, procs=16, resources=replace(SPEC.resources, gpus=16))
TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
OBJECTS = {"services": "3", "count/configmaps": "3"}
DELETING = {"deletionTimestamp": "2026-11-20T00:00:00Z"}


@dataclass
class Fault:
    """A fault of the cluster or the job, and the expected finding."""

    what: str  # a regular expression
    remedy: str = ""
    plant: Callable[[FakeCluster], object] = id
    spec: PodJobSpec = SPEC


def placed(**changes):
    return replace(SPEC, placement=Placement(**changes))


def on_volume(name):
    return replace(SPEC, volumes=(name,))


def with_kueue(fake_cluster, **queue):
    fake_cluster.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    fake_cluster.add("LocalQueue", "team", **queue)


def labelled(fake_cluster, **labels):
    for name in ("n0", "n1"):
        fake_cluster.add(
            "Node", **gpu_node(name, 8, labels={key.replace("__", "/"): value for key, value in labels.items()})
        )


def tainted(fake_cluster):
    for name in ("n0", "n1"):
        fake_cluster.add("Node", **gpu_node(name, 8, taints=[TAINT]))


def pending(fake_cluster, storage_class=None, mode="Immediate"):
    """Add the volume "late", which is not bound yet."""
    spec = {"storageClassName": storage_class} if storage_class else {}
    fake_cluster.volume("late", "ReadWriteMany", phase="Pending", **spec)
    fake_cluster.add("StorageClass", "standard", volumeBindingMode=mode)


def job(kind, condition=None, **metadata):
    """Returns a function that adds a job with the same name."""
    conditions = [{"type": condition, "status": "True"}] if condition else []
    return lambda fake: fake.add(kind, "r50", metadata=metadata, status={"conditions": conditions})


def with_default_limit(pod):
    """As a LimitRange does."""
    pod["spec"]["containers"][0]["resources"]["limits"]["memory"] = "512Mi"


def with_default_limit_and_a_quiet_sidecar(pod):
    """As if a webhook had placed its container before ours, and it needs less than the processes."""
    with_default_limit(pod)
    pod["spec"]["containers"].insert(0, {"name": "worldsize-proxy", "resources": {"limits": {"memory": "64Gi"}}})


def with_sidecar(pod):
    """As a mutating webhook does."""
    pod["spec"]["containers"].append({"name": "vault-agent"})


def limited(fake_cluster):
    half_used = quota({"requests.nvidia.com/gpu": "16"}, {"requests.nvidia.com/gpu": "8"})
    fake_cluster.add("ResourceQuota", "gpus", spec=half_used["spec"], status=half_used["status"])


ERRORS = {
    "no namespace": Fault(
        "namespace team does not exist; existing namespaces: other",
        "kubectl create namespace team",
        lambda fake: [fake.objects.pop("/api/v1/namespaces/team"), fake.add("Namespace", "other")],
    ),
    "namespace is being deleted": Fault(
        "namespace team is being deleted",
        "--namespace",
        lambda fake: fake.add("Namespace", "team", status={"phase": "Terminating"}),
    ),
    "no operator": Fault(
        "PyTorchJob: not installed on this cluster",
        "training-operator 1.9; this cluster has MPIJob and TrainJob: use --on mpijob",
        lambda fake: fake.served.pop("kubeflow.org/v1"),
    ),
    "operator is down": Fault(
        "training-operator has no ready pod",
        "kubectl -n kubeflow describe",
        lambda fake: fake.add("Deployment", "training-operator", metadata={"namespace": "kubeflow"}),
    ),
    "missing permissions": Fault(
        "missing permissions in namespace team: create, watch pytorchjobs; get pods/log",
        "resources: [pytorchjobs]",
        lambda fake: fake.denied.update({("create", "pytorchjobs"), ("watch", "pytorchjobs"), ("get", "pods/log")}),
    ),
    "no permission for logs": Fault(
        "missing permissions in namespace team: get pods/log",
        "resources: [pods/log]",
        lambda fake: fake.denied.add(("get", "pods/log")),
    ),
    "no volume": Fault(
        "volume imagenet does not exist in namespace team; existing volumes: data",
        "worldsize cluster volume create imagenet",
        spec=on_volume("imagenet"),
    ),
    "volume of one node": Fault(
        r"volume data is writable from one node only \(ReadWriteOnce\); the job has 2",
        "--access rwx",
        lambda fake: fake.volume("data", "ReadWriteOnce"),
    ),
    "volume of one node, elastic job": Fault(
        r"volume data is writable from one node only \(ReadWriteOnce\); the job has 4",
        "or use --nodes 1 without --elastic",
        lambda fake: fake.volume("data", "ReadWriteOnce"),
        replace(SPEC, nodes=1, elastic=(1, 4)),
    ),
    "read-only volume": Fault(
        r"volume data \(ReadOnlyMany\) is not writable",
        "--access rwx",
        lambda fake: fake.volume("data", "ReadOnlyMany"),
        replace(SPEC, nodes=1),
    ),
    "volume is being deleted": Fault(
        "volume data is being deleted",
        "--volume",
        lambda fake: fake.objects["/api/v1/namespaces/team/persistentvolumeclaims/data"]["metadata"].update(DELETING),
    ),
    "volume is lost": Fault(
        "volume data has lost its storage",
        "ask your cluster administrator",
        lambda fake: fake.volume("data", "ReadWriteMany", phase="Lost"),
    ),
    "volume without a class": Fault(
        "volume late has no StorageClass and is not bound", "--class", pending, on_volume("late")
    ),
    "volume with an unknown class": Fault(
        "volume late uses StorageClass fast, which does not exist",
        "existing StorageClasses: standard",
        lambda fake: pending(fake, "fast"),
        on_volume("late"),
    ),
    "no Secret": Fault(
        "Secret kaggle does not exist in namespace team",
        "worldsize cluster secret create kaggle --from-env token",
        spec=WITH_SECRET,
    ),
    "no key": Fault(
        "Secret kaggle has no key token; its keys: name, word",
        "--secret kaggle/KEY",
        lambda fake: fake.add("Secret", "kaggle", data={"name": "", "word": ""}),
        WITH_SECRET,
    ),
    "no pull secret": Fault(
        "Secret pull does not exist",
        "kubectl -n team create secret docker-registry pull",
        spec=replace(SPEC, pull_secrets=("pull",)),
    ),
    "Secret of another type": Fault(
        "Secret pull is not a pull secret: its type is Opaque",
        "docker-registry",
        lambda fake: fake.add("Secret", "pull", data={}, type="Opaque"),
        replace(SPEC, pull_secrets=("pull",)),
    ),
    "no Kueue": Fault("--queue team: Kueue is not installed", "omit --queue", spec=placed(queue="team")),
    "no queue": Fault(
        "LocalQueue a does not exist in namespace team", "existing queues: team", with_kueue, placed(queue="a")
    ),
    "no Volcano": Fault("Volcano is not installed", "omit --volcano-queue", spec=placed(volcano_queue="a")),
    "no Volcano queue": Fault(
        "Volcano queue a does not exist",
        "kubectl get queues",
        lambda fake: fake.served.update({"scheduling.volcano.sh/v1beta1": ["queues"]}),
        placed(volcano_queue="a"),
    ),
    "too many GPUs": Fault(
        "capacity for 0 of 2 pods even on empty nodes: 16 nvidia.com/gpu per node requested; the largest node that accepts "
        r"this pod has 8 free \(of 8\)",
        "--gpus",
        spec=SIXTEEN_GPUS,
    ),
    "too many nodes": Fault(
        "capacity for 2 of 3 pods even on empty nodes: each pod needs cpu 4", "--gpus", spec=replace(SPEC, nodes=3)
    ),
    "other GPUs": Fault(
        "no node has amd.com/gpu; available: nvidia.com/gpu",
        "--gpus",
        spec=replace(SPEC, resources=replace(SPEC.resources, gpu_resource="amd.com/gpu")),
    ),
    "no such node": Fault(
        "none of the 2 nodes accepts this pod: 2 are not labeled zone=x",
        "--node-selector",
        spec=placed(node_selector=(("zone", "x"),)),
    ),
    "tainted": Fault("2 are tainted nvidia.com/gpu=present:NoSchedule", "--toleration", tainted),
    "quota": Fault(
        "quota gpus is too small for all pods of the job: requests.nvidia.com/gpu: 16 requested, 8 of 16 in use",
        "worldsize jobs",
        limited,
    ),
    "Pod Security": Fault(
        "would reject the job's pods: .*violates PodSecurity",
        "--resource",
        lambda fake: fake.refuse("Pod", 403, 'pods "r50" is forbidden: violates PodSecurity "restricted:latest"'),
    ),
    "policy": Fault(
        "would reject the job's pods: .*no team label",
        "",
        lambda fake: fake.refuse("Pod", 403, "admission webhook denied the request: no team label"),
    ),
    "webhook is down": Fault(
        "the server would reject PyTorchJob r50: Internal error: failed calling webhook",
        "the operator's webhook does not respond",
        lambda fake: fake.refuse("PyTorchJob", 500, 'Internal error: failed calling webhook "v": no endpoints'),
    ),
    "OpenShift": Fault(
        "would reject the job's pods: .*security context constraint",
        "--no-fixed-user",
        lambda fake: fake.refuse(
            "Pod", 403, 'pods "r50" is forbidden: unable to validate against any security context constraint'
        ),
    ),
    "field of a newer operator": Fault(
        "the server would reject PyTorchJob r50: strict decoding error: unknown field",
        "older than the versions that worldsize supports",
        lambda fake: fake.refuse("PyTorchJob", 400, 'strict decoding error: unknown field "spec.managedBy"'),
    ),
    "volume of blocks": Fault(
        "volume data is a raw block device",
        "worldsize cluster volume create data-files",
        lambda fake: fake.volume("data", "ReadWriteMany", volumeMode="Block"),
    ),
    "quota of objects": Fault(
        "quota team is too small for all pods of the job: count/configmaps: 1 requested, 3 of 3 in use; services: 2 req",
        "worldsize jobs",
        lambda fake: fake.add("ResourceQuota", **quota(OBJECTS, OBJECTS | {"services": "2"})),
    ),
    "leftover Service": Fault(
        "Service r50-worker-1 exists, but job r50 does not",
        "kubectl -n team delete services/r50-worker-1",
        lambda fake: fake.add("Service", "r50-worker-1"),
    ),
    "job runs": Fault("PyTorchJob r50 already exists and is Running", "worldsize logs r50", job("PyTorchJob", "Running")),
    "job has succeeded": Fault(
        "MPIJob r50 already exists and is Succeeded", "worldsize delete r50", job("MPIJob", "Succeeded")
    ),
    "job is being deleted": Fault("TrainJob r50 is being deleted", "wait a moment", job("TrainJob", **DELETING)),
    "objects of an earlier job": Fault(
        "job r50 does not exist, but other objects with that name do: ConfigMap",
        "kubectl -n team delete configmaps/r50",
        lambda fake: fake.add("ConfigMap", "r50", metadata={"labels": {"app.kubernetes.io/managed-by": "worldsize"}}),
    ),
    "objects not created by worldsize": Fault(
        "job r50 does not exist, but other objects with that name do: NetworkPolicy",
        "choose another --name",
        lambda fake: fake.add("NetworkPolicy", "r50"),
    ),
    "pods are terminating": Fault(
        "pods of an earlier job r50 are still terminating: w0",
        "wait a moment",
        lambda fake: fake.add("Pod", **running("n0", name="w0", run="r50")),
    ),
}


@pytest.mark.parametrize("fault", ERRORS.values(), ids=ERRORS)
def test_each_fault_gives_one_message_with_a_remedy(fake_cluster, fault):
    fault.plant(fake_cluster)
    finding = only_problem(preflight(fake_cluster.cluster, fault.spec))
    assert re.search(fault.what, finding.what)
    assert fault.remedy in finding.remedy


WARNINGS = {
    "volume is not bound": Fault(
        "volume late is not bound yet",
        "kubectl -n team describe pvc late",
        lambda fake: pending(fake, "standard"),
        on_volume("late"),
    ),
    "old Kubernetes": Fault(
        "v1.27.3-gke.1: .* require 1.28 or newer",
        plant=lambda fake: setattr(fake, "version", "v1.27.3-gke.1"),
    ),
    "busy": Fault(
        "2 pods requested, current capacity 1: each pod needs cpu 4, memory 16Gi, nvidia.com/gpu 8; of the other nodes, "
        r"the largest has 7 nvidia.com/gpu free \(of 8\)",
        "wait until other jobs end",
        occupy_gpu,
    ),
    "autoscaler": Fault(
        "16 nvidia.com/gpu per node requested",
        "the cluster may add nodes",
        lambda fake: fake.add("ConfigMap", "cluster-autoscaler-status", metadata={"namespace": "kube-system"}),
        SIXTEEN_GPUS,
    ),
    "no permission for nodes": Fault(
        "cannot check nodes: no permission to list nodes",
        plant=lambda fake: fake.denied.add(("list", "nodes")),
    ),
    "no permission for Secrets": Fault(
        "cannot check secrets: no permission to get secrets",
        plant=lambda fake: fake.denied.add(("get", "secrets")),
        spec=WITH_SECRET,
    ),
    "old label": Fault(
        "--node-selector failure-domain.beta.kubernetes.io/region: this label is deprecated",
        "topology.kubernetes.io/region=LAS1",
        lambda fake: labelled(fake, **{"failure-domain.beta.kubernetes.io/region": "LAS1"}),
        placed(node_selector=(("failure-domain.beta.kubernetes.io/region", "LAS1"),)),
    ),
    "queue is inactive": Fault(
        "LocalQueue team is not accepting jobs: no ClusterQueue",
        plant=lambda fake: with_kueue(
            fake, status={"conditions": [{"type": "Active", "status": "False", "message": "no ClusterQueue"}]}
        ),
        spec=placed(queue="team"),
    ),
    "little memory": Fault(
        "--memory 3Gi with --procs 8 leaves 384Mi per process; at least 512Mi is needed",
        "request more",
        spec=replace(SPEC, resources=replace(SPEC.resources, memory="3Gi")),
    ),
    "cordoned": Fault(
        "capacity for 1 of 2 pods: .*1 is tainted node.kubernetes.io/unschedulable:NoSchedule",
        "kubectl get nodes",
        lambda fake: fake.objects["/api/v1/nodes/n1"]["spec"].update(unschedulable=True),
    ),
    "not ready": Fault(
        "capacity for 1 of 2 pods: .*1 is tainted node.kubernetes.io/not-ready:NoSchedule",
        "kubectl get nodes",
        lambda fake: fake.objects["/api/v1/nodes/n1"]["status"].update(conditions=[{"type": "Ready", "status": "Unknown"}]),
    ),
    "an autoscaler that may not be looked up": Fault(
        "16 nvidia.com/gpu per node requested",
        "no permission to see whether the cluster adds nodes",
        lambda fake: fake.denied.add(("get", "apis")),
        SIXTEEN_GPUS,
    ),
    "default limit of memory": Fault(
        "the namespace's default limit of memory, 512Mi, with --procs 8 leaves 64Mi per process",
        "request more",
        lambda fake: setattr(fake, "admit", with_default_limit),
        replace(SPEC, resources=replace(SPEC.resources, memory=None)),
    ),
    "sidecar": Fault(
        "the cluster adds containers to the job's pods: vault-agent",
        "a container that does not end",
        lambda fake: setattr(fake, "admit", with_sidecar),
    ),
    "no dry run": Fault(
        "cannot check whether the namespace admits the pods",
        plant=lambda fake: fake.refuse("Pod", 400, 'webhook "x" does not support dry run'),
    ),
}


@pytest.mark.parametrize("fault", WARNINGS.values(), ids=WARNINGS)
def test_what_may_resolve_itself_is_a_warning(fake_cluster, fault):
    fault.plant(fake_cluster)
    finding = only_problem(preflight(fake_cluster.cluster, fault.spec), "warning")
    assert re.search(fault.what, finding.what)
    assert fault.remedy in finding.remedy


def test_a_quota_that_admission_also_reports_is_one_finding(fake_cluster):
    limited(fake_cluster)
    fake_cluster.refuse("Pod", 403, "exceeded quota: gpus")
    assert "quota gpus is too small for all pods of the job" in only_problem(preflight(fake_cluster.cluster)).what
    fake_cluster.objects.pop("/api/v1/namespaces/team/resourcequotas/gpus")
    assert "would reject the job's pods: exceeded quota: gpus" in only_problem(preflight(fake_cluster.cluster)).what


def test_the_memory_of_the_jobs_own_container_counts(fake_cluster):
    fake_cluster.admit = with_default_limit_and_a_quiet_sidecar
    found = preflight(fake_cluster.cluster, replace(SPEC, resources=replace(SPEC.resources, memory=None)))
    problems = [one.what for one in found if one.level == "warning"]
    assert any("leaves 64Mi per process" in what for what in problems), found
    assert any("adds containers to the job's pods: worldsize-proxy" in what for what in problems)
