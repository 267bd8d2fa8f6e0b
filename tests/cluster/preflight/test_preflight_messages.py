"""Preflight messages that depend on the kind of job, and on what the cluster has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from findings import SPEC, only_problem, preflight


@pytest.mark.parametrize(("on", "ends"), [("pytorchjob", "without limit"), ("mpijob", "retries"), ("trainjob", "retries")])
def test_what_becomes_of_a_pod_with_little_memory(fake_cluster, on, ends):
    spec = replace(SPEC, resources=replace(SPEC.resources, memory="3Gi"))
    remedy = only_problem(preflight(fake_cluster.cluster, spec, on=on), "warning").remedy
    assert ends in remedy and ("without limit" in remedy) == (on == "pytorchjob")
