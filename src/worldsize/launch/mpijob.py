"""MPIJob (kubeflow.org/v2beta1), run by Kubeflow's mpi-operator 0.8: ``mpirun`` over ssh, for any strategy."""

from __future__ import annotations

from collections.abc import Iterable

from worldsize.launch import pod
from worldsize.launch.spec import JobSpec
from worldsize.launch.target import KUBEFLOW_CONDITIONS, Object, State, from_conditions, too_long
from worldsize.launch.target import Target as Base

_PORT = 2222  # of sshd, which is not root
_HOSTFILE = "/etc/mpi/hostfile"  # the operator's
_ROLE = "training.kubeflow.org/job-role"
_INDEX = "training.kubeflow.org/replica-index"


class Target(Base):
    """A launcher without GPUs, and a worker with sshd on each node."""

    kind = "MPIJob"
    container = "worldsize"
    # An MPIJob that the operator finds invalid gets this event and nothing else.
    dead_ends = frozenset({"ValidationError"})

    def problems(self, spec: JobSpec) -> Iterable[str]:
        yield from too_long(spec.name, 63 - len(f"-worker-{spec.nodes - 1}"), self.kind)
        if spec.elastic:
            yield "--elastic: only --on pytorchjob can change its number of nodes"
        if spec.runtime:
            yield "--runtime is for --on trainjob"

    def job(self, spec: JobSpec) -> list[Object]:
        launcher = pod.template(spec, {"command": _mpirun(spec), "name": self.container}, resources=False)
        launcher["spec"]["containers"][0]["env"] = _launcher_environment(spec)
        worker = pod.template(spec, _worker(self.container))
        replicas = {
            # Never: with OnFailure the pod of the last failure is deleted, and its log with it.
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            "Worker": {"replicas": spec.nodes, "restartPolicy": "Never", "template": worker},
        }
        return [
            {
                "apiVersion": "kubeflow.org/v2beta1",
                "kind": self.kind,
                "metadata": pod.job_metadata(spec),
                "spec": {
                    "launcherCreationPolicy": "WaitForWorkersReady",
                    "mpiImplementation": "OpenMPI",
                    "mpiReplicaSpecs": replicas,
                    "runPolicy": _run_policy(spec),
                    "slotsPerWorker": spec.procs,
                    "sshAuthMountPath": f"{pod.HOME}/.ssh",
                },
            }
        ]

    def state(self, job: Object, pods: list[Object]) -> State:
        return from_conditions(job, KUBEFLOW_CONDITIONS, "Created")

    def place(self, one: Object) -> tuple[int, str]:
        labels = one["metadata"]["labels"]
        if labels.get(_ROLE) == "launcher":
            return -1, "launcher"
        index = int(labels.get(_INDEX, 0))
        return index, f"worker-{index}"

    def suspension(self) -> Object:
        return {"spec": {"runPolicy": {"suspend": True}}}


def _worker(name: str) -> Object:
    return {
        "command": ["worldsize-sshd"],
        "name": name,
        "ports": [{"containerPort": _PORT, "name": "ssh"}],
        # The operator counts ready workers before it makes the launcher.
        "readinessProbe": {"periodSeconds": 2, "tcpSocket": {"port": _PORT}},
    }


def _mpirun(spec: JobSpec) -> list[str]:
    """Variables are passed by name, so that no value is seen in the list of processes."""
    names = sorted({variable["name"] for variable in pod.environment(spec)} - {"HOME", "POD_IP", "USER"})
    passed = [word for name in ("LD_LIBRARY_PATH", "MASTER_ADDR", "PATH", *names) for word in ("-x", name)]
    # Seconds before SIGTERM, and again before SIGKILL, for what is left of a job. mpirun sleeps them in full, twice, when it
    # must leave and when any rank fails: with spec.grace_s each failure would cost minutes.
    patience = ["--mca", "odls_base_sigkill_timeout", "15"]
    placing = ["-np", str(spec.world_size), "--bind-to", "none", "--map-by", "slot"]
    # A worker that was lost may not be back yet.
    waiting = ["python", "-m", "worldsize.launch.hosts", _HOSTFILE, str(_PORT)]
    return [*waiting, "mpirun", "--tag-output", *placing, *patience, *passed, "worldsize", *spec.command]


def _launcher_environment(spec: JobSpec) -> list[Object]:
    more = {
        "MASTER_ADDR": f"{spec.name}-worker-0.{spec.name}",
        # The operator sets what Open MPI 4 reads; Open MPI 5 reads these and would run all ranks in the launcher.
        "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
        "PRTE_MCA_prte_default_hostfile": _HOSTFILE,
        "PRTE_MCA_prte_set_default_slots": str(spec.procs),
    }
    variables = [*pod.environment(spec), *({"name": name, "value": value} for name, value in more.items())]
    return sorted(variables, key=lambda variable: str(variable["name"]))


def _run_policy(spec: JobSpec) -> Object:
    policy: Object = {"backoffLimit": spec.retries, "cleanPodPolicy": "Running"}
    if spec.deadline_s is not None:
        policy["activeDeadlineSeconds"] = spec.deadline_s
    if spec.placement.volcano_queue:
        # The launcher is made when all workers are ready: a gang that counts it is never complete.
        policy["schedulingPolicy"] = {"minAvailable": spec.nodes, "queue": spec.placement.volcano_queue}
    return policy
