"""The Job that downloads a dataset: its manifest, and its behavior on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro
import yaml

from fake_cluster import KeepingCluster
from waiting import until
from worldsize import __version__
from worldsize.cluster.jobs import fetch
from worldsize.cluster.manifests.pod import QUEUE_LABEL
from worldsize.data.fetch import command as data_fetch
from worldsize.errors import UserError

FAKE_CLUSTER = KeepingCluster

# Written by hand from the Kubernetes API reference of Job and Pod.
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
      annotations:
        consul.hashicorp.com/connect-inject: "false"
        kuma.io/sidecar-injection: disabled
        linkerd.io/inject: disabled
        sidecar.istio.io/inject: "false"
      labels:
        <<: *labels
        kuma.io/sidecar-injection: disabled
        sidecar.istio.io/inject: "false"
    spec:
      automountServiceAccountToken: false
      containers:
      - name: fetch
        image: registry.example/worldsize:1
        imagePullPolicy: IfNotPresent
        command: [worldsize, data, fetch, imagenet, --to, /mnt/images/data/imagenet]
        env:
        - {name: HOME, value: /home/worldsize}
        - {name: KAGGLE_CONFIG_DIR, value: /etc/kaggle}
        - {name: NCCL_DEBUG, value: WARN}
        - {name: PYTHONUNBUFFERED, value: "1"}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /tmp/inductor}
        - {name: TTY_COMPATIBLE, value: "0"}
        - {name: USER, value: worldsize}
        - {name: WORLDSIZE_ADDRESS, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: WORLDSIZE_NODES, value: "1"}
        - {name: WORLDSIZE_PROCS, value: "1"}
        - {name: KAGGLE_USERNAME, valueFrom: {secretKeyRef: {key: KAGGLE_USERNAME, name: kaggle, optional: true}}}
        - {name: KAGGLE_KEY, valueFrom: {secretKeyRef: {key: KAGGLE_KEY, name: kaggle, optional: true}}}
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
        - {mountPath: /mnt/images, name: volume-0}
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
      - {name: volume-0, persistentVolumeClaim: {claimName: images}}
      - {name: kaggle, secret: {secretName: kaggle, defaultMode: 288}}  # 0440
"""


def asked(*argv: str) -> fetch.Fetch:
    return tyro.cli(fetch.Fetch, args=list(argv))


IMAGENET = ("imagenet", "--volume", "images", "--image", "registry.example/worldsize:1")


def test_the_job():
    [job] = fetch.render(fetch.to_spec(asked(*IMAGENET), "ml"))
    assert job == yaml.safe_load(JOB.replace("VERSION", __version__))


def test_the_token_is_mounted_for_kaggle_alone():
    mirror = fetch.to_spec(asked(*IMAGENET, "--from", "s3://bucket/imagenet.zip", "--secret", "store/KEY"), "ml")
    [job] = fetch.render(mirror)
    assert "kaggle" not in yaml.dump(job)
    inside = job["spec"]["template"]["spec"]["containers"][0]
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"key": "KEY", "name": "store"}}} in inside["env"]
    [other] = fetch.render(fetch.to_spec(asked("folder", *IMAGENET[1:], "--from", "kaggle:dogs"), "ml"))
    assert "/etc/kaggle" in yaml.dump(other)


def test_what_the_pod_runs_is_what_was_asked_for():
    more = ("--from", "https://example.org/a.zip", "--sha256", "ab" * 32, "--keep-archive", "--subset", "--folder", "small")
    spec = fetch.to_spec(asked(*IMAGENET, *more), "ml")
    assert spec.name == "fetch-small"
    in_the_pod = tyro.cli(data_fetch.Fetch, args=list(spec.command[2:]))
    assert spec.command[:2] == ("data", "fetch")
    assert in_the_pod == data_fetch.Fetch(
        "imagenet", Path("/mnt/images/data/small"), "https://example.org/a.zip", "ab" * 32, keep_archive=True, subset=True
    )


def test_a_job_that_cannot_run():
    spec = fetch.to_spec(asked("imagenet", "--volume", "My_Volume", "--image", "worldsize:latest"), "ml")
    with pytest.raises(UserError, match=r"My_Volume(.|\n)*a tag other than latest"):
        fetch.render(spec)


@pytest.mark.parametrize("option", ["from", "sha256", "folder", "env", "secret", "volume", "image"])
def test_an_empty_option_is_refused(option):
    """Of a shell variable that is not set: the dataset would come from elsewhere, or unverified."""
    with pytest.raises(UserError, match=f"--{option} is (empty|required)"):
        fetch.to_spec(asked(*IMAGENET, f"--{option}", ""), "ml")


@pytest.mark.parametrize("source", ["~/a.zip", "a.zip", "/home/me/a.zip", "/mnt/other/a.zip", "file:///home/me/a.zip"])
def test_an_archive_on_the_users_own_machine_is_refused(source):
    with pytest.raises(UserError, match=r"--from .*: pods do not have this path; they have /mnt/images"):
        fetch.to_spec(asked(*IMAGENET, "--from", source), "ml")


