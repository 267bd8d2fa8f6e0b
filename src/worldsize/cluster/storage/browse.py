"""Manifests of a web page (FileBrowser) for a volume; rendered, not applied (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import pod, syntax
from worldsize.cluster.manifests.spec import VOLUMES
from worldsize.cluster.objects import COMPONENT_LABEL, RUN_LABEL, Object, labels
from worldsize.cluster.storage.named import Name
from worldsize.errors import UserError

_PORT = 8080


@dataclass(frozen=True)
class FilesBrowse:
    """Print the manifests of a web page (FileBrowser) that shows a volume, for kubectl apply -f -. Contacts no cluster.

    There is no login: the page listens on its pod's loopback address only. Connect with
    kubectl port-forward service/browse-VOLUME 8080 (with '-' for each '.' of the volume's name).
    """

    volume: Name
    """The volume."""
    write: bool = False
    """Let the page change files."""
    image: str = "filebrowser/filebrowser:v2.63.23"
    """Container image of FileBrowser; the default is its latest release."""
    namespace: str = "default"
    """Namespace of the manifests."""
    fixed_user: bool = True
    """Run as user 1000; --no-fixed-user leaves the user to the cluster, as OpenShift requires."""


def show(options: FilesBrowse) -> int:
    """``worldsize cluster files browse``."""
    page = manifests(options.volume, options.namespace, options.image, options.write, options.fixed_user)
    print(pod.to_yaml(page), end="")
    return 0


def manifests(volume: str, namespace: str, image: str, write: bool = False, fixed_user: bool = True) -> list[Object]:
    """NetworkPolicy, Service and Deployment.

    Raises:
        UserError: invalid name.
    """
    name = f"browse-{volume.replace('.', '-')}"  # a Service's name has no dots
    if not (syntax.is_name(volume) and syntax.is_label(name)):
        raise UserError(f"invalid volume name {volume!r}: use at most 56 lowercase letters, digits, '-' and '.'")
    all_labels = labels(volume, "browse")
    selector = {key: all_labels[key] for key in (RUN_LABEL, COMPONENT_LABEL)}
    metadata = {"labels": all_labels, "name": name, "namespace": namespace}
    policy: Object = {
        **header("NetworkPolicy"),
        "metadata": metadata,
        "spec": {"ingress": [], "podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"]},
    }
    service: Object = {
        **header("Service"),
        "metadata": metadata,
        "spec": {"clusterIP": "None", "ports": [{"name": "http", "port": _PORT}], "selector": selector},
    }
    deployment: Object = {
        **header("Deployment"),
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": selector},
            # Two pods on different nodes could not both mount a ReadWriteOnce volume.
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": all_labels}, "spec": _pod(volume, image, write, fixed_user)},
        },
    }
    return [policy, service, deployment]


def _pod(volume: str, image: str, write: bool, fixed_user: bool) -> Object:
    resources = {"cpu": "100m", "memory": "256Mi"}
    # Loopback only, because not every network plugin enforces a NetworkPolicy. So no probe: the kubelet could not reach it.
    flags = {"address": "127.0.0.1", "port": str(_PORT), "root": str(VOLUMES / volume), "database": "/tmp/filebrowser.db"}
    return {
        "automountServiceAccountToken": False,
        "containers": [
            {
                "command": ["filebrowser", "--noauth", *(f"--{name}={value}" for name, value in flags.items())],
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "name": "filebrowser",
                "ports": [{"containerPort": _PORT, "name": "http"}],
                "resources": {"limits": resources, "requests": resources},
                "securityContext": pod.CONTAINER_SECURITY,
                "volumeMounts": [
                    {"mountPath": str(VOLUMES / volume), "name": "volume", "readOnly": not write},
                    {"mountPath": "/tmp", "name": "tmp"},
                ],
            }
        ],
        "enableServiceLinks": False,
        "securityContext": pod.user_security(fixed_user),
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": volume}},
            {"emptyDir": {}, "name": "tmp"},
        ],
    }
