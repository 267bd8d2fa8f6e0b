"""Rendering jobs: golden files, what every object must have, and what is refused before a cluster is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings

from specs import EVERYTHING, PLAIN, specs, targets
from worldsize.errors import PERMANENT, UserError
from worldsize.launch.kinds import KINDS
from worldsize.launch.pod import to_yaml
from worldsize.launch.spec import Placement, Resources, SecretKey
from worldsize.launch.target import TARGETS, load

GOLDEN = Path(__file__).parent / "golden"


def rendered(kind: str, spec=PLAIN) -> list[dict]:
    return load(kind).render(spec)


def pod_templates(value) -> list[dict]:
    """Every pod template in an object, wherever it is."""
    if isinstance(value, dict):
        own = [value] if "containers" in value.get("spec", {}) and "metadata" in value else []
        return own + [found for inner in value.values() for found in pod_templates(inner)]
    if isinstance(value, list):
        return [found for inner in value for found in pod_templates(inner)]
    return []


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(("size", "spec"), [("plain", PLAIN), ("everything", EVERYTHING)])
def test_golden(kind, size, spec):
    assert to_yaml(rendered(kind, spec)) == (GOLDEN / f"{kind}-{size}.yaml").read_text()


@given(specs, targets)
def test_any_job_renders_the_same_twice_and_reads_back(spec, target):
    assume(not [*target.problems(spec)])
    manifests = target.render(spec)
    text = to_yaml(manifests)
    assert text == to_yaml(target.render(replace(spec)))
    assert [*yaml.safe_load_all(text)] == manifests
    assert "&id" not in text


@given(specs, targets)
def test_what_every_job_must_have(spec, target):
    assume(not [*target.problems(spec)])
    manifests = target.render(spec)
    for manifest in manifests:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == spec.name
        assert manifest["metadata"]["namespace"] == spec.namespace
    templates = pod_templates(manifests)
    assert templates
    for template in templates:
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == spec.name
        assert template["metadata"]["annotations"]["sidecar.istio.io/inject"] == "false"
        pod = template["spec"]
        assert pod["terminationGracePeriodSeconds"] == spec.grace_s
        assert (
            pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert [v["emptyDir"]["sizeLimit"] for v in pod["volumes"] if v["name"] == "shm"] == [spec.resources.shm]
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            resources = container.get("resources", {})
            assert resources.get("limits") == resources.get("requests")
            names = [variable["name"] for variable in container["env"]]
            assert names == sorted(set(names))
            for secret in spec.secrets:
                (variable,) = [v for v in container["env"] if v["name"] == secret.variable]
                assert variable["valueFrom"] == {"secretKeyRef": {"key": secret.key, "name": secret.secret}}


def test_kinds_have_what_their_operators_need():
    (torch,) = [m for m in rendered("pytorchjob") if m["kind"] == "PyTorchJob"]
    worker = torch["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert torch["spec"]["nprocPerNode"] == "8" and worker["replicas"] == 2 and worker["restartPolicy"] == "ExitCode"
    assert [c["name"] for c in worker["template"]["spec"]["containers"]] == ["pytorch"]
    (mpi,) = [m for m in rendered("mpijob") if m["kind"] == "MPIJob"]
    launcher, worker = (mpi["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    command = launcher["template"]["spec"]["containers"][0]["command"]
    assert command[:5] == ["python", "-m", "worldsize.launch.hosts", "/etc/mpi/hostfile", "2222"] and command[5] == "mpirun"
    assert command[command.index("-np") + 1] == "16" and mpi["spec"]["slotsPerWorker"] == 8
    assert launcher["restartPolicy"] == "Never" and "nvidia.com/gpu" not in str(launcher)
    assert worker["template"]["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"] == 2222
    runtime, train = rendered("trainjob")[-2:]
    assert train["spec"]["trainer"]["numProcPerNode"] == 8 and train["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(PERMANENT)}}


def test_a_runtime_of_the_clusters_is_patched():
    (train,) = [m for m in rendered("trainjob", replace(PLAIN, runtime="torch-distributed")) if m["kind"] == "TrainJob"]
    assert train["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    assert train["spec"]["trainer"]["command"][:2] == ["worldsize", "agent"]
    assert train["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"


def test_a_runtime_of_the_clusters_gets_all_that_one_of_our_own_would_have():
    everything = replace(EVERYTHING, placement=replace(EVERYTHING.placement, priority=None, spread=None))
    own = pod_templates(rendered("trainjob", everything))[0]["spec"]
    train = rendered("trainjob", replace(everything, runtime="torch-distributed"))[-1]["spec"]
    (patch,) = train["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = node["template"]["spec"]["template"]["spec"]
    # Of a pod, Kubeflow's reference of the TrainJob lets these be patched; and of a container, its mounts and rights.
    for key in ("imagePullSecrets", "nodeSelector", "securityContext", "terminationGracePeriodSeconds", "tolerations"):
        assert patched[key] == own[key], key
    assert patched["volumes"] == own["volumes"]
    (ours,), (theirs,) = own["containers"], patched["containers"]
    assert {key: ours[key] for key in ("name", "securityContext", "volumeMounts")} == theirs
    trainer = {key: train["trainer"][key] for key in ("command", "env", "image", "resourcesPerNode")}
    assert trainer == {key: ours[key] for key in ("command", "env", "image")} | {"resourcesPerNode": ours["resources"]}
    unasked = rendered("trainjob", replace(PLAIN, runtime="torch-distributed", resources=Resources()))[-1]["spec"]
    assert "resourcesPerNode" not in unasked["trainer"]


def test_an_elastic_job_may_change_its_number_of_nodes():
    (job,) = [m for m in rendered("pytorchjob", replace(PLAIN, elastic=(1, 4))) if m["kind"] == "PyTorchJob"]
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (policy["minReplicas"], worker["replicas"], policy["maxReplicas"]) == (1, 2, 4)
    # Its processes would refuse any other number.
    assert "WORLDSIZE_NODES" not in str(worker)


@pytest.mark.parametrize(
    ("kind", "elastic", "gang"), [("pytorchjob", None, 2), ("pytorchjob", (1, 4), 1), ("mpijob", None, 2)]
)
def test_volcanos_gang_is_the_pods_that_must_be_there_before_any_other_is_made(kind, elastic, gang):
    job = rendered(kind, replace(PLAIN, elastic=elastic, placement=Placement(volcano_queue="ml")))[-1]
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": gang, "queue": "ml"}


def test_a_job_without_retries_outlives_one_evicted_pod():
    """The training-operator fails a job whose pods failed more often than backoffLimit says, a single eviction included."""
    (job,) = [m for m in rendered("pytorchjob", replace(PLAIN, retries=0)) if m["kind"] == "PyTorchJob"]
    assert job["spec"]["runPolicy"]["backoffLimit"] == 1


@pytest.mark.parametrize("kind", TARGETS)
def test_what_the_user_sets_counts_more_than_what_we_would(kind):
    spec = replace(PLAIN, env=(("NCCL_DEBUG", "INFO"),), placement=Placement(spread="host"))
    for template in pod_templates(rendered(kind, spec)):
        variables = template["spec"]["containers"][0]["env"]
        assert [v["value"] for v in variables if v["name"] == "NCCL_DEBUG"] == ["INFO"]
        (constraint,) = template["spec"]["topologySpreadConstraints"]
        # https://kubernetes.io/docs/reference/labels-annotations-taints/#kubernetesiohostname
        assert constraint["topologyKey"] == "kubernetes.io/hostname"
        assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_no_secret_is_on_a_command_line():
    spec = replace(EVERYTHING, env=(("PLAIN", "canary"),))
    for kind in TARGETS:
        for template in pod_templates(rendered(kind, spec)):
            command = " ".join(template["spec"]["containers"][0]["command"])
            assert "canary" not in command and "WANDB_API_KEY=" not in command


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("pytorchjob", {"name": "a" * 55}, "55 characters, and a PyTorchJob of this size can have 54"),
        ("pytorchjob", {"name": "a" * 54, "nodes": 11}, "can have 53"),
        ("mpijob", {"name": "a" * 55}, "can have 54"),
        ("trainjob", {"name": "a" * 49}, "can have 48"),
        ("pytorchjob", {"name": "9lives"}, "beginning with a letter"),
        ("pytorchjob", {"name": "R50"}, "lower-case"),
        ("pytorchjob", {"name": "r50-"}, "lower-case"),
        ("pytorchjob", {"name": "r_50"}, "lower-case"),
        ("pytorchjob", {"name": "r50\n"}, "lower-case"),
        ("pytorchjob", {"image": "worldsize:latest"}, "other than latest"),
        ("pytorchjob", {"image": "registry.example:5000/worldsize"}, "name a tag"),
        ("pytorchjob", {"volumes": ()}, "the run would be lost"),
        ("pytorchjob", {"volumes": ("a", "a")}, "named twice"),
        ("pytorchjob", {"volumes": ("Data",)}, "cannot be the name of a volume"),
        ("pytorchjob", {"resources": Resources(gpus=4)}, "each process takes one GPU"),
        ("pytorchjob", {"resources": Resources(gpus=8, memory="lots")}, "a quantity"),
        ("pytorchjob", {"resources": Resources(gpus=8, memory="1Gi", shm="2Gi")}, "must be less than --memory"),
        ("pytorchjob", {"resources": Resources(gpus=8, memory="2Gi", shm="2048Mi")}, "must be less than --memory"),
        ("pytorchjob", {"resources": Resources(gpus=8, disk="lots")}, "--disk 'lots': a quantity"),
        ("pytorchjob", {"resources": Resources(gpus=8, cpu="-1")}, "--cpu '-1': a quantity"),
        ("pytorchjob", {"nodes": 0}, "--nodes 0: at least 1"),
        ("pytorchjob", {"procs": 0, "resources": Resources()}, "--procs 0: at least 1"),
        ("pytorchjob", {"retries": -1}, "--retries -1: at least 0"),
        ("pytorchjob", {"grace_s": 0}, "--grace 0: at least 1"),
        ("pytorchjob", {"deadline_s": 0}, "--deadline 0: at least 1"),
        ("pytorchjob", {"env": (("PET_NNODES", "3"),)}, "the launcher sets these itself"),
        ("pytorchjob", {"secrets": (SecretKey("s", "k", "POD_IP"),)}, "POD_IP: the launcher sets these itself"),
        ("pytorchjob", {"env": (("A", "1"), ("A", "2"))}, "A: named twice"),
        ("pytorchjob", {"env": (("A", "1"),), "secrets": (SecretKey("s", "k", "A"),)}, "A: named twice"),
        ("pytorchjob", {"horovod": True}, "use --on mpijob"),
        ("trainjob", {"horovod": True}, "use --on mpijob"),
        ("pytorchjob", {"elastic": (3, 4)}, "include --nodes 2"),
        ("pytorchjob", {"elastic": (0, 4)}, "must be 1 or more nodes"),
        ("pytorchjob", {"elastic": (1, 11), "name": "a" * 54}, "can have 53"),
        ("mpijob", {"elastic": (1, 2)}, "only --on pytorchjob"),
        ("trainjob", {"elastic": (1, 2)}, "only --on pytorchjob"),
        ("mpijob", {"runtime": "x"}, "for --on trainjob"),
        ("pytorchjob", {"runtime": "x"}, "for --on trainjob"),
        ("trainjob", {"runtime": "x", "placement": Placement(priority="high")}, "leave --runtime out"),
        ("trainjob", {"runtime": "x", "placement": Placement(spread="zone")}, "leave --runtime out"),
    ],
)
def test_what_is_refused_offline(kind, change, message):
    with pytest.raises(UserError, match=message):
        rendered(kind, replace(PLAIN, **change))


# In a pod the operators set the first line, we the second; and nobody but the image the third.
@pytest.mark.parametrize(
    "name",
    [
        *("PET_NNODES", "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_plm_ssh_args", "MASTER_ADDR"),
        *("WORLDSIZE_NODES", "WORLDSIZE_PROCS", "WORLDSIZE_AGENT", "POD_IP", "HOME", "USER"),
        "PATH",
    ],
)
def test_variables_that_are_not_the_users(name):
    with pytest.raises(UserError, match=f"{name}: the launcher sets these itself"):
        rendered("mpijob", replace(PLAIN, env=((name, "x"),)))


@pytest.mark.cluster
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs, targets)
def test_the_server_accepts_whatever_the_offline_rules_let_through(cluster, spec, target):
    spec = replace(spec, namespace=cluster.namespace)
    assume(not [*target.problems(spec)])
    for manifest in target.render(spec):
        # Its webhook wants to see the runtime, which a dry run does not create.
        if manifest["kind"] != "TrainJob":
            path = KINDS[manifest["kind"]].path(cluster.namespace)
            cluster.request("POST", path, {"dryRun": "All", "fieldValidation": "Strict"}, manifest)
