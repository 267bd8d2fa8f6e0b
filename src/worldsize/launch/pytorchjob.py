"""PyTorchJob (kubeflow.org/v1), run by Kubeflow's training-operator 1.9."""

from __future__ import annotations

from collections.abc import Iterable

from worldsize.launch import pod
from worldsize.launch.spec import JobSpec
from worldsize.launch.target import KUBEFLOW_CONDITIONS, Object, State, agent_command, from_conditions, too_long
from worldsize.launch.target import Target as Base

_ROLE = "training.kubeflow.org/replica-type"
_INDEX = "training.kubeflow.org/replica-index"


class Target(Base):
    """Workers that meet at the first of them.

    There is no Master replica: for its sake the operator gives every worker an init container with an image of its own,
    which fails where that image cannot be pulled, under Pod Security "restricted" and under quotas.
    """

    kind = "PyTorchJob"
    container = "pytorch"
    # A name that is too long gets pods and no condition, ever.
    setbacks = frozenset({"FailedCreateService"})

    def problems(self, spec: JobSpec) -> Iterable[str]:
        yield from too_long(spec.name, 63 - len(f"-worker-{spec.bounds[1] - 1}"), self.kind)
        if spec.elastic and not 1 <= spec.elastic[0] <= spec.nodes <= spec.elastic[1]:
            yield f"--elastic {spec.elastic[0]}:{spec.elastic[1]} must be 1 or more nodes and include --nodes {spec.nodes}"
        if spec.horovod:
            yield "strategy horovod needs MPI: use --on mpijob"
        if spec.runtime:
            yield "--runtime is for --on trainjob"

    def job(self, spec: JobSpec) -> list[Object]:
        fewest, most = spec.bounds
        template = pod.template(spec, {"command": agent_command(spec), "name": self.container})
        if spec.deadline_s is not None:
            # The operator looks at the job's deadline only when something happens to a pod.
            template["spec"]["activeDeadlineSeconds"] = spec.deadline_s
        worker = {
            "replicas": spec.nodes,
            # The agent ends with 128 or more where another try is right: after SIGTERM, or killed.
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
                        "maxReplicas": most,
                        "minReplicas": fewest,
                        "rdzvBackend": "c10d",
                        "rdzvId": spec.name,
                    },
                    "nprocPerNode": str(spec.procs),
                    "pytorchReplicaSpecs": {"Worker": worker},
                    "runPolicy": _run_policy(spec),
                },
            }
        ]

    def state(self, job: Object, pods: list[Object]) -> State:
        return from_conditions(job, KUBEFLOW_CONDITIONS, "Created")

    def place(self, one: Object) -> tuple[int, str]:
        labels = one["metadata"]["labels"]
        index = int(labels.get(_INDEX, 0))
        return index, f"{labels.get(_ROLE, 'worker')}-{index}"

    def suspension(self) -> Object:
        return {"spec": {"runPolicy": {"suspend": True}}}


def _run_policy(spec: JobSpec) -> Object:
    policy: Object = {
        # For pods whose container the kubelet restarts; with ExitCode it does not, and the run itself counts its starts.
        # 0 would fail the job with the first pod that is evicted.
        "backoffLimit": max(1, spec.retries * spec.nodes),
        "cleanPodPolicy": "Running",
    }
    if spec.deadline_s is not None:
        policy["activeDeadlineSeconds"] = spec.deadline_s
    if spec.placement.volcano_queue:
        policy["schedulingPolicy"] = {"minAvailable": spec.bounds[0], "queue": spec.placement.volcano_queue}
    return policy
