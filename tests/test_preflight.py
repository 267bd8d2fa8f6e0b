"""Before a run: servers that are away, rights, kinds that cannot be used, what makes way, and the command."""

from __future__ import annotations

import re
import socket
import time
from dataclasses import replace

import pytest
import yaml

from apiserver import PLURALS, KeepingWorld, gpu_node, node, serve
from findings import SPEC, WITH_SECRET, busy, look, the_one, wait_for
from worldsize import cli
from worldsize.launch import filepod, jobs, preflight, target
from worldsize.launch.answers import ClusterError
from worldsize.launch.follow import Follower
from worldsize.launch.kinds import KINDS
from worldsize.launch.options import Job
from worldsize.launch.pod import network_policy


@pytest.mark.parametrize("on", target.TARGETS)
def test_a_healthy_cluster_has_nothing_to_be_said_against(world, on):
    found = look(world.cluster, on=on)
    assert {one.level for one in found} == {"ok"}, found
    assert len(found) >= 9
    assert "room for 2 pods of cpu 4, memory 16Gi, nvidia.com/gpu 8" in [one.what for one in found]


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
