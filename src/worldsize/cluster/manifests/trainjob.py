"""TrainJob (trainer.kubeflow.org/v1alpha1) for Kubeflow Trainer 2.2 or newer."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from worldsize import errors
from worldsize.cluster.kinds import KINDS, header
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.base import BATCH_CONDITIONS, agent_command, from_conditions
from worldsize.cluster.manifests.base import Target as Base
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import Object
from worldsize.jobs.state import JobState, Phase

_INDEX = "batch.kubernetes.io/job-completion-index"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"
_SIGTERM = errors.SIGNAL_BASE + 15
# Fields of a pod's spec that a TrainJob may patch in its runtime.
_PATCHABLE = (
    "imagePullSecrets",
    "nodeSelector",
    "securityContext",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)


class Target(Base):
    """A TrainJob and its own TrainingRuntime, which gives control over the complete pod.

    With ``--runtime``, the TrainJob uses and patches a ClusterTrainingRuntime of the cluster instead.
    """

    kind = "TrainJob"
    container = "node"
    setbacks = frozenset({"TrainJobResourcesCreationFailed"})
    # A runtime of the cluster may also have initializers.
    parts = MappingProxyType(
        {
            "Job": r"-(node|launcher|(dataset|model)-initializer)-\d+",
            "JobSet": "",
            "Pod": r"-(node|launcher|(dataset|model)-initializer)-\d+-\d+-[a-z0-9]{5}",
            "PodGroup": "",
            "Service": "",
        }
    )

    runtimes = True

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        yield from super().problems(spec)
        if spec.runtime and (spec.placement.priority or spec.placement.spread):
            yield "--priority and --spread cannot be patched into an existing runtime: omit --runtime"
        if spec.runtime and spec.placement.volcano_queue:
            yield "--volcano-queue: the queue and the scheduler are those of the runtime: omit --runtime or --volcano-queue"

    def last_suffix(self, spec: PodJobSpec) -> str:
        return f"-node-0-{spec.nodes - 1}-abcde"

    def job(self, spec: PodJobSpec) -> list[Object]:
        trainer: Object = {"numNodes": spec.nodes, "numProcPerNode": spec.procs}
        job: Object = {
            **header(self.kind),
            "metadata": pod.job_metadata(spec),
            "spec": {"runtimeRef": _reference(spec), "trainer": trainer},
        }
        if spec.deadline_s is not None:
            job["spec"]["activeDeadlineSeconds"] = spec.deadline_s
        template = pod.template(spec, {"command": agent_command(spec), "name": self.container})
        if spec.runtime is None:
            return [_runtime(spec, template), job]
        container = template["spec"]["containers"][0]
        trainer |= {key: container[key] for key in ("command", "env", "image")}
        if "resources" in container:
            trainer["resourcesPerNode"] = container["resources"]
        job["spec"]["runtimePatches"] = [_patch(self.container, template)]
        return [job]

    def state(self, job: Object, pods: list[Object]) -> JobState:
        # A TrainJob has no condition for the other phases.
        phases = {one["status"].get("phase") for one in pods}
        otherwise: Phase = "Running" if phases - {"Pending"} else "Pending" if phases else "Created"
        return from_conditions(job, BATCH_CONDITIONS, otherwise)

    def place(self, one: Object) -> tuple[int, str]:
        index = int(one["metadata"]["labels"].get(_INDEX, 0))
        return index, f"node-{index}"

    def selector(self, name: str) -> str:
        return f"jobset.sigs.k8s.io/jobset-name={name}"

    def created(self, spec: PodJobSpec) -> list[tuple[str, str]]:
        return [("JobSet", spec.name), ("Job", f"{spec.name}-node-0"), ("Service", spec.name)]


def _runtime(spec: PodJobSpec, template: Object) -> Object:
    template["spec"]["restartPolicy"] = "Never"
    node = {
        "name": "node",
        "replicas": 1,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": spec.retries * spec.nodes,
                "completionMode": "Indexed",
                "podFailurePolicy": {"rules": _failure_rules()},
                "podReplacementPolicy": "Failed",
                "template": template,
            },
        },
    }
    metadata = pod.metadata(spec)
    # Kubeflow's SDK lists only runtimes with this label.
    metadata["labels"] |= {"trainer.kubeflow.org/framework": "torch"}
    policy: Object = {"mlPolicy": {"numNodes": spec.nodes, "torch": {}}}
    # No failure policy that restarts all pods: when a pod is lost, the nodes rendezvous again by themselves.
    jobs = {"network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}, "replicatedJobs": [node]}
    runtime: Object = {
        **header("TrainingRuntime"),
        "metadata": metadata,
        "spec": policy | {"template": {"spec": jobs}},
    }
    if spec.placement.volcano_queue:
        # Trainer creates the PodGroup, with the queue that it reads here, and leaves the choice of the scheduler to us.
        runtime["spec"]["podGroupPolicy"] = {"volcano": {}}
        runtime["spec"]["template"]["metadata"] = {"annotations": {_VOLCANO_QUEUE: spec.placement.volcano_queue}}
        template["spec"]["schedulerName"] = "volcano"
    return runtime


def _failure_rules() -> list[Object]:
    return [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(errors.PERMANENT)}},
        {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [_SIGTERM]}},
    ]


def _patch(container: str, template: Object) -> Object:
    rendered = template["spec"]["containers"][0]
    spec = {key: value for key, value in template["spec"].items() if key in _PATCHABLE}
    spec["containers"] = [
        {"name": container, "securityContext": rendered["securityContext"], "volumeMounts": rendered["volumeMounts"]}
    ]
    job = {"template": {"metadata": template["metadata"], "spec": spec}}
    jobs = [{"name": "node", "template": {"spec": job}}]
    return {"manager": "worldsize/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def _reference(spec: PodJobSpec) -> Object:
    kind = "TrainingRuntime" if spec.runtime is None else "ClusterTrainingRuntime"
    return {"apiGroup": KINDS[kind].group, "kind": kind, "name": spec.runtime or spec.name}
