"""Job specs for tests: a plain one, one that uses every option, and a strategy for specs that pass the offline checks."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from worldsize.cluster.manifests import TARGETS, load_target
from worldsize.cluster.manifests.spec import Placement, PodJobSpec, PodResources, SecretKey, Toleration

TORCH = load_target("pytorchjob")

PLAIN = PodJobSpec(
    name="r50",
    namespace="ml",
    image="registry.example/me/worldsize:torch-0123456789ab",
    recipe="epochs: 1\n",
    command=("train", "/run/worldsize/recipe.yaml", "--out", "/mnt/imagenet/runs", "--name", "r50", "--autoresume"),
    nodes=2,
    procs=8,
    resources=PodResources(gpus=8, cpu="90", memory="700Gi", shm="64Gi"),
    volumes=("imagenet",),
)

EVERYTHING = replace(
    PLAIN,
    resources=replace(PLAIN.resources, disk="100Gi", devices=(("rdma/ib", 1),)),
    volumes=("imagenet", "results"),
    env=(("NCCL_SOCKET_IFNAME", "eth0"),),
    secrets=(SecretKey("wandb", "WANDB_API_KEY", "WANDB_API_KEY"),),
    pull_secrets=("registry",),
    placement=Placement(
        node_selector=(("gpu", "a40"),),
        tolerations=(Toleration("nvidia.com/gpu", effect="NoSchedule"), Toleration("team", "ml")),
        spread="zone",
        priority="high",
        queue="team",
        volcano_queue="ml",
    ),
    deadline_s=86400,
)

_label = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
_cpu = st.sampled_from(["250m", "1", "7.5", "90"])
_memory = st.sampled_from(["2Gi", "700Gi", "1500M"])
_resources = st.builds(
    PodResources,
    cpu=st.none() | _cpu,
    memory=st.none() | _memory,
    shm=st.sampled_from(["64Mi", "1Gi"]),
    disk=st.none() | st.just("20Gi"),
    devices=st.just(()) | st.just((("rdma/ib", 1),)),
)
_placement = st.builds(
    Placement,
    node_selector=st.lists(st.tuples(_label, _label), max_size=2, unique_by=lambda pair: pair[0]).map(tuple),
    tolerations=st.lists(
        st.builds(Toleration, _label, st.just("") | _label, st.sampled_from(["", "NoSchedule", "NoExecute"])), max_size=2
    ).map(tuple),
    spread=st.none() | st.sampled_from(["host", "zone"]),
    queue=st.none() | _label,
)
_variable = st.from_regex(r"[A-NQ-V][A-Z_]{0,8}", fullmatch=True)
_value = st.text("AB =$()'\"", max_size=8) | st.sampled_from(["$(HOME)", "$$", "$$(A)", "a$"])
specs = st.builds(
    PodJobSpec,
    name=st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
    namespace=st.just("ml"),
    image=st.sampled_from(["registry.example/me/worldsize:1", "worldsize@sha256:" + 64 * "a"]),
    recipe=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=40),
    command=st.just(PLAIN.command),
    nodes=st.integers(1, 20),
    procs=st.integers(1, 8),
    resources=_resources,
    volumes=st.lists(_label, min_size=1, max_size=3, unique=True).map(tuple),
    env=st.lists(st.tuples(_variable, _value), max_size=3).map(lambda pairs: tuple(dict(pairs).items())),
    secrets=st.lists(st.builds(SecretKey, _label, _label, st.sampled_from(["TOKEN", "NCCL_DEBUG"])), max_size=1).map(tuple),
    pull_secrets=st.lists(_label, max_size=1).map(tuple),
    placement=_placement,
    retries=st.integers(0, 10),
    deadline_s=st.none() | st.integers(1, 10**6),
    grace_s=st.integers(1, 3600),
)
# Values that may be invalid: either the offline checks or nobody refuses them.
_odd = st.text("aA1-_./ :", max_size=6) | st.text("a", min_size=60, max_size=66)
odd_specs = st.one_of(
    st.builds(lambda one, name: replace(one, image=f"{name}:1"), specs, _odd),
    st.builds(lambda one, names: replace(one, pull_secrets=tuple(names)), specs, st.lists(_odd, max_size=2)),
    st.builds(lambda one, name: replace(one, pull_secrets=(name, name)), specs, _label),
    st.builds(lambda one, **changes: replace(one, placement=Placement(**changes)), specs, queue=_odd),
    st.builds(lambda one, **changes: replace(one, placement=Placement(**changes)), specs, volcano_queue=_odd),
    st.builds(lambda one, pair: replace(one, placement=Placement(node_selector=(pair,))), specs, st.tuples(_odd, _odd)),
    st.builds(
        lambda one, key, value: replace(one, placement=Placement(tolerations=(Toleration(key, value),))), specs, _odd, _odd
    ),
    st.builds(lambda one, name: replace(one, volumes=(name,)), specs, _odd),
    st.builds(lambda one, name: replace(one, env=((name, "x"),)), specs, _odd),
    st.builds(lambda one, names: replace(one, secrets=(SecretKey(*names),)), specs, st.tuples(_odd, _odd, _odd)),
    st.builds(lambda one, name: replace(one, resources=PodResources(devices=((name, 1),))), specs, _odd),
    st.builds(
        lambda one, flag, number: replace(one, **{flag: number}),
        specs,
        st.sampled_from(["retries", "grace_s", "deadline_s"]),
        st.integers(2**31 - 2, 2**31 + 1) | st.integers(2**63 - 1, 2**64),
    ),
)
targets = st.sampled_from([load_target(name) for name in TARGETS])
