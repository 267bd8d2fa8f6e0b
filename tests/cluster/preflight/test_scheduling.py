"""Capacity of nodes and quotas: the computation must agree with the rules of Kubernetes."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_cluster import gpu_node, node, quota, running
from worldsize.cluster.preflight import scheduling
from worldsize.jobs.quantities import quantity


# Values from the rules of k8s.io/apimachinery/pkg/api/resource (quantity.go).
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("8", 8),
        (8, 8),
        ("250m", Fraction(1, 4)),
        ("1.5", Fraction(3, 2)),
        (".5Gi", 2**29),
        ("5.", 5),
        ("+2", 2),
        ("-1Ki", -1024),
        ("100n", Fraction(1, 10**7)),
        ("3u", Fraction(3, 10**6)),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1M", 10**6),
        ("65839312Ki", 65839312 * 1024),
        ("1T", 10**12),
        ("2Pi", 2 * 2**50),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1E3", 1000),
        ("12e6", 12 * 10**6),
        ("1e-3", Fraction(1, 1000)),
    ],
)
def test_quantities(text, value):
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1gi", "1K", "0x10", "1e", "1.2.3", "--1", "1Kib"])
def test_invalid_quantities(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


def container(restart=None, **amounts):
    return {"resources": {"requests": amounts}} | ({"restartPolicy": restart} if restart else {})


# From the formula in KEP-753: each init container runs alongside the sidecars before it, the containers alongside all.
@pytest.mark.parametrize(
    ("first", "later", "cpu"),
    [
        ([], [container(cpu="1"), container(cpu="500m")], "1.5"),
        ([container(cpu="2")], [container(cpu="1")], "2"),
        ([container("Always", cpu="2")], [container(cpu="1")], "3"),
        ([container("Always", cpu="2"), container(cpu="4")], [container(cpu="1")], "6"),
        ([container(cpu="4"), container("Always", cpu="2")], [container(cpu="1")], "4"),
    ],
)
def test_resources_of_a_pod(first, later, cpu):
    assert scheduling.amounts({"initContainers": first, "containers": later}) == {"cpu": quantity(cpu)}
    pod = {"initContainers": first, "containers": later, "overhead": {"cpu": "100m", "memory": "1Ki"}}
    assert scheduling.amounts(pod) == {"cpu": quantity(cpu) + Fraction(1, 10), "memory": 1024}
    with_pod_level = pod | container(cpu="9")  # KEP-2837: pod-level resources
    assert scheduling.amounts(with_pod_level) == {"cpu": 9 + Fraction(1, 10), "memory": 1024}


def demand(selector=(), tolerations=(), **amounts):
    names = {"gpu": "nvidia.com/gpu"}
    requested = {names.get(key, key): quantity(amount) for key, amount in amounts.items() if amount}
    return scheduling.Demand(requested | {"pods": Fraction(1)}, dict(selector), list(tolerations))


small = st.integers(0, 6)


@given(
    hosts=st.lists(st.tuples(small, small, st.integers(0, 3)), min_size=1, max_size=3),
    one=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    extra=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    count=st.integers(1, 4),
)
def test_capacity_agrees_with_an_exhaustive_search(hosts, one, extra, count):
    nodes = scheduling.nodes(
        [gpu_node(f"n{i}", gpu, cpu=str(cpu), pods=str(pods)) for i, (cpu, gpu, pods) in enumerate(hosts)], ()
    )
    pod = demand(cpu=one[0], gpu=one[1])
    launcher = demand(cpu=extra[0], gpu=extra[1]) if extra else None
    pods = [one] * count + ([extra] if extra else [])

    def fits(places):
        for i, host in enumerate(hosts):
            here = [pod for pod, place in zip(pods, places, strict=True) if place == i]
            if sum(p[0] for p in here) > host[0] or sum(p[1] for p in here) > host[1] or len(here) > host[2]:
                return False
        return True

    possible = any(fits(places) for places in product(range(len(hosts)), repeat=len(pods)))
    assert (scheduling.capacity(nodes, pod, launcher) >= count) == possible


GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


# Kubernetes documentation, "Taints and Tolerations": operator Equal is the default; an empty key or effect matches any.
@pytest.mark.parametrize(
    ("tolerations", "accepted"),
    [
        ([], False),
        ([{"key": "nvidia.com/gpu", "operator": "Exists"}], True),
        ([{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "nvidia.com/gpu", "value": "present"}], True),
        ([{"key": "nvidia.com/gpu", "value": "absent"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "other", "operator": "Exists"}, {"operator": "Exists", "effect": "NoSchedule"}], True),
    ],
)
def test_taints(tolerations, accepted):
    nodes = scheduling.nodes([node(taints=[GPU])], ())
    assert (scheduling.capacity(nodes, demand(cpu=8, tolerations=tolerations)) == 1) is accepted
    preferred = scheduling.nodes([node(taints=[GPU | {"effect": "PreferNoSchedule"}])], ())
    assert scheduling.capacity(preferred, demand(cpu=8)) == 1


def test_running_pods_use_resources_and_ended_pods_do_not():
    pods = [running("n0", cpu=2), running("n0", "Succeeded", cpu=4), running("n0", "Failed", cpu=4), running("n1", cpu=3)]
    nodes = scheduling.nodes([node("n0"), node("n1"), node("n2")], [*pods, running(None, "Pending", cpu=8)])
    assert [one.free["cpu"] for one in nodes] == [6, 5, 8]
    assert [one.free["pods"] for one in nodes] == [109, 109, 110]
    assert scheduling.capacity(nodes, demand(cpu=3)) == 2 + 1 + 2


A40 = {"gpu.nvidia.com/model": "A40"}


@pytest.mark.parametrize(
    ("hosts", "requested", "why"),
    [
        ([], demand(gpu=8), "the cluster has no nodes"),
        (
            [gpu_node("a", 4), gpu_node("b", 2), node("c")],
            demand(gpu=8),
            "8 nvidia.com/gpu per node requested; the largest node that accepts this pod has 4 free (of 4)",
        ),
        (
            [gpu_node("a", 4, cpu="2")],
            demand(cpu=4, gpu=8),
            "8 nvidia.com/gpu per node requested; the largest node that accepts this pod has 4 free (of 4)",
        ),
        (
            [gpu_node("a", 8, taints=[GPU]), gpu_node("b", 2)],
            demand(gpu=8),
            "8 nvidia.com/gpu per node requested; the largest node that accepts this pod has 2 free (of 2) "
            "(of the other nodes, 1 is tainted nvidia.com/gpu=present:NoSchedule)",
        ),
        (
            [gpu_node("a", 8, taints=[GPU]), gpu_node("b", 8, taints=[GPU]), node("c")],
            demand(gpu=8, selector=A40),
            "none of the 3 nodes accepts this pod: 3 are not labeled gpu.nvidia.com/model=A40",
        ),
        ([gpu_node("a", 8)], demand(**{"amd.com/gpu": 1}), "no node has amd.com/gpu; available: nvidia.com/gpu"),
        ([node()], demand(memory="64Gi"), "64Gi memory per node requested; the largest node that accepts this pod has "
         "32Gi free (of 32Gi)"),
        (
            [node(pods="2"), node("b", taints=[GPU])],
            demand(cpu=1),
            "1 pods per node requested; the largest node that accepts this pod has 0 free (of 2) "
            "(of the other nodes, 1 is tainted nvidia.com/gpu=present:NoSchedule)",
        ),
        (
            [node("a", cpu="2", memory="64Gi"), node("b", cpu="16", memory="8Gi")],
            demand(cpu=4, memory="16Gi"),
            "no single node has all of this free: cpu 4, memory 16Gi",
        ),
        ([gpu_node("a", 8)], demand(cpu=4, gpu=8), "each pod needs cpu 4, nvidia.com/gpu 8"),
        (
            [gpu_node("a", 8), gpu_node("b", 4), gpu_node("busy", 8)],
            demand(gpu=8),
            "each pod needs nvidia.com/gpu 8; of the other nodes, the largest has 6 nvidia.com/gpu free (of 8)",
        ),
    ],
)  # fmt: skip
def test_reasons_for_missing_capacity(hosts, requested, why):
    pods = [running("n0", cpu=0), running("n0", cpu=0), running("busy", gpu=2)]
    assert scheduling.shortage(scheduling.nodes(hosts, pods), requested) == why


ONE = {"containers": [{"resources": {side: {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "8"}}} for side in ["requests"]]}
ONE["containers"][0]["resources"]["limits"] = ONE["containers"][0]["resources"]["requests"]
NOTHING = {"containers": [{}]}
LIMITED = {"containers": [{"resources": {"limits": {"cpu": "1"}}}]}


@pytest.mark.parametrize(
    ("quota", "pods", "over"),
    [
        (quota({"cpu": "8"}), [(2, ONE)], []),
        (quota({"cpu": "8"}, {"cpu": "1m"}), [(2, ONE)], ["cpu: 8 requested, 0.001 of 8 in use"]),
        (quota({"limits.cpu": "7"}), [(2, ONE)], ["limits.cpu: 8 requested, 0 of 7 in use"]),
        (
            quota({"requests.nvidia.com/gpu": "16"}, {"requests.nvidia.com/gpu": "8"}),
            [(2, ONE)],
            ["requests.nvidia.com/gpu: 16 requested, 8 of 16 in use"],
        ),
        (quota({"memory": "16Gi", "pods": "2"}), [(2, ONE), (1, NOTHING)], ["pods: 3 requested, 0 of 2 in use"]),
        (quota({"count/pods": "1"}), [(2, ONE)], ["count/pods: 2 requested, 0 of 1 in use"]),
        (quota({"services": "0", "requests.storage": "0"}), [(2, ONE)], []),
        # A quota that was lowered below its usage only affects pods that request the resource.
        (quota({"nvidia.com/gpu": "0", "cpu": "1"}, {"cpu": "4"}), [(1, NOTHING)], []),
        (quota({"cpu": "1"}, scopes=["BestEffort"]), [(2, ONE)], []),
        (quota({"pods": "1"}, scopes=["BestEffort"]), [(2, NOTHING)], ["pods: 2 requested, 0 of 1 in use"]),
        (quota({"pods": "1"}, scopes=["BestEffort"]), [(2, LIMITED)], []),
        (quota({"cpu": "1"}, scopes=["Terminating"]), [(2, ONE)], []),
        (quota({"cpu": "1"}, scopes=["NotTerminating", "NotBestEffort"]), [(1, ONE)], ["cpu: 4 requested, 0 of 1 in use"]),
        (
            quota({"pods": "0"}, scopeSelector={"matchExpressions": [
                {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}),
            [(1, ONE), (1, ONE | {"priorityClassName": "high"})],
            ["pods: 1 requested, 0 of 0 in use"],
        ),
        ({"metadata": {"name": "new"}, "spec": {"hard": {"pods": "1"}}}, [(2, ONE)], ["pods: 2 requested, 0 of 1 in use"]),
    ],
)  # fmt: skip
def test_quotas(quota, pods, over):
    assert scheduling.over_quota(quota, pods) == over
