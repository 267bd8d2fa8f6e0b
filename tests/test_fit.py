"""Room on nodes and in quotas: does our arithmetic agree with Kubernetes' rules?"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apiserver import gpu_node, node, quota, running
from worldsize.launch import fit
from worldsize.launch.quantities import quantity


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
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity(text)


def container(restart=None, **amounts):
    return {"resources": {"requests": amounts}} | ({"restartPolicy": restart} if restart else {})


# From KEP-753's formula: each init container runs beside the sidecars before it, the containers beside all of them.
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
def test_what_a_pod_takes(first, later, cpu):
    assert fit.amounts({"initContainers": first, "containers": later}) == {"cpu": quantity(cpu)}
    whole = {"initContainers": first, "containers": later, "overhead": {"cpu": "100m", "memory": "1Ki"}}
    assert fit.amounts(whole) == {"cpu": quantity(cpu) + Fraction(1, 10), "memory": 1024}
    of_the_pod = whole | container(cpu="9")  # KEP-2837: resources of the pod as a whole
    assert fit.amounts(of_the_pod) == {"cpu": 9 + Fraction(1, 10), "memory": 1024}


def demand(selector=(), tolerations=(), **amounts):
    names = {"gpu": "nvidia.com/gpu"}
    asked = {names.get(key, key): quantity(amount) for key, amount in amounts.items() if amount}
    return fit.Demand(asked | {"pods": Fraction(1)}, dict(selector), list(tolerations))


small = st.integers(0, 6)


@given(
    hosts=st.lists(st.tuples(small, small, st.integers(0, 3)), min_size=1, max_size=3),
    one=st.tuples(st.integers(1, 4), st.integers(0, 3)),
    beside=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    count=st.integers(1, 4),
)
def test_room_agrees_with_trying_every_placement(hosts, one, beside, count):
    nodes = fit.nodes([gpu_node(f"n{i}", gpu, cpu=str(cpu), pods=str(pods)) for i, (cpu, gpu, pods) in enumerate(hosts)], ())
    pod = demand(cpu=one[0], gpu=one[1])
    launcher = demand(cpu=beside[0], gpu=beside[1]) if beside else None
    pods = [one] * count + ([beside] if beside else [])

    def fits(places):
        for i, host in enumerate(hosts):
            here = [pod for pod, place in zip(pods, places, strict=True) if place == i]
            if sum(p[0] for p in here) > host[0] or sum(p[1] for p in here) > host[1] or len(here) > host[2]:
                return False
        return True

    possible = any(fits(places) for places in product(range(len(hosts)), repeat=len(pods)))
    assert (fit.room(nodes, pod, launcher) >= count) == possible


GPU = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


# Kubernetes' documentation, "Taints and Tolerations": operator Equal is the default, an empty key or effect is any.
@pytest.mark.parametrize(
    ("tolerations", "taken"),
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
def test_taints(tolerations, taken):
    nodes = fit.nodes([node(taints=[GPU])], ())
    assert (fit.room(nodes, demand(cpu=8, tolerations=tolerations)) == 1) is taken
    preferred = fit.nodes([node(taints=[GPU | {"effect": "PreferNoSchedule"}])], ())
    assert fit.room(preferred, demand(cpu=8)) == 1


def test_what_runs_on_a_node_is_taken_and_what_has_ended_is_not():
    there = [running("n0", cpu=2), running("n0", "Succeeded", cpu=4), running("n0", "Failed", cpu=4), running("n1", cpu=3)]
    nodes = fit.nodes([node("n0"), node("n1"), node("n2")], [*there, running(None, "Pending", cpu=8)])
    assert [one.free["cpu"] for one in nodes] == [6, 5, 8]
    assert [one.free["pods"] for one in nodes] == [109, 109, 110]
    assert fit.room(nodes, demand(cpu=3)) == 2 + 1 + 2


A40 = {"gpu.nvidia.com/model": "A40"}


@pytest.mark.parametrize(
    ("hosts", "asked", "why"),
    [
        ([], demand(gpu=8), "the cluster has no nodes"),
        (
            [gpu_node("a", 4), gpu_node("b", 2), node("c")],
            demand(gpu=8),
            "8 nvidia.com/gpu per node asked for; the largest node that would take this pod has 4 free (of 4)",
        ),
        (
            [gpu_node("a", 4, cpu="2")],
            demand(cpu=4, gpu=8),
            "8 nvidia.com/gpu per node asked for; the largest node that would take this pod has 4 free (of 4)",
        ),
        (
            [gpu_node("a", 8, taints=[GPU]), gpu_node("b", 2)],
            demand(gpu=8),
            "8 nvidia.com/gpu per node asked for; the largest node that would take this pod has 2 free (of 2) "
            "(of the other nodes 1 is tainted nvidia.com/gpu=present:NoSchedule)",
        ),
        (
            [gpu_node("a", 8, taints=[GPU]), gpu_node("b", 8, taints=[GPU]), node("c")],
            demand(gpu=8, selector=A40),
            "none of the 3 nodes would take this pod: 3 are not labelled gpu.nvidia.com/model=A40",
        ),
        ([gpu_node("a", 8)], demand(**{"amd.com/gpu": 1}), "no node offers amd.com/gpu; they offer nvidia.com/gpu"),
        ([node()], demand(memory="64Gi"), "64Gi memory per node asked for; the largest node that would take this pod has "
         "32Gi free (of 32Gi)"),
        (
            [node(pods="2"), node("b", taints=[GPU])],
            demand(cpu=1),
            "1 pods per node asked for; the largest node that would take this pod has 0 free (of 2) "
            "(of the other nodes 1 is tainted nvidia.com/gpu=present:NoSchedule)",
        ),
        (
            [node("a", cpu="2", memory="64Gi"), node("b", cpu="16", memory="8Gi")],
            demand(cpu=4, memory="16Gi"),
            "no node has all of it free at once: cpu 4, memory 16Gi",
        ),
        ([gpu_node("a", 8)], demand(cpu=4, gpu=8), "each takes cpu 4, nvidia.com/gpu 8"),
        (
            [gpu_node("a", 8), gpu_node("b", 4), gpu_node("busy", 8)],
            demand(gpu=8),
            "each takes nvidia.com/gpu 8; of the other nodes the largest has 6 nvidia.com/gpu free (of 8)",
        ),
    ],
)  # fmt: skip
def test_why_there_is_no_room(hosts, asked, why):
    pods = [running("n0", cpu=0), running("n0", cpu=0), running("busy", gpu=2)]
    assert fit.shortage(fit.nodes(hosts, pods), asked) == why


ONE = {"containers": [{"resources": {side: {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "8"}}} for side in ["requests"]]}
ONE["containers"][0]["resources"]["limits"] = ONE["containers"][0]["resources"]["requests"]
NOTHING = {"containers": [{}]}
LIMITED = {"containers": [{"resources": {"limits": {"cpu": "1"}}}]}


@pytest.mark.parametrize(
    ("quota", "pods", "over"),
    [
        (quota({"cpu": "8"}), [(2, ONE)], []),
        (quota({"cpu": "8"}, {"cpu": "1m"}), [(2, ONE)], ["cpu: 8 asked for, 0.001 of 8 in use"]),
        (quota({"limits.cpu": "7"}), [(2, ONE)], ["limits.cpu: 8 asked for, 0 of 7 in use"]),
        (
            quota({"requests.nvidia.com/gpu": "16"}, {"requests.nvidia.com/gpu": "8"}),
            [(2, ONE)],
            ["requests.nvidia.com/gpu: 16 asked for, 8 of 16 in use"],
        ),
        (quota({"memory": "16Gi", "pods": "2"}), [(2, ONE), (1, NOTHING)], ["pods: 3 asked for, 0 of 2 in use"]),
        (quota({"count/pods": "1"}), [(2, ONE)], ["count/pods: 2 asked for, 0 of 1 in use"]),
        (quota({"services": "0", "requests.storage": "0"}), [(2, ONE)], []),
        # A quota that was lowered below what is used hinders only those who ask for some of it.
        (quota({"nvidia.com/gpu": "0", "cpu": "1"}, {"cpu": "4"}), [(1, NOTHING)], []),
        (quota({"cpu": "1"}, scopes=["BestEffort"]), [(2, ONE)], []),
        (quota({"pods": "1"}, scopes=["BestEffort"]), [(2, NOTHING)], ["pods: 2 asked for, 0 of 1 in use"]),
        (quota({"pods": "1"}, scopes=["BestEffort"]), [(2, LIMITED)], []),
        (quota({"cpu": "1"}, scopes=["Terminating"]), [(2, ONE)], []),
        (quota({"cpu": "1"}, scopes=["NotTerminating", "NotBestEffort"]), [(1, ONE)], ["cpu: 4 asked for, 0 of 1 in use"]),
        (
            quota({"pods": "0"}, scopeSelector={"matchExpressions": [
                {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}),
            [(1, ONE), (1, ONE | {"priorityClassName": "high"})],
            ["pods: 1 asked for, 0 of 0 in use"],
        ),
        ({"metadata": {"name": "new"}, "spec": {"hard": {"pods": "1"}}}, [(2, ONE)], ["pods: 2 asked for, 0 of 1 in use"]),
    ],
)  # fmt: skip
def test_quotas(quota, pods, over):
    assert fit.over_quota(quota, pods) == over
