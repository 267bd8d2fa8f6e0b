"""TrainJob (trainer.kubeflow.org/v1alpha1), run by Kubeflow Trainer 2.2 and newer."""

from __future__ import annotations

from collections.abc import Iterable

from worldsize import errors
from worldsize.launch import pod
from worldsize.launch.spec import JobSpec
from worldsize.launch.target import Object, State, agent_command, conditions, too_long
from worldsize.launch.target import Target as Base

_API = "trainer.kubeflow.org/v1alpha1"
_INDEX = "batch.kubernetes.io/job-completion-index"
_SIGTERM = 143
# What the runtime's pods can be told from outside it.
_PATCHABLE = (
    "imagePullSecrets",
    "nodeSelector",
    "securityContext",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)


class Target(Base):
    """A TrainingRuntime of the job's own, so that the whole pod is ours, and the TrainJob that uses it.

    With ``--runtime`` a ClusterTrainingRuntime of the cluster is used and patched instead.
    """

    kind = "TrainJob"
    container = "node"
    setbacks = frozenset({"TrainJobResourcesCreationFailed"})

    def problems(self, spec: JobSpec) -> Iterable[str]:
        yield from too_long(spec.name, 63 - len(f"-node-0-{spec.nodes - 1}-abcde"), self.kind)
        if spec.elastic:
            yield "--elastic: only --on pytorchjob can change its number of nodes"
        if spec.horovod:
            yield "strategy horovod needs MPI: use --on mpijob"
        if spec.runtime and (spec.placement.priority or spec.placement.spread):
            yield "--priority and --spread cannot be set from outside a runtime: leave --runtime out"

    def job(self, spec: JobSpec) -> list[Object]:
        trainer: Object = {"numNodes": spec.nodes, "numProcPerNode": spec.procs}
        job: Object = {
            "apiVersion": _API,
            "kind": self.kind,
            "metadata": _metadata(spec),
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

    def state(self, job: Object, pods: list[Object]) -> State:
        true = conditions(job)
        for kind, phase in (("Failed", "Failed"), ("Complete", "Succeeded"), ("Suspended", "Suspended")):
            if kind in true:
                return State(phase, true[kind].get("message", ""))  # type: ignore[arg-type]
        # It has no condition for these.
        phases = {one["status"].get("phase") for one in pods}
        return State("Running" if phases - {"Pending"} else "Pending" if phases else "Created")

    def place(self, one: Object) -> tuple[int, str]:
        index = int(one["metadata"]["labels"].get(_INDEX, 0))
        return index, f"node-{index}"

    def selector(self, name: str) -> str:
        return f"jobset.sigs.k8s.io/jobset-name={name}"

    def suspension(self) -> Object:
        return {"spec": {"suspend": True}}


def _runtime(spec: JobSpec, template: Object) -> Object:
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
    if spec.placement.volcano_queue:
        policy["podGroupPolicy"] = {"volcano": {}}
    # Nodes find each other again by themselves, so one lost pod is no reason to start all anew.
    jobs = {"network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True}, "replicatedJobs": [node]}
    return {
        "apiVersion": _API,
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": policy | {"template": {"spec": jobs}},
    }


def _failure_rules() -> list[Object]:
    return [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": sorted(errors.PERMANENT)}},
        {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [_SIGTERM]}},
    ]


def _patch(container: str, template: Object) -> Object:
    ours = template["spec"]["containers"][0]
    spec = {key: value for key, value in template["spec"].items() if key in _PATCHABLE}
    spec["containers"] = [
        {"name": container, "securityContext": ours["securityContext"], "volumeMounts": ours["volumeMounts"]}
    ]
    job = {"template": {"metadata": template["metadata"], "spec": spec}}
    jobs = [{"name": "node", "template": {"spec": job}}]
    return {"manager": "worldsize/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}


def _reference(spec: JobSpec) -> Object:
    kind = "TrainingRuntime" if spec.runtime is None else "ClusterTrainingRuntime"
    return {"apiGroup": _API.split("/")[0], "kind": kind, "name": spec.runtime or spec.name}


def _metadata(spec: JobSpec) -> Object:
    metadata = pod.job_metadata(spec)
    if spec.placement.volcano_queue:
        metadata["annotations"] = {"scheduling.volcano.sh/queue-name": spec.placement.volcano_queue}
    return metadata
