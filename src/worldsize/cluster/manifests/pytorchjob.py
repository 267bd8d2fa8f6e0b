"""PyTorchJob (kubeflow.org/v1) for Kubeflow's training-operator 1.9."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.base import ReplicaTarget, agent_command
from worldsize.cluster.manifests.spec import PodJobSpec, elastic_problems
from worldsize.cluster.objects import Object

_ROLE = "training.kubeflow.org/replica-type"
_INDEX = "training.kubeflow.org/replica-index"


class Target(ReplicaTarget):
    """Workers only; they rendezvous at worker 0.

    With a Master replica, the operator would add an init container with its own container image to every worker. This
    fails if that image cannot be pulled, under Pod Security "restricted" and under quotas.
    """

    kind = "PyTorchJob"
    container = "pytorch"
    # A job whose name is too long gets pods but never a condition.
    setbacks = frozenset({"FailedCreateService"})
    parts = MappingProxyType({"Pod": r"-(worker|master)-\d+", "Service": r"-(worker|master)-\d+", "PodGroup": ""})

    elastic = True

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        yield from super().problems(spec)
        yield from elastic_problems(spec.elastic, spec.nodes)

    def last_suffix(self, spec: PodJobSpec) -> str:
        return f"-worker-{spec.bounds[1] - 1}"

    def job(self, spec: PodJobSpec) -> list[Object]:
        min_nodes, max_nodes = spec.bounds
        template = pod.template(spec, {"command": agent_command(spec), "name": self.container})
        if spec.deadline_s is not None:
            # The operator checks the job's own deadline only when a pod changes.
            template["spec"]["activeDeadlineSeconds"] = spec.deadline_s
        worker = {
            "replicas": spec.nodes,
            # The agent exits with 128 or more if a retry makes sense: after SIGTERM, or killed.
            "restartPolicy": "ExitCode",
            "template": template,
        }
        return [
            {
                **header(self.kind),
                "metadata": pod.job_metadata(spec),
                "spec": {
                    "elasticPolicy": {
                        "maxReplicas": max_nodes,
                        "minReplicas": min_nodes,
                        "rdzvBackend": "c10d",
                        "rdzvId": spec.name,
                    },
                    "nprocPerNode": str(spec.procs),
                    "pytorchReplicaSpecs": {"Worker": worker},
                    # The backoff limit counts restarts by the kubelet, of which there are none with ExitCode; the run counts
                    # its own starts. 0 would fail the job when the first pod is evicted.
                    "runPolicy": self.run_policy(spec, max(1, spec.retries * spec.nodes), min_nodes),
                },
            }
        ]

    def place(self, one: Object) -> tuple[int, str]:
        labels = one["metadata"]["labels"]
        index = int(labels.get(_INDEX, 0))
        return index, f"{labels.get(_ROLE, 'worker')}-{index}"

    def created(self, spec: PodJobSpec) -> list[tuple[str, str]]:
        return [("Service", f"{spec.name}-worker-{index}") for index in range(spec.nodes)]
