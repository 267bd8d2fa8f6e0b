"""The pod template that all kinds of jobs share (pure): containers, volumes, security and placement."""

from __future__ import annotations

import re
from typing import Any

import yaml

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests.spec import RECIPE, VOLUMES, PodJobSpec
from worldsize.cluster.objects import COMPONENT_LABEL, RUN_LABEL, Object, labels

HOME = "/home/worldsize"
# The user in the container image; numeric, so that the kubelet can verify that it is not root.
USER = 1000
ENDED = ("Succeeded", "Failed")  # phases of a pod
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

# As required by the Pod Security level "restricted".
POD_SECURITY: Object = {
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "runAsGroup": USER,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# OpenShift gives each namespace a range of users, and refuses others.
_ANY_USER = {key: POD_SECURITY[key] for key in ("runAsNonRoot", "seccompProfile")}
# The sidecar of a service mesh never ends, so the job would not end either. Old versions of Istio and Kuma read the
# annotation, new ones the label.
NO_MESH_ANNOTATIONS = {
    "consul.hashicorp.com/connect-inject": "false",
    "kuma.io/sidecar-injection": "disabled",
    "linkerd.io/inject": "disabled",
    "sidecar.istio.io/inject": "false",
}
NO_MESH_LABELS = {"kuma.io/sidecar-injection": "disabled", "sidecar.istio.io/inject": "false"}
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}


def user_security(fixed: bool) -> Object:
    """A pod's security context; without ``fixed``, the cluster chooses the user."""
    return POD_SECURITY if fixed else _ANY_USER


def training_labels(name: str) -> dict[str, str]:
    """The subset of `labels` that identifies the pods of a run: a volume of the same name may have pods, too."""
    return {COMPONENT_LABEL: "training", RUN_LABEL: name}


def queue_of(job: Object) -> str | None:
    """The Kueue queue that decides when the job runs; None if there is none."""
    queue: str | None = job["metadata"].get("labels", {}).get(QUEUE_LABEL)
    return queue


def metadata(spec: PodJobSpec, name: str | None = None) -> Object:
    """Metadata for an object of the job."""
    return {"name": name or spec.name, "namespace": spec.namespace, "labels": labels(spec.name)}


def job_metadata(spec: PodJobSpec) -> Object:
    """Metadata for the job object itself, with the label for Kueue."""
    result = metadata(spec)
    if spec.placement.queue:
        result["labels"] |= {QUEUE_LABEL: spec.placement.queue}
    return result


def template(spec: PodJobSpec, container: Object, resources: bool = True) -> Object:
    """The pod template.

    Args:
        container: name, command and other fields of the pod's only container; the common fields are added.
        resources: whether the pod trains: it gets the resources and volumes of the spec. False: the MPI launcher.
    """
    pod: Object = {
        "automountServiceAccountToken": False,
        "containers": [_container(spec, container, resources)],
        "enableServiceLinks": False,
        "securityContext": user_security(spec.fixed_user),
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
            "annotations": NO_MESH_ANNOTATIONS,
            "labels": labels(spec.name) | NO_MESH_LABELS,
        },
        "spec": pod,
    }


