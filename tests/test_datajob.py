"""The Job that fetches a data set: what it is, and on a cluster that it does so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import tyro
import yaml

from apiserver import KeepingWorld
from worldsize import __version__
from worldsize.data import fetch
from worldsize.errors import UserError
from worldsize.launch import datajob
from worldsize.launch.pod import QUEUE_LABEL

WORLD = KeepingWorld

# Written by hand from Kubernetes' reference of Job and Pod.
JOB = """
apiVersion: batch/v1
kind: Job
metadata:
  labels: &labels
    app.kubernetes.io/component: data
    app.kubernetes.io/instance: fetch-imagenet
    app.kubernetes.io/managed-by: worldsize
    app.kubernetes.io/name: worldsize
    app.kubernetes.io/part-of: worldsize
    app.kubernetes.io/version: VERSION
  name: fetch-imagenet
  namespace: ml
spec:
  backoffLimit: 4
  podFailurePolicy:
    rules:
    - action: FailJob
      onExitCodes: {containerName: fetch, operator: In, values: [64, 65]}
    - action: Ignore
      onPodConditions: [{status: "True", type: DisruptionTarget}]
  template:
    metadata:
      annotations: {sidecar.istio.io/inject: "false"}
      labels:
        <<: *labels
        sidecar.istio.io/inject: "false"
    spec:
      automountServiceAccountToken: false
      containers:
      - name: fetch
        image: registry.example/worldsize:1
        imagePullPolicy: IfNotPresent
        command: [worldsize, data, fetch, imagenet, --to, /mnt/pictures/data/imagenet]
        env:
        - {name: HOME, value: /home/worldsize}
        - {name: KAGGLE_CONFIG_DIR, value: /etc/kaggle}
        - {name: NCCL_DEBUG, value: WARN}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: PYTHONUNBUFFERED, value: "1"}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/inductor}
        - {name: TTY_COMPATIBLE, value: "0"}
        - {name: USER, value: worldsize}
        - {name: WORLDSIZE_NODES, value: "1"}
        - {name: WORLDSIZE_PROCS, value: "1"}
        resources:
          limits: {cpu: "2", memory: 4Gi}
          requests: {cpu: "2", memory: 4Gi}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {drop: [ALL]}
          readOnlyRootFilesystem: true
        terminationMessagePolicy: FallbackToLogsOnError
        volumeMounts:
        - {mountPath: /dev/shm, name: shm}
        - {mountPath: /home/worldsize, name: home}
        - {mountPath: /tmp, name: tmp}
        - {mountPath: /mnt/pictures, name: volume-0}
        - {mountPath: /etc/kaggle, name: kaggle, readOnly: true}
      enableServiceLinks: false
      restartPolicy: Never
      securityContext:
        fsGroup: 1000
        fsGroupChangePolicy: OnRootMismatch
        runAsGroup: 1000
        runAsNonRoot: true
        runAsUser: 1000
        seccompProfile: {type: RuntimeDefault}
      terminationGracePeriodSeconds: 30
      volumes:
      - {name: home, emptyDir: {}}
      - {name: shm, emptyDir: {medium: Memory, sizeLimit: 64Mi}}
      - {name: tmp, emptyDir: {}}
      - {name: volume-0, persistentVolumeClaim: {claimName: pictures}}
      - {name: kaggle, secret: {secretName: kaggle, defaultMode: 288}}  # 0440
