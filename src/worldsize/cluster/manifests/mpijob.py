"""MPIJob (kubeflow.org/v2beta1) for Kubeflow's mpi-operator 0.8: ``mpirun`` over ssh, for any strategy."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.base import ReplicaTarget
from worldsize.cluster.manifests.spec import PodJobSpec
from worldsize.cluster.objects import Object
from worldsize.launch import entry_point

_SINGLE_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
_PORT = 2222  # of sshd, which does not run as root
_HOSTFILE = "/etc/mpi/hostfile"  # written by the operator
_ROLE = "training.kubeflow.org/job-role"
_INDEX = "training.kubeflow.org/replica-index"


class Target(ReplicaTarget):
    """A launcher without GPUs, and one worker per node that runs sshd."""

    kind = "MPIJob"
    container = "worldsize"
    # For an invalid MPIJob the operator only emits this event.
    dead_ends = frozenset({"ValidationError"})
    parts = MappingProxyType(
        {
            "ConfigMap": "-config",
            "Job": "-launcher",
            "Pod": r"-(worker-\d+|launcher-[a-z0-9]{5})",
            "PodGroup": "",
            "Secret": "-ssh",
            "Service": "",
        }
    )

    mpi = True

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        yield from super().problems(spec)
        if not spec.fixed_user:
            yield "--no-fixed-user: ssh requires the user of the container image; use --on pytorchjob or trainjob"

    def last_suffix(self, spec: PodJobSpec) -> str:
        return f"-worker-{spec.nodes - 1}"

    def job(self, spec: PodJobSpec) -> list[Object]:
        launcher = pod.template(spec, {"command": _mpirun(spec), "name": self.container}, resources=False)
        launcher["spec"]["containers"][0]["env"] = _launcher_environment(spec)
        worker = pod.template(spec, _worker(self.container))
        replicas = {
            # With OnFailure, the pod of the last failure would be deleted together with its log.
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            "Worker": {"replicas": spec.nodes, "restartPolicy": "Never", "template": worker},
        }
        return [
            {
                **header(self.kind),
                "metadata": pod.job_metadata(spec),
                "spec": {
                    "launcherCreationPolicy": "WaitForWorkersReady",
                    "mpiImplementation": "OpenMPI",
                    "mpiReplicaSpecs": replicas,
                    # The launcher is created when all workers are ready, so a gang that includes it is never complete.
                    "runPolicy": self.run_policy(spec, spec.retries, spec.nodes),
                    "slotsPerWorker": spec.procs,
                    "sshAuthMountPath": f"{pod.HOME}/.ssh",
                },
            }
        ]

    def place(self, one: Object) -> tuple[int, str]:
        labels = one["metadata"]["labels"]
        if labels.get(_ROLE) == "launcher":
            return -1, "launcher"
        index = int(labels.get(_INDEX, 0))
        return index, f"worker-{index}"

    def created(self, spec: PodJobSpec) -> list[tuple[str, str]]:
        name = spec.name
        own = (("ConfigMap", f"{name}-config"), ("Secret", f"{name}-ssh"), ("Service", name), ("Job", f"{name}-launcher"))
        return [*own]


def _worker(name: str) -> Object:
    return {
        "command": ["worldsize-sshd"],
        "name": name,
        "ports": [{"containerPort": _PORT, "name": "ssh"}],
        # The operator creates the launcher when all workers are ready.
        "readinessProbe": {"periodSeconds": 2, "tcpSocket": {"port": _PORT}},
    }


def _mpirun(spec: PodJobSpec) -> list[str]:
    """The launcher's command. Variables are passed by name, so that the process list shows no values."""
    names = sorted({variable["name"] for variable in pod.environment(spec)} - {"HOME", "WORLDSIZE_ADDRESS", "USER"})
    exports = [word for name in ("LD_LIBRARY_PATH", "MASTER_ADDR", "PATH", *names) for word in ("-x", name)]
    # Seconds before SIGTERM, and again before SIGKILL. mpirun always sleeps both in full, when it is terminated and when
    # any rank fails: with spec.grace_s each failure would cost minutes.
    timeout = ["--mca", "odls_base_sigkill_timeout", "15"]
    placement = ["-np", str(spec.world_size), "--bind-to", "none", "--map-by", "slot"]
    # The replacement of a lost worker may not be up yet.
    wait = [*entry_point.command("python", "worldsize.launch.wait_for_hosts"), _HOSTFILE, str(_PORT)]
    return [*wait, "mpirun", "--tag-output", *placement, *timeout, *exports, "worldsize", *spec.command]


def _launcher_environment(spec: PodJobSpec) -> list[Object]:
    extra = {
        "MASTER_ADDR": f"{spec.name}-worker-0.{spec.name}",
        # The operator sets variables for Open MPI 4. Open MPI 5 reads these instead; without them it would run all ranks
        # in the launcher.
        "PRTE_MCA_plm_ssh_args": "-o ConnectionAttempts=10",
        "PRTE_MCA_prte_default_hostfile": _HOSTFILE,
        "PRTE_MCA_prte_set_default_slots": str(spec.procs),
        # Pods may not read the memory of other processes: Open MPI 4 would try for each message, and print that it failed.
        _SINGLE_COPY: "none",
    }
    own = pod.environment(spec)
    if any(variable["name"] == _SINGLE_COPY for variable in own):  # --env
        del extra[_SINGLE_COPY]
    variables = [*own, *({"name": name, "value": value} for name, value in extra.items())]
    return sorted(variables, key=lambda variable: str(variable["name"]))
