"""Jobs on a pretended cluster: what makes way for what, and what is stopped and deleted."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from apiserver import BrokenOff, KeepingWorld, is_in
from specs import PLAIN, TORCH
from worldsize import cli
from worldsize.errors import UserError
from worldsize.launch import jobs, target
from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.cluster import Cluster
from worldsize.launch.pod import labels
from worldsize.launch.spec import Placement

WORLD = KeepingWorld
SPEC = replace(PLAIN, namespace="team")


def submit(world, spec=SPEC, on=TORCH):
    jobs.submit(world.cluster, spec, on.render(spec))


def there(world):
    """(kind, name) of what is there beside the world's own."""
    own = {*KeepingWorld().objects}
    return sorted((path.split("/")[-2], path.split("/")[-1]) for path in world.objects if path not in own)


@pytest.mark.parametrize("on", target.TARGETS)
def test_what_is_sent_goes_with_its_job_whoever_deletes_it(world, on):
    kind = target.load(on)
    submit(world, on=kind)
    assert len(there(world)) == len(kind.render(SPEC))
    world.cluster.delete(kind.kind, "r50")
    assert there(world) == []


def test_a_refused_job_leaves_nothing(world):
    world.refuse("PyTorchJob", 422, "the webhook says no")
    with pytest.raises(ClusterError, match="the webhook says no"):
        submit(world)
    assert there(world) == []


def unanswered(world, monkeypatch, method, plural, status=None):
    """What is asked of this kind is done, and the connection lost before the answer; or it is refused with ``status``."""
    answer = world.answer

    def broken(asked, path, query, body):
        if asked != method or path.split("/namespaces/")[1].split("/")[1] != plural:
            return answer(asked, path, query, body)
        if status is not None:
            return status, {"message": "the webhook says no"}
        answer(asked, path, query, body)
        return 201, BrokenOff(b"{")

    monkeypatch.setattr(world, "answer", broken)


@pytest.mark.parametrize("plural", ["configmaps", "networkpolicies", "pytorchjobs"])
def test_a_job_whose_sending_is_not_answered_leaves_nothing(world, monkeypatch, plural):
    unanswered(world, monkeypatch, "POST", plural)
    with pytest.raises(Unreachable):
        submit(world)
    assert there(world) == []


@pytest.mark.parametrize("status", [None, 422])
def test_what_others_have_under_the_jobs_name_stays(world, monkeypatch, status):
    """Whether its creation is not answered, or refused for another reason than that it is there."""
    world.add("PyTorchJob", "r50", metadata={"labels": labels("r50") if status else {}})
    monkeypatch.setattr(jobs, "every", lambda _: [])
    before = there(world)
    unanswered(world, monkeypatch, "POST", "pytorchjobs", status)
    with pytest.raises(ClusterError):
        submit(world)
    assert there(world) == before


def test_a_job_that_runs_is_not_given_up_where_its_objects_cannot_be_made_its_own(world, monkeypatch, capsys):
    unanswered(world, monkeypatch, "PATCH", "configmaps", 403)
    submit(world)
    assert "r50 is sent; what was made for it goes with it only where worldsize deletes it" in capsys.readouterr().err
    assert ("pytorchjobs", "r50") in there(world)


@pytest.mark.parametrize("phase", ["Failed", "Suspended"])
def test_what_failed_or_was_stopped_makes_way(world, phase):
    is_in(world, "MPIJob", phase)
    submit(world)
    assert [kind for kind, _ in there(world)] == ["configmaps", "networkpolicies", "pytorchjobs"]


def test_what_waits_in_kueues_queue_is_neither_replaced_nor_stopped_nor_swept_away(world):
    """Kueue itself suspends what it queues, and starts what others suspend."""
    queued = replace(SPEC, placement=Placement(queue="team"))
    submit(world, queued)
    world.cluster.patch("PyTorchJob", "r50", {"status": {"conditions": [{"type": "Suspended", "status": "True"}]}})
    before = there(world)
    with pytest.raises(UserError, match=r"Suspended, in Kueue.s queue team, already.*delete r50 --namespace team ends it"):
        submit(world, queued)
    job = jobs.find(world.cluster, "r50")
    with pytest.raises(UserError, match="Kueue decides when r50 runs"):
        jobs.stop(world.cluster, job)
    assert jobs.older_than([job], timedelta(seconds=-60)) == []
    assert there(world) == before


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("Succeeded", "has succeeded already.*worldsize delete r50 --namespace team"),
        ("Running", "is Running already"),
        ("Restarting", "is Restarting already"),
        ("Created", "is Pending already"),
        (None, "is Created already"),
    ],
)
def test_what_runs_or_has_succeeded_does_not(world, phase, words):
    is_in(world, "PyTorchJob", phase)
    before = there(world)
    with pytest.raises(UserError, match=words):
        submit(world)
    assert there(world) == before