"""


def asked(*argv: str) -> datajob.Fetch:
    return tyro.cli(datajob.Fetch, args=list(argv))


IMAGENET = ("imagenet", "--volume", "pictures", "--image", "registry.example/worldsize:1")


def test_the_job():
    [job] = datajob.render(datajob.to_spec(asked(*IMAGENET), "ml"))
    assert job == yaml.safe_load(JOB.replace("VERSION", __version__))


def test_the_token_is_mounted_for_kaggle_alone():
    mirror = datajob.to_spec(asked(*IMAGENET, "--from", "s3://bucket/imagenet.zip", "--secret", "store/KEY"), "ml")
    [job] = datajob.render(mirror)
    assert "kaggle" not in yaml.dump(job)
    inside = job["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"key": "KEY", "name": "store"}}} in inside["env"]
    [other] = datajob.render(datajob.to_spec(asked("folder", *IMAGENET[1:], "--from", "kaggle:dogs"), "ml"))
    assert "/etc/kaggle" in yaml.dump(other)


def test_what_the_pod_runs_is_what_was_asked_for():
    more = ("--from", "https://example.org/a.zip", "--sha256", "ab" * 32, "--keep-archive", "--subset", "--folder", "small")
    spec = datajob.to_spec(asked(*IMAGENET, *more), "ml")
    assert spec.name == "fetch-small"
    in_the_pod = tyro.cli(fetch.Fetch, args=list(spec.command[2:]))
    assert spec.command[:2] == ("data", "fetch")
    assert in_the_pod == fetch.Fetch(
        "imagenet", Path("/mnt/pictures/data/small"), "https://example.org/a.zip", "ab" * 32, keep_archive=True, subset=True
    )


def test_a_job_that_cannot_run():
    spec = datajob.to_spec(asked("imagenet", "--volume", "My_Volume", "--image", "worldsize:latest"), "ml")
    with pytest.raises(UserError, match=r"My_Volume(.|\n)*a tag other than latest"):
        datajob.render(spec)


def a_pod(phase: str, created: str = "2026-01-01T00:00:00Z") -> dict:
    return {"metadata": {"creationTimestamp": created}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("conditions", "pods", "phase"),
    [
        ([], [], "Pending"),
        ([], [a_pod("Pending")], "Pending"),
        ([], [a_pod("Running")], "Running"),
        ([], [a_pod("Pending", "2026-01-01T00:00:09Z"), a_pod("Failed")], "Pending"),
        ([{"type": "Complete", "status": "True"}], [a_pod("Succeeded")], "Succeeded"),
        ([{"type": "Failed", "status": "True", "message": "exit code 64"}], [a_pod("Failed")], "Failed"),
        ([{"type": "Suspended", "status": "True"}], [], "Suspended"),
        ([{"type": "Suspended", "status": "False"}], [a_pod("Running")], "Running"),
    ],
)
def test_where_the_job_is(conditions, pods, phase):
    assert datajob.Target().state({"status": {"conditions": conditions}}, pods).phase == phase


@pytest.mark.parametrize("folder", ["My_Data", "data/small", "a" * 58])
def test_a_folder_that_the_job_cannot_be_called_after(folder):
    with pytest.raises(UserError, match=f"--folder '{folder}': use at most 57 lower-case letters"):
        datajob.to_spec(asked(*IMAGENET, "--folder", folder), "ml")


@pytest.mark.parametrize("url", ["https://me:pass%20word@example.org/a.zip", "s3://key:word@bucket/a.zip"])
def test_no_password_gets_into_the_manifest(url):
    with pytest.raises(UserError, match="use --secret instead") as refused:
        datajob.to_spec(asked(*IMAGENET, "--from", url), "ml")
    assert "word@" not in str(refused.value)
    for plain in ("https://example.org/a@2.zip?v=me@here", "abfs://pictures@account.dfs.core.windows.net/a.tar"):
        assert plain in datajob.to_spec(asked(*IMAGENET, "--from", plain), "ml").command


ON_DATA = ("folder", "--volume", "data", "--image", "worldsize:1", "--detach", "--from", "https://example.org/a.zip")


def sent_again(world, condition, labels=()) -> bool:
    """Whether the Job makes way for the same command when it has this condition."""
    status = {"conditions": [{"type": condition, "status": "True"}]}
    assert datajob.fetch(asked(*ON_DATA), world.cluster) == 0
    old = world.cluster.patch("Job", "fetch-folder", {"status": status, "metadata": {"labels": dict(labels)}})
    assert datajob.fetch(asked(*ON_DATA), world.cluster) == 0
    return world.cluster.get("Job", "fetch-folder")["metadata"]["uid"] != old["metadata"]["uid"]


def test_a_job_that_was_stopped_makes_way_and_one_that_kueue_holds_back_does_not(world):
    assert sent_again(world, "Suspended")
    assert not sent_again(world, "Suspended", {QUEUE_LABEL: "team"})


def test_a_secret_that_is_not_there_is_said_before_a_pod_waits_for_it(world):
    wanted = asked(*ON_DATA, "--secret", "store/KEY", "--pull-secret", "registry")
    world.add("Secret", "registry", type="kubernetes.io/dockerconfigjson")
    with pytest.raises(UserError, match="there is no Secret store in team: worldsize cluster secret create store"):
        datajob.fetch(wanted, world.cluster)
    world.add("Secret", "store", data={"OTHER": "eA=="})
    with pytest.raises(UserError, match="Secret store has no key KEY; its keys: OTHER"):
        datajob.fetch(wanted, world.cluster)
    assert world.cluster.list("Job") == []
    world.denied.add(("get", "secrets"))  # who may not read Secrets can use them all the same
    assert datajob.fetch(wanted, world.cluster) == 0


SMALL = ("--volume", "pictures", "--cpu", "200m", "--memory", "1Gi")


def a_volume(cluster) -> None:
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "pictures"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        }
    )


def pods(cluster) -> list[dict]:
    return cluster.list("Pod", datajob.Target().selector("fetch-folder"))


@pytest.mark.cluster
def test_restricted_pod_security_admits_the_pod(cluster):
    cluster.patch(
        "Namespace", cluster.namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    [job] = datajob.render(datajob.to_spec(asked(*IMAGENET), cluster.namespace))
    cluster.create(job, dry_run=True)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": job["spec"]["template"]["spec"]}
    cluster.create(pod, dry_run=True)


@pytest.mark.cluster
def test_what_is_not_there_is_said_before_a_pod_waits_for_it(cluster):
    with pytest.raises(UserError, match=r"no volume 'pictures': worldsize cluster volume create pictures"):
        datajob.fetch(asked(*IMAGENET), cluster)
    a_volume(cluster)
    with pytest.raises(UserError, match=r"no Secret kaggle with a key kaggle.json.*worldsize cluster secret create kaggle"):
        datajob.fetch(asked(*IMAGENET), cluster)
    assert cluster.list("Job") == []


PACK = """
import io, zipfile
from PIL import Image
out = io.BytesIO()
Image.new("RGB", (8, 8)).save(out, "PNG")
with zipfile.ZipFile("/mnt/pictures/a.zip", "w") as archive:
    for name in ("train/cat/1", "train/dog/2", "val/cat/3", "val/dog/4"):
        archive.writestr(name + ".png", out.getvalue())
