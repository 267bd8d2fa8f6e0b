"""The kinds of API objects that worldsize uses, in the supported versions (pure)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of API object, with the parts of its URL."""

    group_version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group; empty for the core."""
        return self.group_version.rpartition("/")[0]

    @property
    def root(self) -> str:
        return f"/api/{self.group_version}" if "/" not in self.group_version else f"/apis/{self.group_version}"

    def path(self, namespace: str | None, name: str | None = None) -> str:
        """URL path of one object, or of all objects in a namespace (None: in all namespaces)."""
        inside = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return f"{self.root}{inside}/{self.plural}" + (f"/{name}" if name else "")


KINDS = {
    kind.name: kind
    for kind in (
        Kind("v1", "Namespace", "namespaces", False),
        Kind("v1", "Node", "nodes", False),
        Kind("v1", "Pod", "pods"),
        Kind("v1", "Event", "events"),
        Kind("v1", "Secret", "secrets"),
        Kind("v1", "ConfigMap", "configmaps"),
        Kind("v1", "Service", "services"),
        Kind("v1", "ServiceAccount", "serviceaccounts"),
        Kind("v1", "ResourceQuota", "resourcequotas"),
        Kind("v1", "LimitRange", "limitranges"),
        Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
        Kind("storage.k8s.io/v1", "StorageClass", "storageclasses", False),
        Kind("apps/v1", "Deployment", "deployments"),
        Kind("batch/v1", "Job", "jobs"),
        Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
        Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False),
        Kind("kubeflow.org/v1", "PyTorchJob", "pytorchjobs"),
        Kind("kubeflow.org/v2beta1", "MPIJob", "mpijobs"),
        Kind("trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs"),
        Kind("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", "trainingruntimes"),
        Kind("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime", "clustertrainingruntimes", False),
        Kind("jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets"),
        Kind("kueue.x-k8s.io/v1beta2", "LocalQueue", "localqueues"),
        Kind("kueue.x-k8s.io/v1beta2", "Workload", "workloads"),
    )
}


def header(kind: str) -> dict[str, str]:
    """The fields of an object that say which kind it is, in the version that worldsize uses."""
    return {"apiVersion": KINDS[kind].group_version, "kind": kind}
