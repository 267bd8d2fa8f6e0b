"""The pod that all kinds of jobs share (pure): what is in it, what it may do, where it may run."""

from __future__ import annotations

from typing import Any

import yaml

from worldsize import __version__
from worldsize.launch.spec import RECIPE, VOLUMES, JobSpec

Object = dict[str, Any]

HOME = "/home/worldsize"
# The image's user; numeric, because the kubelet must see that it is not root.
USER = 1000
RUN_LABEL = "app.kubernetes.io/instance"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# What Pod Security calls restricted.
POD_SECURITY: Object = {
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "runAsGroup": USER,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def labels(name: str, component: str = "training") -> dict[str, str]:
    """What every object of ours bears; RUN_LABEL tells one run's from another's."""
    return {
        "app.kubernetes.io/component": component,
        RUN_LABEL: name,
        "app.kubernetes.io/managed-by": "worldsize",
        "app.kubernetes.io/name": "worldsize",
        "app.kubernetes.io/part-of": "worldsize",
        "app.kubernetes.io/version": __version__,
    }


def training_labels(name: str) -> dict[str, str]:
    """Of `labels` those that a run's own pods have and no others: a volume of the same name may have pods as well."""
    return {"app.kubernetes.io/component": "training", RUN_LABEL: name}


def queue_of(job: Object) -> str | None:
    """The Kueue queue that decides when the job runs."""
    queue: str | None = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
    return queue


def metadata(spec: JobSpec, name: str | None = None) -> Object:
    """Name, namespace and labels of an object of the job."""
    return {"name": name or spec.name, "namespace": spec.namespace, "labels": labels(spec.name)}


def job_metadata(spec: JobSpec) -> Object:
    """The same of the job object itself, which is what Kueue queues."""
    whole = metadata(spec)
    if spec.placement.queue:
        whole["labels"] |= {QUEUE_LABEL: spec.placement.queue}
    return whole


def template(spec: JobSpec, container: Object, resources: bool = True) -> Object:
    """The pod template with this one container, which is completed; ``resources``: whether it computes."""
    pod: Object = {
        "automountServiceAccountToken": False,
        "containers": [_container(spec, container, resources)],
        "enableServiceLinks": False,
        "securityContext": POD_SECURITY,
        "terminationGracePeriodSeconds": spec.grace_s,
        "volumes": _volumes(spec, resources),
    }
    place = spec.placement
    if spec.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in spec.pull_secrets]
    if place.node_selector:
        pod["nodeSelector"] = dict(place.node_selector)
    if place.tolerations:
        pod["tolerations"] = [_toleration(t.key, t.value, t.effect) for t in place.tolerations]
    if place.priority:
        pod["priorityClassName"] = place.priority
    if place.spread:
        pod["topologySpreadConstraints"] = [_spread(spec.name, place.spread)]
    return {
        "metadata": {
            # A mesh's sidecar never ends, and so neither would the job; old and new versions read one of the two.
            "annotations": {"sidecar.istio.io/inject": "false"},
            "labels": labels(spec.name) | {"sidecar.istio.io/inject": "false"},
        },
        "spec": pod,
    }


def environment(spec: JobSpec) -> list[Object]:
    """The variables of every process, the user's included, by name."""
    fixed = {
        "HOME": HOME,
        "NCCL_DEBUG": "WARN",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        # mpirun gives its ranks a terminal that nobody looks at.
        "TTY_COMPATIBLE": "0",
        "USER": "worldsize",
    }
    if spec.elastic is None:
        fixed |= {"WORLDSIZE_NODES": str(spec.nodes), "WORLDSIZE_PROCS": str(spec.procs)}
    hidden = {secret.variable for secret in spec.secrets}
    plain = [{"name": name, "value": value} for name, value in (fixed | dict(spec.env)).items() if name not in hidden]
    secret = [{"name": s.variable, "valueFrom": {"secretKeyRef": {"key": s.key, "name": s.secret}}} for s in spec.secrets]
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return sorted([*plain, *secret, address], key=lambda variable: str(variable["name"]))


def network_policy(spec: JobSpec) -> Object:
    """Only the job's own pods may connect to its pods: what they say to one another is not authenticated."""
    own = {"matchLabels": training_labels(spec.name)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(spec),
        "spec": {"ingress": [{"from": [{"podSelector": own}]}], "podSelector": own, "policyTypes": ["Ingress"]},
    }


def config_map(spec: JobSpec) -> Object:
    """The recipe, as a file of the pods."""
    return {
        "apiVersion": "v1",
        "data": {RECIPE.name: spec.recipe},
        "immutable": True,
        "kind": "ConfigMap",
        "metadata": metadata(spec),
    }


def to_yaml(manifests: list[Object]) -> str:
    """The manifests as one YAML stream, the same bytes for the same input; no aliases."""
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=True, default_flow_style=False, width=120, allow_unicode=True)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def _container(spec: JobSpec, container: Object, resources: bool) -> Object:
    mounts = [
        {"mountPath": "/dev/shm", "name": "shm"},
        *([{"mountPath": str(RECIPE.parent), "name": "recipe", "readOnly": True}] if spec.recipe else []),
        {"mountPath": HOME, "name": "home"},
        {"mountPath": "/tmp", "name": "tmp"},
        *({"mountPath": str(VOLUMES / name), "name": f"volume-{i}"} for i, name in enumerate(_claims(spec, resources))),
    ]
    security = CONTAINER_SECURITY
    if spec.resources.devices:
        # RDMA registers memory, which the kernel counts as locked. Until Kubernetes has ambient capabilities, the
        # limit of the node's container runtime counts for a user who is not root.
        security = security | {"capabilities": security["capabilities"] | {"add": ["IPC_LOCK"]}}
    whole: Object = {
        "env": environment(spec),
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    amounts = _amounts(spec) if resources else {"cpu": "200m", "memory": "512Mi"}
    if amounts:
        whole["resources"] = {"limits": amounts, "requests": amounts}
    return whole | container


def _amounts(spec: JobSpec) -> dict[str, str]:
    r = spec.resources
    amounts = {"cpu": r.cpu, "ephemeral-storage": r.disk, "memory": r.memory} | dict(r.devices)
    if r.gpus:
        amounts[r.gpu_resource] = r.gpus
    return {name: str(amount) for name, amount in sorted(amounts.items()) if amount is not None}


def _volumes(spec: JobSpec, resources: bool) -> list[Object]:
    return [
        *([{"configMap": {"name": spec.name}, "name": "recipe"}] if spec.recipe else []),
        {"emptyDir": {}, "name": "home"},
        {"emptyDir": {"medium": "Memory", "sizeLimit": spec.resources.shm}, "name": "shm"},
        {"emptyDir": {}, "name": "tmp"},
        *(
            {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": name}}
            for i, name in enumerate(_claims(spec, resources))
        ),
    ]


def _claims(spec: JobSpec, resources: bool) -> tuple[str, ...]:
    """What does not compute needs no volume, and may run on another node than one that can be on one node only."""
    return spec.volumes if resources else ()


def _toleration(key: str, value: str, effect: str) -> Object:
    toleration: Object = {"key": key, "operator": "Equal" if value else "Exists"}
    if value:
        toleration["value"] = value
    if effect:
        toleration["effect"] = effect
    return toleration


def _spread(name: str, over: str) -> Object:
    keys = {"host": "kubernetes.io/hostname", "zone": "topology.kubernetes.io/zone"}
    return {
        "labelSelector": {"matchLabels": training_labels(name)},
        "maxSkew": 1,
        "topologyKey": keys[over],
        "whenUnsatisfiable": "ScheduleAnyway",
    }
