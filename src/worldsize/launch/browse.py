"""A web page for a volume: FileBrowser, rendered and not applied (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worldsize.launch import pod
from worldsize.launch.spec import VOLUMES
from worldsize.launch.volumes import Name

Object = dict[str, Any]

_PORT = 8080


@dataclass(frozen=True)
class FilesBrowse:
    """Print the objects of a web page (FileBrowser) that shows a volume, for kubectl apply -f -. Talks to no cluster.

    Nobody logs in: it listens within its pod alone, and kubectl port-forward service/browse-VOLUME 8080 is the way in.
    """

    volume: Name
    """The volume."""
    write: bool = False
    """Whether the page can change files."""
    image: str = "filebrowser/filebrowser:v2.63.23"
    """FileBrowser's image; the default is its last release."""
    namespace: str = "default"
    """Namespace of the objects."""


def show(asked: FilesBrowse) -> int:
    """``worldsize cluster files browse``."""
    print(pod.to_yaml(manifests(asked.volume, asked.namespace, asked.image, asked.write)), end="")
    return 0


def manifests(volume: str, namespace: str, image: str, write: bool = False) -> list[Object]:
    """NetworkPolicy, Service and Deployment."""
    labels = pod.labels(volume, "browse")
    own = {key: labels[key] for key in (pod.RUN_LABEL, "app.kubernetes.io/component")}
    about = {"labels": labels, "name": f"browse-{volume}", "namespace": namespace}
    policy: Object = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": about,
        "spec": {"ingress": [], "podSelector": {"matchLabels": own}, "policyTypes": ["Ingress"]},
    }
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": about,
        "spec": {"clusterIP": "None", "ports": [{"name": "http", "port": _PORT}], "selector": own},
    }
    deployment: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": about,
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": own},
            # Two at once could not both have a volume of one node.
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": _pod(volume, image, write)},
        },
    }
    return [policy, service, deployment]


def _pod(volume: str, image: str, write: bool) -> Object:
    amounts = {"cpu": "100m", "memory": "256Mi"}
    # Not every network plugin enforces a NetworkPolicy. No probe either: the kubelet could not reach it.
    settings = {"address": "127.0.0.1", "port": str(_PORT), "root": str(VOLUMES / volume), "database": "/tmp/filebrowser.db"}
    return {
        "automountServiceAccountToken": False,
        "containers": [
            {
                "command": ["filebrowser", "--noauth", *(f"--{name}={value}" for name, value in settings.items())],
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "name": "filebrowser",
                "ports": [{"containerPort": _PORT, "name": "http"}],
                "resources": {"limits": amounts, "requests": amounts},
                "securityContext": pod.CONTAINER_SECURITY,
                "volumeMounts": [
                    {"mountPath": str(VOLUMES / volume), "name": "volume", "readOnly": not write},
                    {"mountPath": "/tmp", "name": "tmp"},
                ],
            }
        ],
        "enableServiceLinks": False,
        "securityContext": pod.POD_SECURITY,
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": volume}},
            {"emptyDir": {}, "name": "tmp"},
        ],
    }
