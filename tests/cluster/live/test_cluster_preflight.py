"""Preflight checks on a real cluster: a job that can run, each fault, and a user with few permissions."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from findings import SPEC, only_problem, preflight
from waiting import until
from worldsize.cluster.api.client import Cluster
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.spec import Placement, PodResources, SecretKey
from worldsize.cluster.preflight import runner
from worldsize.cluster.preflight.base import get_optional


def tiny(cluster, **changes):
    """A job that fits everywhere, and its volume; it is never submitted."""
    small = {"procs": 1, "resources": PodResources(cpu="50m", memory="512Mi", shm="16Mi")}
    claim(cluster, "data", "ReadWriteMany")
    return replace(SPEC, namespace=cluster.namespace, **{**small, **changes})


def claim(cluster, name, mode):
    make(cluster, "PersistentVolumeClaim", name, accessModes=[mode], resources={"requests": {"storage": "1Mi"}})
    until(lambda: cluster.get("PersistentVolumeClaim", name)["status"]["phase"] == "Bound", f"volume {name} is bound")


def make(cluster, kind, name, **spec):
    cluster.create(
        {"apiVersion": KINDS[kind].group_version, "kind": kind, "metadata": {"name": name}}
        | ({"spec": spec} if spec else {})
    )


def limit_all(cluster, **hard):
    make(cluster, "ResourceQuota", "bounds", hard={key.replace("__", "."): value for key, value in hard.items()})
    until(lambda: cluster.get("ResourceQuota", "bounds").get("status", {}).get("hard"), "the quota applies")


def limit_each(cluster, kind, **bounds):
    make(cluster, "LimitRange", "bounds", limits=[{"type": kind, **bounds}])


def enforce(cluster, level):
    labels = {"pod-security.kubernetes.io/enforce": level}
    cluster.patch("Namespace", cluster.namespace, {"metadata": {"labels": labels}})


def with_key(cluster):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kaggle"}, "stringData": {"name": "me"}}
    cluster.create(secret)


@pytest.mark.cluster
@pytest.mark.parametrize("on", TARGETS)
def test_a_job_that_can_run_passes_and_creates_nothing(cluster, on):
    enforce(cluster, "restricted")
    spec = tiny(cluster)
    found = preflight(cluster, spec, on)
    assert {one.level for one in found} == {"ok"}, found
    assert cluster.list("Pod") == cluster.list("NetworkPolicy") == cluster.list(load_target(on).kind) == []
    assert cluster.get("ConfigMap", spec.name) is None


SECRET = {"secrets": (SecretKey("kaggle", "token", "TOKEN"),)}
REAL = {
    "no volume": (None, {"volumes": ("imagenet",)}, "volume imagenet does not exist"),
    "volume of one node": (
        lambda cluster: claim(cluster, "one", "ReadWriteOnce"),
        {"volumes": ("one",)},
        "volume one is writable from one node only",
    ),
    "no Secret": (None, SECRET, "Secret kaggle does not exist"),
    "no key": (with_key, SECRET, "Secret kaggle has no key token; its keys: name"),
    "quota": (
        lambda cluster: limit_all(cluster, pods="1"),
        {},
        "quota bounds is too small for all pods of the job: pods: 2 requested, 0 of 1 in use",
    ),
    "quota below one pod": (
        lambda cluster: limit_all(cluster, requests__memory="32Mi"),
        {},
        "quota bounds is too small for all pods of the job: requests.memory: 1Gi requested, 0Mi of 32Mi in use",
    ),
    "quota on a resource without a request": (
        lambda cluster: limit_all(cluster, requests__cpu="1"),
        {"resources": PodResources(memory="512Mi", shm="16Mi")},
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
    "GPUs": (None, {"procs": 512, "resources": PodResources(gpus=512)}, "capacity for 0 of 2 pods even on empty nodes: "),
    "priority": (None, {"placement": Placement(priority="none-such")}, "no PriorityClass with name none-such was found"),
    "no such node": (None, {"placement": Placement(node_selector=(("zone", "none"),))}, "not labeled zone=none"),
    "quota of objects that the operator creates": (
        lambda cluster: limit_all(cluster, services="1"),
        {},
        "quota bounds is too small for all pods of the job: services: 2 requested, 0 of 1 in use",
    ),
    "a Service of the operator's name": (
        lambda cluster: make(cluster, "Service", "r50-worker-1", clusterIP="None", ports=[{"port": 1}]),
        {},
        "Service r50-worker-1 exists, but job r50 does not",
    ),
    "objects not created by worldsize": (
        lambda cluster: cluster.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "r50"}}),
        {},
        "job r50 does not exist, but other objects with that name do: ConfigMap",
    ),
}


@pytest.mark.cluster
@pytest.mark.parametrize(("plant", "changes", "what"), REAL.values(), ids=REAL)
def test_each_fault_on_a_real_cluster(cluster, plant, changes, what):
    spec = tiny(cluster, **changes)
    if plant:
        plant(cluster)
    finding = only_problem(preflight(cluster, spec))
    assert what in finding.what and finding.remedy


@pytest.mark.cluster
def test_locked_memory_for_rdma_is_rejected_under_restricted(cluster):
    rdma = PodResources(cpu="50m", memory="512Mi", shm="16Mi", devices=(("rdma/ib", 1),))
    spec = tiny(cluster, resources=rdma)
    enforce(cluster, "restricted")
    errors = [one for one in preflight(cluster, spec) if one.level == "error"]
    assert any("no node has rdma/ib" in one.what for one in errors)
    refused = next(one for one in errors if "violates PodSecurity" in one.what)
    assert "IPC_LOCK" in refused.what and "--resource" in refused.remedy


@pytest.mark.cluster
def test_a_runtime_that_does_not_exist(cluster):
    finding = only_problem(preflight(cluster, tiny(cluster, runtime="none-such"), "trainjob"))
    assert finding.what == "ClusterTrainingRuntime none-such does not exist"


@pytest.mark.cluster
def test_a_namespace_that_does_not_exist(cluster):
    missing = Cluster(namespace=f"{cluster.namespace}-not")
    assert f"namespace {missing.namespace} does not exist; existing namespaces: " in only_problem(preflight(missing)).what


@pytest.mark.cluster
def test_an_object_that_a_webhook_rejects(cluster):
    kind = load_target("pytorchjob")
    spec = tiny(cluster)
    *others, job = kind.render(spec)
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "other"
    found = runner.examine(runner.Context(cluster, (kind.kind,), spec, (*others, job)))
    assert "the server would reject PyTorchJob r50: " in only_problem(list(found)).what


@pytest.mark.cluster
def test_a_job_with_the_same_name_that_has_not_ended(cluster):
    spec = tiny(cluster)
    for manifest in load_target("pytorchjob").render(spec):
        cluster.create(manifest)
    finding = only_problem([one for one in preflight(cluster, spec, "mpijob") if "capacity" not in one.what])
    assert re.match(r"PyTorchJob r50 already exists and is (Created|Pending|Running)", finding.what)


@pytest.mark.cluster
def test_a_user_with_few_permissions(cluster, use):
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
    token_request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.request("POST", f"{account}/token", body=token_request)["status"]["token"]
    server = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())["clusters"][0]["cluster"]
    found = preflight(use(server, cluster.namespace, token=token), spec)
    errors = [one for one in found if one.level == "error"]
    assert [one.what.partition(":")[0] for one in errors] == [f"missing permissions in namespace {cluster.namespace}"]
    assert "create, get, list, watch, patch, delete pytorchjobs" in errors[0].what
    assert "; watch pods; get pods/log" in errors[0].what
    assert "cannot check nodes: no permission to list nodes" in [one.what for one in found]


@pytest.mark.cluster
def test_the_default_limits_of_a_namespace_count(cluster):
    limit_each(cluster, "Container", default={"cpu": "100m", "memory": "256Mi"}, defaultRequest={"memory": "64Mi"})
    finding = only_problem(preflight(cluster, tiny(cluster, resources=PodResources(shm="16Mi"))), "warning")
    assert "the namespace's default limit of memory, 256Mi, with --procs 1 leaves 256Mi per process" in finding.what


SIDECAR = 'JSONPatch{op: "add", path: "/spec/containers/-", value: Object.spec.containers{name: "proxy", image: "a:1"}}'


@pytest.mark.cluster
def test_a_container_that_the_cluster_adds_is_a_warning(cluster):
    """The policy does what a mutating webhook does, and needs no server."""
    group = "admissionregistration.k8s.io/v1beta1"
    served = get_optional(cluster, f"/apis/{group}") or {"resources": []}
    if "mutatingadmissionpolicies" not in [one["name"] for one in served["resources"]]:
        pytest.skip("the cluster has no MutatingAdmissionPolicy (feature gate and runtime-config)")
    name = cluster.namespace
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {
        "matchConstraints": {"resourceRules": [rule]},
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": f"[{SIDECAR}]"}}],
    }
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
    kinds = {
        "MutatingAdmissionPolicy": ("mutatingadmissionpolicies", policy),
        "MutatingAdmissionPolicyBinding": ("mutatingadmissionpolicybindings", {"policyName": name, "matchResources": here}),
    }
    try:
        for kind, (plural, spec) in kinds.items():
            body = {"apiVersion": group, "kind": kind, "metadata": {"name": name}, "spec": spec}
            cluster.request("POST", f"/apis/{group}/{plural}", body=body)
        spec = tiny(cluster)

        def added():
            return [one.what for one in preflight(cluster, spec) if one.level == "warning"]

        until(lambda: added() == ["the cluster adds containers to the job's pods: proxy"], "the policy applies", every=1.0)
    finally:
        for plural, _ in kinds.values():
            cluster.request("DELETE", f"/apis/{group}/{plural}/{name}")


@pytest.mark.cluster
def test_a_secret_of_the_operators_name(cluster):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "r50-ssh"}, "stringData": {"a": "b"}}
    cluster.create(secret)
    finding = only_problem(preflight(cluster, tiny(cluster), "mpijob"))
    assert "Secret r50-ssh exists, but job r50 does not" in finding.what


@pytest.mark.cluster
def test_the_server_accepts_the_runtime_of_a_trainjob_in_a_volcano_queue(cluster):
    """Also where Volcano is not installed: the pods name its scheduler, the template the queue."""
    runtime = load_target("trainjob").render(tiny(cluster, placement=Placement(volcano_queue="ml")))[-2]
    created = cluster.create(runtime, dry_run=True)
    template = created["spec"]["template"]
    assert template["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "ml"}
    [node] = template["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["template"]["spec"]["schedulerName"] == "volcano"
