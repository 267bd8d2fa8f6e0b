"""The batch/v1 Job that runs ``worldsize data fetch`` in a pod (pure)."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import pod
from worldsize.cluster.manifests.base import BATCH_CONDITIONS, from_conditions
from worldsize.cluster.manifests.base import Target as Base
from worldsize.cluster.manifests.spec import PodJobSpec, general_problems
from worldsize.cluster.objects import COMPONENT_LABEL, RUN_LABEL, Object, labels
from worldsize.data.fetch.kaggle import SECRET, USER_AND_KEY
from worldsize.errors import DataError, UserError
from worldsize.jobs.spec import refuse
from worldsize.jobs.state import JobState

COMPONENT = "data"
# Mount path of the Kaggle token.
KAGGLE_FOLDER = "/etc/kaggle"


class Target(Base):
    """The Job as a target, so that it can be followed like a training job."""

    kind = "Job"
    container = "fetch"
    parts = MappingProxyType({"Pod": "-[a-z0-9]{5}"})

    def problems(self, spec: PodJobSpec) -> Iterable[str]:
        return ()

    def last_suffix(self, spec: PodJobSpec) -> str:
        return "-abcde"

    def job(self, spec: PodJobSpec) -> list[Object]:
        return render(spec)

    def state(self, job: Object, pods: list[Object]) -> JobState:
        newest = max(pods, key=lambda one: str(one["metadata"]["creationTimestamp"]), default=None)
        started = newest is not None and newest["status"].get("phase") != "Pending"
        return from_conditions(job, BATCH_CONDITIONS, "Running" if started else "Pending")

    def place(self, one: Object) -> tuple[int, str]:
        return 0, self.container

    def selector(self, name: str) -> str:
        return f"{RUN_LABEL}={name},{COMPONENT_LABEL}={COMPONENT}"


def _optional(name: str) -> Object:
    """A variable with the value of the Secret's key of this name, if it has one."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"key": name, "name": SECRET, "optional": True}}}


def render(spec: PodJobSpec) -> list[Object]:
    """Render the Job. If an environment variable is set to `KAGGLE_FOLDER`, the Secret with the token is mounted there.

    Raises:
        UserError: the spec has problems; lists all of them.
    """
    refuse(general_problems(spec))
    job_labels = labels(spec.name, COMPONENT)
    template = pod.template(spec, {"command": ["worldsize", *spec.command], "name": Target.container})
    template["metadata"]["labels"] |= job_labels
    pod_spec = template["spec"]
    pod_spec["restartPolicy"] = "Never"  # a new pod per attempt keeps the log of each attempt
    if KAGGLE_FOLDER in dict(spec.env).values():
        given = {variable["name"] for variable in pod_spec["containers"][0]["env"]}
        pod_spec["volumes"].append({"name": SECRET, "secret": {"defaultMode": 0o440, "secretName": SECRET}})
        mount = {"mountPath": KAGGLE_FOLDER, "name": SECRET, "readOnly": True}
        pod_spec["containers"][0]["volumeMounts"].append(mount)
        pod_spec["containers"][0]["env"] += [_optional(name) for name in USER_AND_KEY if name not in given]
    codes = sorted(kind.exit_code for kind in (UserError, DataError))
    return [
        {
            **header(Target.kind),
            "metadata": pod.job_metadata(spec) | {"labels": job_labels},
            "spec": {
                "backoffLimit": spec.retries,
                "podFailurePolicy": {
                    "rules": [
                        # Errors that only the user can fix are not retried.
                        {
                            "action": "FailJob",
                            "onExitCodes": {"containerName": Target.container, "operator": "In", "values": codes},
                        },
                        {"action": "Ignore", "onPodConditions": [{"status": "True", "type": "DisruptionTarget"}]},
                    ]
                },
                "template": template,
            },
        }
    ]