def a_pod(phase: str, created: str = "2026-01-01T00:00:00Z") -> dict:
    return {"metadata": {"creationTimestamp": created}, "status": {"phase": phase}}


def test_a_url_and_an_environment_variable_reach_the_pod_as_they_were_given():
    """Kubernetes makes $ of $$, and expands $(NAME)."""
    spec = fetch.to_spec(asked(*IMAGENET, "--from", "https://x/$(HOME)/a?b=$$c", "--env", "A=$(HOME)"), "ml")
    [container] = fetch.render(spec)[0]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1] == "https://x/$$(HOME)/a?b=$$$$c"
    assert {"name": "A", "value": "$$(HOME)"} in container["env"]


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
    assert fetch.Target().state({"status": {"conditions": conditions}}, pods).phase == phase


@pytest.mark.parametrize("folder", ["My_Data", "data/small", "a" * 58])
def test_a_folder_that_the_job_cannot_be_called_after(folder):
    with pytest.raises(UserError, match=f"--folder '{folder}': use at most 57 lower-case letters"):
        fetch.to_spec(asked(*IMAGENET, "--folder", folder), "ml")


@pytest.mark.parametrize("url", ["https://me:pass%20word@example.org/a.zip", "s3://key:word@bucket/a.zip"])
def test_no_password_gets_into_the_manifest(url):
    with pytest.raises(UserError, match="use --secret instead") as refused:
        fetch.to_spec(asked(*IMAGENET, "--from", url), "ml")
    assert "word@" not in str(refused.value)
    for plain in ("https://example.org/a@2.zip?v=me@here", "abfs://images@account.dfs.core.windows.net/a.tar"):
        assert plain in fetch.to_spec(asked(*IMAGENET, "--from", plain), "ml").command


ON_DATA = ("folder", "--volume", "data", "--image", "worldsize:1", "--detach", "--from", "https://example.org/a.zip")


def sent_again(fake_cluster, condition, labels=()) -> bool:
    """Whether the same command replaces the Job when it has this condition."""
    status = {"conditions": [{"type": condition, "status": "True"}]}
    assert fetch.fetch(asked(*ON_DATA), fake_cluster.cluster) == 0
    old = fake_cluster.cluster.patch("Job", "fetch-folder", {"status": status, "metadata": {"labels": dict(labels)}})
    assert fetch.fetch(asked(*ON_DATA), fake_cluster.cluster) == 0
    return fake_cluster.cluster.get("Job", "fetch-folder")["metadata"]["uid"] != old["metadata"]["uid"]


def test_a_stopped_job_is_replaced_and_one_in_a_kueue_queue_is_not(fake_cluster):
    assert sent_again(fake_cluster, "Suspended")
    assert not sent_again(fake_cluster, "Suspended", {QUEUE_LABEL: "team"})


@pytest.mark.parametrize(
    "keys", [["kaggle.json"], ["access_token"], ["KAGGLE_API_TOKEN"], ["KAGGLE_USERNAME", "KAGGLE_KEY"]]
)
def test_every_kind_of_kaggle_token_is_accepted(fake_cluster, keys):
    fake_cluster.volume("images", "ReadWriteMany")
    fake_cluster.add("Secret", "kaggle", data=dict.fromkeys(keys, "eA=="))
    assert fetch.fetch(asked(*IMAGENET, "--detach"), fake_cluster.cluster) == 0


@pytest.mark.parametrize("keys", [["KAGGLE_API_TOKEN"], ["KAGGLE_USERNAME", "KAGGLE_KEY"]])
def test_a_kaggle_token_may_be_in_a_secret_of_any_name(fake_cluster, keys):
    fake_cluster.volume("images", "ReadWriteMany")
    fake_cluster.add("Secret", "mine", data=dict.fromkeys(keys, "eA=="))
    given = [word for key in keys for word in ("--secret", f"mine/{key}")]
    assert fetch.fetch(asked(*IMAGENET, "--detach", *given), fake_cluster.cluster) == 0
    job = yaml.dump(fake_cluster.cluster.get("Job", "fetch-imagenet"))
    assert "name: mine" in job and "secretName: kaggle" not in job


def test_a_user_and_a_key_may_come_from_two_places(fake_cluster):
    fake_cluster.volume("images", "ReadWriteMany")
    fake_cluster.add("Secret", "mine", data={"KAGGLE_KEY": "eA=="})
    given = ("--env", "KAGGLE_USERNAME=me", "--secret", "mine/KAGGLE_KEY")
    assert fetch.fetch(asked(*IMAGENET, "--detach", *given), fake_cluster.cluster) == 0


@pytest.mark.parametrize(
    ("volume", "message"), [({"volumeMode": "Block"}, "raw block device"), ({"modes": "ReadOnlyMany"}, "is not writable")]
)
def test_a_volume_that_cannot_take_the_dataset_is_refused(fake_cluster, volume, message):
    fake_cluster.volume("data", volume.pop("modes", "ReadWriteMany"), **volume)
    with pytest.raises(UserError, match=message):
        fetch.fetch(asked(*ON_DATA), fake_cluster.cluster)


