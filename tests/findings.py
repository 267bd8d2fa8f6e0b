"""What preflight finds for a job of two nodes, for its tests."""

from __future__ import annotations

import time
from dataclasses import replace

from apiserver import running
from worldsize.launch import preflight, target
from worldsize.launch.spec import JobSpec, Resources, SecretKey

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
WITH_SECRET = replace(SPEC, secrets=(SecretKey("kaggle", "token", "TOKEN"),))


def look(cluster, spec=SPEC, on="pytorchjob"):
    """All findings for this job."""
    kind = target.load(on)
    return list(preflight.examine(preflight.Context(cluster, (kind.kind,), spec, tuple(kind.render(spec)))))


def the_one(found, level="error"):
    """The only finding that is not ok."""
    bad = [one for one in found if one.level != "ok"]
    assert [one.level for one in bad] == [level], bad
    return bad[0]


def busy(world):
    world.add("Pod", **running("n0", gpu=1))


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
