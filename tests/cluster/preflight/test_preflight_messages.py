"""Preflight messages that depend on the kind of job, and on what the cluster has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fake_cluster import is_in
from findings import SPEC, only_problem, preflight
from worldsize.cluster import options
from worldsize.config.recipe import Recipe
from worldsize.errors import UserError


@pytest.mark.parametrize(("on", "ends"), [("pytorchjob", "without limit"), ("mpijob", "retries"), ("trainjob", "retries")])
def test_what_becomes_of_a_pod_with_little_memory(fake_cluster, on, ends):
    spec = replace(SPEC, resources=replace(SPEC.resources, memory="3Gi"))
    remedy = only_problem(preflight(fake_cluster.cluster, spec, on=on), "warning").remedy
    assert ends in remedy and ("without limit" in remedy) == (on == "pytorchjob")


def test_a_range_without_the_number_of_nodes_is_refused_before_the_batch():
    job = options.JobOptions(image="x:1", volume=("v",), nodes=2, elastic="3:4", gpus=0)
    recipe = Recipe(device="cpu", global_batch=256, micro_batch=128)  # cannot be shared by 3 or 4
    with pytest.raises(UserError, match=r"--elastic 3:4 must start at 1 or more and include --nodes 2"):
        options.to_spec(recipe, "digits", "pytorchjob", "team", job)
    # Other kinds refuse the option, with everything else that is wrong.
    assert options.to_spec(recipe, "digits", "mpijob", "team", job).elastic == (3, 4)


def static(*volumes: dict) -> dict:
    return {"items": [{"metadata": {"name": f"pv{i}"}, "spec": spec} for i, spec in enumerate(volumes)]}


LATE = replace(SPEC, volumes=("late",))
PVS = "/api/v1/persistentvolumes"


@pytest.mark.parametrize(
    ("volumes", "level"),
    [
        ([{"storageClassName": "nfs"}], "warning"),
        ([{"storageClassName": "nfs", "claimRef": {"namespace": "team", "name": "late"}}], "warning"),
        ([{"storageClassName": "nfs", "claimRef": {"namespace": "other", "name": "late"}}, {}], "error"),
        (None, "warning"),  # no permission
    ],
)
def test_a_new_claim_of_a_static_volume_needs_no_storage_class(fake_cluster, volumes, level):
    fake_cluster.volume("late", "ReadWriteMany", phase="Pending", storageClassName="nfs")
    if volumes is None:
        fake_cluster.denied.add(("get", "v1"))  # the URL of all PersistentVolumes
    else:
        fake_cluster.objects[PVS] = static(*volumes)
    found = only_problem(preflight(fake_cluster.cluster, LATE), level)
    assert "volume late uses StorageClass nfs, which does not exist" in found.what
    assert ("describe pvc late" in found.remedy) == (level == "warning")


def test_a_job_that_somebody_else_submits_meanwhile_is_not_left_over(fake_cluster, monkeypatch):
    """Deleting its objects, as what is left over of an earlier job, would damage it."""
    fake_cluster.add("ConfigMap", "r50", metadata={"labels": {"app.kubernetes.io/managed-by": "worldsize"}})
    answer = fake_cluster.answer

    def answers(method, path, query, body):
        answered = answer(method, path, query, body)
        if path.endswith("/pytorchjobs/r50") and answered[0] == 404:
            is_in(fake_cluster, "PyTorchJob", "Running")
        return answered

    monkeypatch.setattr(fake_cluster, "answer", answers)
    found = only_problem(preflight(fake_cluster.cluster))
    assert found.what == "PyTorchJob r50 already exists and is Running" and "delete configmaps" not in found.remedy