def test_half_a_kaggle_token_is_refused(fake_cluster):
    fake_cluster.volume("images", "ReadWriteMany")
    fake_cluster.add("Secret", "kaggle", data={"KAGGLE_KEY": "eA=="})
    with pytest.raises(UserError, match=r"no Secret kaggle with a key kaggle.json, access_token, KAGGLE_API_TOKEN, or"):
        fetch.fetch(asked(*IMAGENET, "--detach"), fake_cluster.cluster)


def test_a_missing_secret_is_reported_before_a_pod_waits_for_it(fake_cluster):
    wanted = asked(*ON_DATA, "--secret", "store/KEY", "--pull-secret", "registry")
    fake_cluster.add("Secret", "registry", type="kubernetes.io/dockerconfigjson")
    with pytest.raises(
        UserError, match="Secret store does not exist in namespace team: worldsize cluster secret create store"
    ):
        fetch.fetch(wanted, fake_cluster.cluster)
    fake_cluster.add("Secret", "store", data={"OTHER": "eA=="})
    with pytest.raises(UserError, match="Secret store has no key KEY; its keys: OTHER"):
        fetch.fetch(wanted, fake_cluster.cluster)
    assert fake_cluster.cluster.list("Job") == []
    fake_cluster.denied.add(("get", "secrets"))  # a job can use Secrets that the user may not read
    assert fetch.fetch(wanted, fake_cluster.cluster) == 0


SMALL = ("--volume", "images", "--cpu", "200m", "--memory", "1Gi")


def a_volume(cluster) -> None:
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "images"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        }
    )


def pods(cluster) -> list[dict]:
    return cluster.list("Pod", fetch.Target().selector("fetch-folder"))


@pytest.mark.cluster
def test_restricted_pod_security_admits_the_pod(cluster):
    cluster.patch(
        "Namespace", cluster.namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    [job] = fetch.render(fetch.to_spec(asked(*IMAGENET), cluster.namespace))
    cluster.create(job, dry_run=True)
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": job["spec"]["template"]["spec"]}
    cluster.create(pod, dry_run=True)


@pytest.mark.cluster
def test_missing_objects_are_reported_before_a_pod_waits_for_them(cluster):
    with pytest.raises(UserError, match=r"no volume 'images' in namespace .* worldsize cluster volume create images"):
        fetch.fetch(asked(*IMAGENET), cluster)
    a_volume(cluster)
    with pytest.raises(UserError, match=r"no Secret kaggle with a key kaggle.json.*worldsize cluster secret create kaggle"):
        fetch.fetch(asked(*IMAGENET), cluster)
    assert cluster.list("Job") == []


PACK = """
import io, zipfile
from PIL import Image
out = io.BytesIO()
Image.new("RGB", (8, 8)).save(out, "PNG")
with zipfile.ZipFile("/mnt/images/a.zip", "w") as archive:
    for name in ("train/cat/1", "train/dog/2", "val/cat/3", "val/dog/4"):
        archive.writestr(name + ".png", out.getvalue())
"""


@pytest.mark.cluster
def test_a_dataset_is_downloaded_to_a_volume(cluster, image, capfd):
    a_volume(cluster)
    wanted = asked("folder", *SMALL, "--image", image, "--from", "/mnt/images/a.zip")
    assert fetch.fetch(wanted, cluster) == 1
    out = capfd.readouterr()
    assert "--from /mnt/images/a.zip: no such file" in out.out
    assert "failed" in out.err
    assert len(pods(cluster)) == 1, "a user error must not be retried"

    [job] = fetch.render(fetch.to_spec(wanted, cluster.namespace))
    packing = {"metadata": {"name": "packing"}, "spec": job["spec"]["template"]["spec"]}
    packing["spec"]["containers"][0]["command"] = ["python", "-c", PACK]
    cluster.create({"apiVersion": "v1", "kind": "Pod"} | packing)
    until(lambda: cluster.get("Pod", "packing")["status"]["phase"] == "Succeeded", "the archive is packed", 300, every=0.5)

    assert fetch.fetch(wanted, cluster) == 0
    assert "training    2 images" in capfd.readouterr().out
    assert fetch.fetch(wanted, cluster) == 0, "repeated: nothing is left to do"
    assert "training    2 images" in capfd.readouterr().out


@pytest.mark.cluster
def test_a_running_job_is_kept(cluster, capfd):
    a_volume(cluster)
    unpullable = ("--image", "localhost:1/nowhere:1", "--detach")
    assert fetch.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/a.zip"), cluster) == 0
    uid = cluster.get("Job", "fetch-folder")["metadata"]["uid"]
    assert fetch.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/a.zip"), cluster) == 0
    assert "Job fetch-folder is already running" in capfd.readouterr().err
    assert cluster.get("Job", "fetch-folder")["metadata"]["uid"] == uid
    with pytest.raises(UserError, match="already running a different fetch"):
        fetch.fetch(asked("folder", *SMALL, *unpullable, "--from", "https://example.org/b.zip"), cluster)
