"""Rendering jobs: golden files, required fields of every object, and the checks that need no cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings

from specs import EVERYTHING, PLAIN, odd_specs, specs, targets
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.pod import to_yaml
from worldsize.cluster.manifests.spec import Placement, PodResources, SecretKey, Toleration, general_problems
from worldsize.errors import PERMANENT, UserError
from worldsize.launch import entry_point

SINGLE_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
GOLDEN = Path(__file__).parent / "golden"


def rendered(kind: str, spec=PLAIN) -> list[dict]:
    return load_target(kind).render(spec)


def pod_templates(value) -> list[dict]:
    """Every pod template in an object, at any depth."""
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


@pytest.mark.parametrize(("env", "value"), [((), "none"), (((SINGLE_COPY, "cma"),), "cma")])
def test_pods_of_open_mpi_do_not_read_the_memory_of_others_unless_asked_to(env, value):
    """Pods lack the permission: Open MPI would print each message that it failed to read."""
    [job] = [one for one in rendered("mpijob", replace(PLAIN, env=env)) if one["kind"] == "MPIJob"]
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert [one["value"] for one in launcher["env"] if one["name"] == SINGLE_COPY] == [value]


@given(specs, targets)
def test_rendering_is_deterministic_and_can_be_parsed(spec, target):
    assume(not [*target.problems(spec)])
    manifests = target.render(spec)
    text = to_yaml(manifests)
    assert text == to_yaml(target.render(replace(spec)))
    assert [*yaml.safe_load_all(text)] == manifests
    assert "&id" not in text


@given(specs, targets)
def test_required_fields_of_every_job(spec, target):
    assume(not [*target.problems(spec)])
    manifests = target.render(spec)
    for manifest in manifests:
        assert manifest["metadata"]["labels"]["app.kubernetes.io/instance"] == spec.name
        assert manifest["metadata"]["namespace"] == spec.namespace
    templates = pod_templates(manifests)
    assert templates
    for template in templates:
        assert template["metadata"]["labels"]["app.kubernetes.io/instance"] == spec.name
        # As documented by each mesh.
        opted_out = {"linkerd.io/inject": "disabled", "consul.hashicorp.com/connect-inject": "false"}
        opted_out |= {"kuma.io/sidecar-injection": "disabled", "sidecar.istio.io/inject": "false"}
        assert opted_out.items() <= template["metadata"]["annotations"].items()
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


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of an environment variable's value or a word of a command."""

    def reference(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", reference, text)


@given(specs, targets)
def test_values_arrive_as_they_were_given(spec, target):
    """Although Kubernetes expands $(NAME) and $$ in them."""
    assume(not [*target.problems(spec)])
    spec = replace(spec, command=(*spec.command, "https://x/?a=$(USER)&b=$$"))
    for template in pod_templates(target.render(spec)):
        (container,) = template["spec"]["containers"]
        values = {one["name"]: one["value"] for one in container["env"] if "value" in one}
        arrived = {name: expanded(value, values) for name, value in values.items()}
        assert {name: arrived[name] for name, _ in spec.env} == dict(spec.env)
        command = [expanded(word, arrived) for word in container["command"]]
        assert command[-1] == spec.command[-1] or command == ["worldsize-sshd"]


def test_kinds_have_what_their_operators_require():
    (torch,) = [m for m in rendered("pytorchjob") if m["kind"] == "PyTorchJob"]
    worker = torch["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert torch["spec"]["nprocPerNode"] == "8" and worker["replicas"] == 2 and worker["restartPolicy"] == "ExitCode"
    assert [c["name"] for c in worker["template"]["spec"]["containers"]] == ["pytorch"]
    (mpi,) = [m for m in rendered("mpijob") if m["kind"] == "MPIJob"]
    launcher, worker = (mpi["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    command = launcher["template"]["spec"]["containers"][0]["command"]
    wait = entry_point.command("python", "worldsize.launch.wait_for_hosts")
    assert command[:8] == [*wait, "/etc/mpi/hostfile", "2222", "mpirun"]
    assert command[command.index("-np") + 1] == "16" and mpi["spec"]["slotsPerWorker"] == 8
    assert launcher["restartPolicy"] == "Never" and "nvidia.com/gpu" not in str(launcher)
    assert worker["template"]["spec"]["containers"][0]["readinessProbe"]["tcpSocket"]["port"] == 2222
    runtime, train = rendered("trainjob")[-2:]
    assert train["spec"]["trainer"]["numProcPerNode"] == 8 and train["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    rules = job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(PERMANENT)}}


def test_a_runtime_of_the_cluster_is_patched():
    (train,) = [m for m in rendered("trainjob", replace(PLAIN, runtime="torch-distributed")) if m["kind"] == "TrainJob"]
    assert train["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    assert train["spec"]["trainer"]["command"][:2] == ["worldsize", "agent"]
    assert train["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"


def test_patches_of_a_cluster_runtime_match_the_jobs_own_runtime():
    everything = replace(EVERYTHING, placement=replace(EVERYTHING.placement, priority=None, spread=None, volcano_queue=None))
    own = pod_templates(rendered("trainjob", everything))[0]["spec"]
    train = rendered("trainjob", replace(everything, runtime="torch-distributed"))[-1]["spec"]
    (patch,) = train["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    patched = node["template"]["spec"]["template"]["spec"]
    # The pod fields that may be patched according to Kubeflow's TrainJob reference; of a container, mounts and security.
    for key in ("imagePullSecrets", "nodeSelector", "securityContext", "terminationGracePeriodSeconds", "tolerations"):
        assert patched[key] == own[key], key
    assert patched["volumes"] == own["volumes"]
    (container,), (patched_container,) = own["containers"], patched["containers"]
    assert {key: container[key] for key in ("name", "securityContext", "volumeMounts")} == patched_container
    trainer = {key: train["trainer"][key] for key in ("command", "env", "image", "resourcesPerNode")}
    expected = {key: container[key] for key in ("command", "env", "image")}
    assert trainer == expected | {"resourcesPerNode": container["resources"]}
    without = rendered("trainjob", replace(PLAIN, runtime="torch-distributed", resources=PodResources()))[-1]["spec"]
    assert "resourcesPerNode" not in without["trainer"]


def test_an_elastic_job_may_change_its_number_of_nodes():
    (job,) = [m for m in rendered("pytorchjob", replace(PLAIN, elastic=(1, 4))) if m["kind"] == "PyTorchJob"]
    policy, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (policy["minReplicas"], worker["replicas"], policy["maxReplicas"]) == (1, 2, 4)
    # With this variable, its processes would reject any other number of nodes.
    assert "WORLDSIZE_NODES" not in str(worker)


@pytest.mark.parametrize(
    ("kind", "elastic", "gang"), [("pytorchjob", None, 2), ("pytorchjob", (1, 4), 1), ("mpijob", None, 2)]
)
def test_volcano_gang_size_is_the_number_of_pods_created_first(kind, elastic, gang):
    job = rendered(kind, replace(PLAIN, elastic=elastic, placement=Placement(volcano_queue="ml")))[-1]
    assert job["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": gang, "queue": "ml"}


def test_a_volcano_queue_of_a_trainjob_is_where_trainer_reads_it():
    """It reads the annotation of the runtime's template, and only creates the PodGroup: the pods must name the scheduler."""
    runtime, job = rendered("trainjob", replace(PLAIN, placement=Placement(volcano_queue="ml")))[-2:]
    assert runtime["spec"]["podGroupPolicy"] == {"volcano": {}}
    assert runtime["spec"]["template"]["metadata"]["annotations"] == {"scheduling.volcano.sh/queue-name": "ml"}
    assert [one["spec"]["schedulerName"] for one in pod_templates(runtime)] == ["volcano"]
    assert "annotations" not in job["metadata"]
    assert all("schedulerName" not in one["spec"] for one in pod_templates(rendered("trainjob")))


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_user_can_be_left_to_the_cluster(kind):
    for template in pod_templates(rendered(kind, replace(PLAIN, fixed_user=False))):
        security = template["spec"]["securityContext"]
        assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


@pytest.mark.parametrize("kind", TARGETS)
def test_the_network_interface_of_open_mpi_can_be_chosen(kind):
    names = ("OMPI_MCA_btl_tcp_if_include", "PRTE_MCA_oob_tcp_if_include", "UCX_NET_DEVICES", "MASTER_PORT")
    for template in pod_templates(rendered(kind, replace(PLAIN, env=tuple((name, "eth0") for name in names)))):
        assert {*names} <= {one["name"] for one in template["spec"]["containers"][0]["env"]}


def test_a_job_without_retries_survives_one_evicted_pod():
    """training-operator fails a job when its pods failed more than backoffLimit times; a single eviction counts."""
    (job,) = [m for m in rendered("pytorchjob", replace(PLAIN, retries=0)) if m["kind"] == "PyTorchJob"]
    assert job["spec"]["runPolicy"]["backoffLimit"] == 1


@pytest.mark.parametrize("kind", TARGETS)
def test_settings_of_the_user_override_the_defaults(kind):
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


def placed(**changes):
    return {"placement": Placement(**changes)}


def device(name, count=1):
    return {"resources": PodResources(gpus=8, devices=((name, count),))}


# What the API server, or the kubelet for container images, would reject.
REJECTED_BY_SERVERS = [
    (placed(queue="team a"), "--queue 'team a' is not a valid name"),
    (placed(queue="a" * 64), "--queue 'aaa.* is not a valid name"),
    (placed(volcano_queue="Team"), "--volcano-queue 'Team' is not a valid name"),
    (placed(priority="high_one"), "--priority 'high_one' is not a valid name"),
    (placed(node_selector=(("gpu", "a 40"),)), "--node-selector gpu=a 40 is not a label"),
    (placed(node_selector=(("-gpu", "a40"),)), "--node-selector -gpu=a40 is not a label"),
    (placed(node_selector=(("a/b/c", "x"),)), "--node-selector a/b/c=x is not a label"),
    (placed(node_selector=(("a", "x"), ("a", "y"))), "--node-selector a: given more than once"),
    (placed(tolerations=(Toleration(""),)), "--toleration '' is not a taint"),
    (placed(tolerations=(Toleration("a", "b c"),)), "--toleration 'a=b c' is not a taint"),
    ({"namespace": "Team_A"}, "--namespace 'Team_A'"),
    ({"namespace": "a" * 64}, "--namespace 'aaa"),
    ({"volumes": ("a..b",)}, "'a..b' is not a valid volume name"),
    ({"volumes": ("a" * 254,)}, "is not a valid volume name"),
    ({"pull_secrets": ("",)}, "--pull-secret '' is not a valid name"),
    ({"pull_secrets": ("a", "a")}, "--pull-secret a: given more than once"),
    ({"secrets": (SecretKey("My Secret", "k", "K"),)}, "--secret 'My Secret' is not a valid name"),
    ({"secrets": (SecretKey("s", "a b", "K"),)}, "--secret s/a b: a key has only letters"),
    ({"secrets": (SecretKey("s", "..k", "K"),)}, "--secret s/..k: a key has only letters"),
    ({"secrets": (SecretKey("s", "k", "1K"),)}, "'1K' cannot be an environment variable"),
    ({"env": (("..A", "x"),)}, "'..A' cannot be an environment variable"),
    ({"env": ((".", "x"),)}, "'.' cannot be an environment variable"),
    ({"env": (("A B", "x"),)}, "'A B' cannot be an environment variable"),
    (device("rdma"), "--resource rdma is not the name of a resource"),
    (device("kubernetes.io/x"), "--resource kubernetes.io/x is not the name of a resource"),
    (device("cpu", 4), "--resource cpu: use --cpu instead"),
    (device("nvidia.com/gpu", 4), "--resource nvidia.com/gpu: use --gpus instead"),
    (
        {"resources": PodResources(gpus=8, devices=(("rdma/ib", 1), ("rdma/ib", 2)))},
        "--resource rdma/ib: given more than once",
    ),
    ({"resources": PodResources(gpus=8, gpu_resource="gpu")}, "--gpu-resource 'gpu' is not the name of a resource"),
    ({"resources": PodResources(gpus=8, gpu_resource="nvidia.com/mig-1g.5gb")}, "use --procs 1 and more --nodes"),
    (device("rdma/ib", 2**31), "--resource rdma/ib 2147483648 must be at most 2147483647"),
    ({"retries": 2**30}, r"--retries 2147483648 \(times --nodes\) must be at most"),
    ({"deadline_s": 2**31}, "--deadline 2147483648 must be at most"),
    ({"grace_s": 2**31}, "--grace 2147483648 must be at most"),
    ({"image": "https://registry.example/worldsize:1"}, "is not a container image"),
    ({"image": "registry.example/Worldsize:1"}, "is not a container image"),
    ({"image": "MyTeam/worldsize:1"}, "is not a container image"),
    ({"image": f"{'a' * 256}:1"}, "is not a container image"),
    ({"image": "worldsize@sha256:0123"}, "is not a container image"),
    ({"image": "worldsize:1 "}, "is not a container image"),
]


@pytest.mark.parametrize(
    "image", ["localhost:5000/a/b:1", "localhost/a:1", "Registry.Example/a__b/c-d:v1.2_3", "me/a@sha256:" + 64 * "0"]
)
def test_references_of_container_images(image):
    rendered("pytorchjob", replace(PLAIN, image=image))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("pytorchjob", {"name": "a" * 55}, "has 55 characters; the limit for a PyTorchJob of this size is 54"),
        ("pytorchjob", {"name": "a" * 54, "nodes": 11}, "is 53"),
        ("mpijob", {"name": "a" * 55}, "is 54"),
        ("trainjob", {"name": "a" * 49}, "is 48"),
        ("pytorchjob", {"name": "9lives"}, "start with a letter"),
        ("pytorchjob", {"name": "R50"}, "lowercase"),
        ("pytorchjob", {"name": "r50-"}, "lowercase"),
        ("pytorchjob", {"name": "r_50"}, "lowercase"),
        ("pytorchjob", {"name": "r50\n"}, "lowercase"),
        ("pytorchjob", {"image": "worldsize:latest"}, "other than latest"),
        ("pytorchjob", {"image": "registry.example:5000/worldsize"}, "use a digest or a tag"),
        ("pytorchjob", {"volumes": ()}, "--volume is required"),
        ("pytorchjob", {"volumes": ("a", "a")}, "--volume a: given more than once"),
        ("pytorchjob", {"volumes": ("Data",)}, "is not a valid volume name"),
        ("pytorchjob", {"resources": PodResources(gpus=4)}, "each process uses one GPU"),
        ("pytorchjob", {"resources": PodResources(gpus=8, memory="lots")}, "expected a quantity"),
        ("pytorchjob", {"resources": PodResources(gpus=8, memory="1Gi", shm="2Gi")}, "must be less than --memory"),
        ("pytorchjob", {"resources": PodResources(gpus=8, memory="2Gi", shm="2048Mi")}, "must be less than --memory"),
        ("pytorchjob", {"resources": PodResources(gpus=8, disk="lots")}, "--disk 'lots': expected a quantity"),
        ("pytorchjob", {"resources": PodResources(gpus=8, cpu="-1")}, "--cpu '-1': expected a quantity"),
        ("pytorchjob", {"nodes": 0}, "--nodes 0 must be at least 1"),
        ("pytorchjob", {"procs": 0, "resources": PodResources()}, "--procs 0 must be at least 1"),
        ("pytorchjob", {"retries": -1}, "--retries -1 must be at least 0"),
        ("pytorchjob", {"grace_s": 0}, "--grace 0 must be at least 1"),
        ("pytorchjob", {"deadline_s": 0}, "--deadline 0 must be at least 1"),
        ("pytorchjob", {"env": (("PET_NNODES", "3"),)}, "reserved, set by the launcher"),
        ("pytorchjob", {"secrets": (SecretKey("s", "k", "WORLDSIZE_ADDRESS"),)}, "ADDRESS: reserved, set by the launcher"),
        ("pytorchjob", {"env": (("A", "1"), ("A", "2"))}, "A: set more than once"),
        ("pytorchjob", {"env": (("A", "1"),), "secrets": (SecretKey("s", "k", "A"),)}, "A: set more than once"),
        ("pytorchjob", {"needs_mpi": True}, "use --on mpijob"),
        ("trainjob", {"needs_mpi": True}, "use --on mpijob"),
        ("pytorchjob", {"elastic": (3, 4)}, "include --nodes 2"),
        ("pytorchjob", {"elastic": (0, 4)}, "must start at 1 or more"),
        ("pytorchjob", {"elastic": (1, 11), "name": "a" * 54}, "is 53"),
        ("mpijob", {"elastic": (1, 2)}, "only supported with --on pytorchjob"),
        ("trainjob", {"elastic": (1, 2)}, "only supported with --on pytorchjob"),
        ("mpijob", {"runtime": "x"}, "only supported with --on trainjob"),
        ("pytorchjob", {"runtime": "x"}, "only supported with --on trainjob"),
        ("trainjob", {"runtime": "x", "placement": Placement(priority="high")}, "omit --runtime"),
        ("trainjob", {"runtime": "x", "placement": Placement(spread="zone")}, "omit --runtime"),
        ("trainjob", {"runtime": "x", "placement": Placement(volcano_queue="ml")}, "omit --runtime or --volcano-queue"),
        *(("pytorchjob", change, message) for change, message in REJECTED_BY_SERVERS),
        ("mpijob", {"fixed_user": False}, "use --on pytorchjob or trainjob"),
    ],
)
def test_specs_that_are_rejected_without_a_cluster(kind, change, message):
    with pytest.raises(UserError, match=message):
        rendered(kind, replace(PLAIN, **change))


# In a pod, the operators set the first line, worldsize the second, and the container image the third.
@pytest.mark.parametrize(
    "name",
    [
        *("PET_NNODES", "OMPI_MCA_orte_default_hostfile", "PRTE_MCA_plm_ssh_args", "MASTER_ADDR"),
        *("WORLDSIZE_NODES", "WORLDSIZE_PROCS", "WORLDSIZE_AGENT", "WORLDSIZE_ADDRESS", "HOME", "USER"),
        *("PATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_MCA_plm_rsh_args"),
    ],
)
def test_reserved_variables(name):
    with pytest.raises(UserError, match=f"{name}: reserved, set by the launcher"):
        rendered("mpijob", replace(PLAIN, env=((name, "x"),)))


@pytest.mark.cluster
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs | odd_specs, targets)
def test_the_server_accepts_every_spec_that_passes_the_offline_checks(cluster, spec, target):
    spec = replace(spec, namespace=cluster.namespace)
    assume(not [*general_problems(spec), *target.problems(spec)])
    for manifest in target.render(spec):
        # The TrainJob webhook requires the runtime, which a dry run does not create.
        if manifest["kind"] != "TrainJob":
            path = KINDS[manifest["kind"]].path(cluster.namespace)
            cluster.request("POST", path, {"dryRun": "All", "fieldValidation": "Strict"}, manifest)


# What kubectl 1.34 reads as a boolean or a number without quotes, and text for comparison.
NOT_TEXT = ["y", "N", "1e-4", "1E3", "1234e56", "0o17", "0O17", "0X1f", "1_0e2", ".5e3", "-2e2", "12e03", "017", "on", "1.5"]
TEXT = ["v1", "1Gi", "e3", "1e", "0o9", "1__0x", "yes!"]


def test_text_stays_text_for_kubectl():
    data = {f"k{i}": text for i, text in enumerate([*NOT_TEXT, *TEXT])}
    written = to_yaml([{"apiVersion": "v1", "data": data, "kind": "ConfigMap", "metadata": {"name": "a"}}])
    assert [f": '{text}'\n" in written for text in NOT_TEXT] == [True] * len(NOT_TEXT)
    assert [f": {text}\n" in written for text in TEXT] == [True] * len(TEXT)
    if kubectl := shutil.which("kubectl"):
        command = [kubectl, "label", "--local", "-f", "-", "x=y", "-o", "json"]
        done = subprocess.run(command, input=written, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout)["data"] == data
