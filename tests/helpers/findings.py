"""Helpers for the preflight tests: a job of two nodes and its findings."""

from __future__ import annotations

from dataclasses import replace

from fake_cluster import running
from worldsize.cluster.manifests import load_target
from worldsize.cluster.manifests.spec import PodJobSpec, PodResources, SecretKey
from worldsize.cluster.preflight import runner

SPEC = PodJobSpec(
    name="r50",
    namespace="team",
    image="registry.example/worldsize:1",
    recipe="model: {}\n",
    command=("train", "/etc/worldsize/recipe.yaml"),
    nodes=2,
    procs=8,
    resources=PodResources(gpus=8, cpu="4", memory="16Gi"),
    volumes=("data",),
)
WITH_SECRET = replace(SPEC, secrets=(SecretKey("kaggle", "token", "TOKEN"),))


def preflight(cluster, spec=SPEC, on="pytorchjob"):
    """All findings for this job."""
    kind = load_target(on)
    return list(runner.examine(runner.Context(cluster, (kind.kind,), spec, tuple(kind.render(spec)))))


def only_problem(found, level="error"):
    """The only finding that is not ok; asserts its level."""
    problems = [one for one in found if one.level != "ok"]
    assert [one.level for one in problems] == [level], problems
    return problems[0]


def occupy_gpu(fake_cluster):
    fake_cluster.add("Pod", **running("n0", gpu=1))