"""


@pytest.mark.cluster
def test_a_data_set_comes_onto_a_volume(cluster, image, capfd):
    a_volume(cluster)
    wanted = asked("folder", *SMALL, "--image", image, "--from", "/mnt/pictures/a.zip")
    assert datajob.fetch(wanted, cluster) == 1
    out = capfd.readouterr()
    assert "--from /mnt/pictures/a.zip: there is no such file" in out.out
    assert "failed" in out.err
    assert len(pods(cluster)) == 1, "what the user has to mend is not tried again"

    [job] = datajob.render(datajob.to_spec(wanted, cluster.namespace))
    packing = {"metadata": {"name": "packing"}, "spec": job["spec"]["template"]["spec"]}
    packing["spec"]["containers"][0]["command"] = ["python", "-c", PACK]
    cluster.create({"apiVersion": "v1", "kind": "Pod"} | packing)
    deadline = time.monotonic() + 180
    while cluster.get("Pod", "packing")["status"]["phase"] != "Succeeded":
        assert time.monotonic() < deadline
        time.sleep(0.5)

    assert datajob.fetch(wanted, cluster) == 0
    assert "training    2 pictures" in capfd.readouterr().out
    assert datajob.fetch(wanted, cluster) == 0, "again: nothing is left to do"
    assert "training    2 pictures" in capfd.readouterr().out


@pytest.mark.cluster
def test_a_job_that_is_at_work_is_left_to_it(cluster, capfd):
    a_volume(cluster)
    unpullable = ("--image", "localhost:1/nowhere:1", "--detach")
    assert datajob.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/a.zip"), cluster) == 0
    uid = cluster.get("Job", "fetch-folder")["metadata"]["uid"]
    assert datajob.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/a.zip"), cluster) == 0
    assert "fetch-folder is at work already" in capfd.readouterr().err
    assert cluster.get("Job", "fetch-folder")["metadata"]["uid"] == uid
    with pytest.raises(UserError, match="busy with something else"):
        datajob.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/b.zip"), cluster)