def environment(spec: PodJobSpec) -> list[Object]:
    """The environment variables of every process, including the user's, sorted by name."""
    fixed = {
        "HOME": HOME,
        "NCCL_DEBUG": "WARN",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor",
        # mpirun gives its ranks a pseudo-terminal, for which rich would print colors and progress bars.
        "TTY_COMPATIBLE": "0",
        "USER": "worldsize",
    }
    if spec.elastic is None:
        fixed |= {"WORLDSIZE_NODES": str(spec.nodes), "WORLDSIZE_PROCS": str(spec.procs)}
    from_secrets = {secret.variable for secret in spec.secrets}
    values = {name: value for name, value in (fixed | dict(spec.env)).items() if name not in from_secrets}
    plain = [{"name": name, "value": literal(value)} for name, value in values.items()]
    secret = [{"name": s.variable, "valueFrom": {"secretKeyRef": {"key": s.key, "name": s.secret}}} for s in spec.secrets]
    address = {"name": "WORLDSIZE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return sorted([*plain, *secret, address], key=lambda variable: str(variable["name"]))


def literal(text: str) -> str:
    """The text for an environment variable or a word of a command: Kubernetes expands ``$(NAME)``, and ``$$`` to ``$``."""
    return text.replace("$", "$$")


def network_policy(spec: PodJobSpec) -> Object:
    """Allows connections to the job's pods only from the job's own pods: their traffic is not authenticated."""
    own = {"matchLabels": training_labels(spec.name)}
    return {
        **header("NetworkPolicy"),
        "metadata": metadata(spec),
        "spec": {"ingress": [{"from": [{"podSelector": own}]}], "podSelector": own, "policyTypes": ["Ingress"]},
    }


def config_map(spec: PodJobSpec) -> Object:
    """The ConfigMap with the recipe, mounted as a file in the pods."""
    return {
        **header("ConfigMap"),
        "data": {RECIPE.name: spec.recipe},
        "immutable": True,
        "metadata": metadata(spec),
    }


def to_yaml(manifests: list[Object]) -> str:
    """The manifests as one YAML stream: deterministic, without aliases."""
    return yaml.dump_all(manifests, Dumper=_Plain, sort_keys=True, default_flow_style=False, width=120, allow_unicode=True)


# Text that kubectl's parser, gopkg.in/yaml.v2, reads as a boolean or a number. PyYAML does not, and so leaves it without
# quotes. kubectl ignores underscores in numbers.
_NOT_TEXT = re.compile(
    r"[yYnN]|[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?0([oO][0-7]+|[bB][01]+|[xX][0-9a-fA-F]+)"
)


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    quoted = "'" if _NOT_TEXT.fullmatch(text.replace("_", "")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else quoted)


_Plain.add_representer(str, _text)


def _container(spec: PodJobSpec, container: Object, resources: bool) -> Object:
    mounts = [
        {"mountPath": "/dev/shm", "name": "shm"},
        *([{"mountPath": str(RECIPE.parent), "name": "recipe", "readOnly": True}] if spec.recipe else []),
        {"mountPath": HOME, "name": "home"},
        {"mountPath": "/tmp", "name": "tmp"},
        *({"mountPath": str(VOLUMES / name), "name": f"volume-{i}"} for i, name in enumerate(_claims(spec, resources))),
    ]
    security = CONTAINER_SECURITY
    if spec.resources.devices:
        # RDMA registers memory, which the kernel counts as locked. Kubernetes has no ambient capabilities yet, so for a
        # non-root user the limit set by the node's container runtime still applies.
        security = security | {"capabilities": security["capabilities"] | {"add": ["IPC_LOCK"]}}
    common: Object = {
        "env": environment(spec),
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    amounts = _amounts(spec) if resources else {"cpu": "200m", "memory": "512Mi"}
    if amounts:
        common["resources"] = {"limits": amounts, "requests": amounts}
    if "command" in container:
        container = container | {"command": [literal(word) for word in container["command"]]}
    return common | container


def _amounts(spec: PodJobSpec) -> dict[str, str]:
    r = spec.resources
    amounts = {"cpu": r.cpu, "ephemeral-storage": r.disk, "memory": r.memory} | dict(r.devices)
    if r.gpus:
        amounts[r.gpu_resource] = r.gpus
    return {name: str(amount) for name, amount in sorted(amounts.items()) if amount is not None}


def _volumes(spec: PodJobSpec, resources: bool) -> list[Object]:
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


def _claims(spec: PodJobSpec, resources: bool) -> tuple[str, ...]:
    """The launcher mounts no volume, so that it can run on another node even if a volume is limited to one node."""
    return spec.volumes if resources else ()


def _toleration(key: str, value: str, effect: str) -> Object:
    toleration: Object = {"key": key, "operator": "Equal" if value else "Exists"}
    if value:
        toleration["value"] = value
    if effect:
        toleration["effect"] = effect
    return toleration


def _spread(name: str, domain: str) -> Object:
    keys = {"host": "kubernetes.io/hostname", "zone": "topology.kubernetes.io/zone"}
    return {
        "labelSelector": {"matchLabels": training_labels(name)},
        "maxSkew": 1,
        "topologyKey": keys[domain],
        "whenUnsatisfiable": "ScheduleAnyway",
    }
