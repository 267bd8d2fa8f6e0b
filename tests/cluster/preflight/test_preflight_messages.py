"""Preflight messages that depend on the kind of job, and on what the cluster has."""

from __future__ import annotations

from dataclasses import replace

import pytest

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