def test_stopping_suspends_and_what_has_ended_cannot_be_stopped(world):
    for on in target.TARGETS:
        kind = target.load(on)
        submit(world, replace(SPEC, name=f"a-{on}"), kind)
        jobs.stop(world.cluster, jobs.find(world.cluster, f"a-{on}"))
        job = world.cluster.get(kind.kind, f"a-{on}")
        # Kubeflow's reference: in the runPolicy of the training-operator's and the mpi-operator's kinds, else in the spec.
        assert (job["spec"] if on == "trainjob" else job["spec"]["runPolicy"])["suspend"] is True
    is_in(world, "PyTorchJob", "Succeeded")
    with pytest.raises(UserError, match="r50 has succeeded already"):
        jobs.stop(world.cluster, jobs.find(world.cluster, "r50"))


def test_deleting_takes_all_that_was_made_for_the_job_and_nothing_else(world):
    submit(world, on=target.load("trainjob"))
    # As a job is whose sender was killed before it could say to whom the others belong.
    for one in world.objects.values():
        one["metadata"].pop("ownerReferences", None)
    is_in(world, "PyTorchJob", "Failed", "other")
    world.add("ConfigMap", "other", metadata={"labels": labels("other")})
    assert cli.main(["delete", "r50", "--namespace", "team"]) == 0
    assert there(world) == [("configmaps", "other"), ("pytorchjobs", "other")]


def test_only_what_has_ended_and_is_old_enough_is_swept_out(world, capsys):
    for name, phase, days in (("a", "Failed", 8), ("b", "Succeeded", 9), ("c", "Running", 9), ("d", "Suspended", 8)):
        created = datetime.now(timezone.utc) - timedelta(days=days)
        is_in(world, "PyTorchJob", phase, name, creationTimestamp=f"{created:%Y-%m-%dT%H:%M:%SZ}")
    left = [["abcd", "10d"], ["ac d", "205h"], ["c", "8640m"]]
    for names, older in left:
        assert cli.main(["delete", "--all", "--older", older, "--namespace", "team"]) == 0
        assert [name for _, name in there(world)] == [*names.replace(" ", "")]
    assert "nothing to remove" in capsys.readouterr().out
    for wrong in (["--older", "7d"], ["a", "--all"], [], ["--all", "--older", "7"], ["--all", "--older", "1w"]):
        assert cli.main(["delete", *wrong, "--namespace", "team"]) == 64
    assert [name for _, name in there(world)] == ["c"]


@pytest.mark.parametrize(
    ("context", "namespace", "options"),
    [(None, None, ""), (None, "team", " --namespace team"), ("c", "team", " --namespace team --context c")],
)
def test_commands_to_type_name_the_cluster_as_it_was_named(world, context, namespace, options):
    assert Cluster(context, namespace).command("logs", "r50") == f"worldsize logs r50{options}"


def test_what_preflight_refuses_ends_with_2_and_is_not_sent(world, capsys):
    # A volume that is not there.
    job = ("--on", "pytorchjob", "--image", "worldsize:1", "--volume", "absent", "--name", "r50", "--gpus", "0")
    assert cli.main(["train", "digits", *job, "--namespace", "team"]) == 2
    assert "there is no volume absent" in capsys.readouterr().err
    assert there(world) == []
    assert cli.main(["train", "digits", *job, "--no-preflight", "--detach", "--namespace", "team"]) == 0
    assert ("pytorchjobs", "r50") in there(world)


@pytest.mark.parametrize("on", ["pytorchjob", "mpijob"])
def test_a_jobs_selector_finds_its_pods_and_not_those_that_look_into_a_volume_of_its_name(on):
    kind = target.load(on)
    wanted = dict(pair.split("=") for pair in kind.selector("r50").split(",")).items()
    assert wanted <= labels("r50").items()
    assert not wanted <= labels("r50", "files").items() and not wanted <= labels("r50", "data").items()
    assert not wanted <= labels("other").items()
