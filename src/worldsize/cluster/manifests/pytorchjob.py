"""PyTorchJob (kubeflow.org/v1) for Kubeflow's training-operator 1.9."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.base import KUBEFLOW_CONDITIONS, agent_command, from_conditions, too_long
from worldsize.cluster.manifests.base import Target as Base
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import Object
from worldsize.jobs.state import JobState

_ROLE = "training.kubeflow.org/replica-type"
_INDEX = "training.kubeflow.org/replica-index"


class Target(Base):
    """Workers only; they rendezvous at worker 0.

    With a Master replica, the operator would add an init container with its own container image to every worker. This
    fails if that image cannot be pulled, under Pod Security "restricted" and under quotas.
    """

    kind = "PyTorchJob"
    container = "pytorch"
    # A job whose name is too long gets pods but never a condition.
    setbacks = frozenset({"FailedCreateService"})
    parts = MappingProxyType({"Pod": r"-(worker|master)-\d+", "Service": r"-(worker|master)-\d+", "PodGroup": ""})

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        yield from too_long(spec.name, 63 - len(f"-worker-{spec.bounds[1] - 1}"), self.kind)
        if spec.elastic and not 1 <= spec.elastic[0] <= spec.nodes <= spec.elastic[1]:
            yield f"--elastic {spec.elastic[0]}:{spec.elastic[1]} must start at 1 or more and include --nodes {spec.nodes}"
        if spec.needs_mpi:
            yield "this strategy requires MPI: use --on mpijob"
        if spec.runtime:
            yield "--runtime is only supported with --on trainjob"

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
                "apiVersion": "kubeflow.org/v1",
                "kind": self.kind,
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
                    "runPolicy": _run_policy(spec),
                },
            }
        ]

    def state(self, job: Object, pods: list[Object]) -> JobState:
        return from_conditions(job, KUBEFLOW_CONDITIONS, "Created")

    def place(self, one: Object) -> tuple[int, str]:
        labels = one["metadata"]["labels"]
        index = int(labels.get(_INDEX, 0))
        return index, f"{labels.get(_ROLE, 'worker')}-{index}"

    def created(self, spec: PodJobSpec) -> list[tuple[str, str]]:
        return [("Service", f"{spec.name}-worker-{index}") for index in range(spec.nodes)]

    def suspension(self) -> Object:
        return {"spec": {"runPolicy": {"suspend": True}}}


def _run_policy(spec: PodJobSpec) -> Object:
    policy: Object = {
        # Counts restarts by the kubelet, of which there are none with ExitCode; the run counts its own starts.
        # 0 would fail the job when the first pod is evicted.
        "backoffLimit": max(1, spec.retries * spec.nodes),
        "cleanPodPolicy": "Running",
    }
    if spec.deadline_s is not None:
        policy["activeDeadlineSeconds"] = spec.deadline_s
    if spec.placement.volcano_queue:
        policy["schedulingPolicy"] = {"minAvailable": spec.bounds[0], "queue": spec.placement.volcano_queue}
    return policy
