"""Files on a volume: parsing and listing, the file pod, and the web page."""

from __future__ import annotations

import re
import time

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from worldsize.cluster.manifests import pod
from worldsize.cluster.storage import browse, file_pod, files
from worldsize.errors import UserError

# Parsing and listing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remote", "parsed"),
    [
        ("imagenet", ("imagenet", "/")),
        ("imagenet:", ("imagenet", "/")),
        ("imagenet:/", ("imagenet", "/")),
        ("imagenet:/runs/x", ("imagenet", "/runs/x")),
        ("imagenet:runs//./x/", ("imagenet", "/runs/x/")),
        ("a.b-1:/x:y z", ("a.b-1", "/x:y z")),
    ],
)
def test_volume_and_path(remote, parsed):
    assert files.parse(remote) == parsed


@pytest.mark.parametrize("remote", ["", ":/x", "Image:/x", "a/b", "v:/../x", "v:/a/..", "v:/a\0b", "-v:/x"])
def test_invalid_volume_and_path(remote):
    with pytest.raises(UserError):
        files.parse(remote)


def test_listing(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    lines = files.listing(
        [
            ["checkpoints", True, 4096, 0, ""],
            ["report\x1b[2J", False, 12, 86400, ""],
            ["weights", False, 102_500_000, 1.5e9, ""],
            ["last", False, 7, 1.5e9, "weights"],
        ]
    )
    assert lines == [
        "       -  1970-01-01 00:00  checkpoints/",
        "12 bytes  1970-01-02 00:00  report\\x1b[2J",
        "102.5 MB  2017-07-14 02:40  weights",
        " 7 bytes  2017-07-14 02:40  last -> weights",
    ]


# The pod --------------------------------------------------------------------------------------------------------------


def test_pod_manifest():
    settings = file_pod.FilePod("imagenet", "ns", "registry/image:1", "a1b2c3", pull_secrets=("reg",), node="node-7")
    expected = """
    apiVersion: v1
    kind: Pod
    metadata:
      annotations:
        consul.hashicorp.com/connect-inject: "false"
        kuma.io/sidecar-injection: disabled
        linkerd.io/inject: disabled
        sidecar.istio.io/inject: "false"
      name: files-imagenet-a1b2c3
      namespace: ns
    spec:
      activeDeadlineSeconds: 43200
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms: [{matchFields: [{key: metadata.name, operator: In, values: [node-7]}]}]
      automountServiceAccountToken: false
      containers:
      - name: files
        image: registry/image:1
        imagePullPolicy: IfNotPresent
        command: [sleep, "43200"]
        resources: {limits: {cpu: "1", memory: 256Mi}, requests: {cpu: 200m, memory: 256Mi}}
        securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}, readOnlyRootFilesystem: true}
        volumeMounts: [{mountPath: /mnt/imagenet, name: volume, readOnly: true}]
      enableServiceLinks: false
      imagePullSecrets: [{name: reg}]
      restartPolicy: Never
      securityContext: {fsGroup: 1000, fsGroupChangePolicy: OnRootMismatch, runAsGroup: 1000, runAsNonRoot: true,
                        runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
      terminationGracePeriodSeconds: 5
      tolerations: [{key: nvidia.com/gpu, operator: Exists}]
      volumes: [{name: volume, persistentVolumeClaim: {claimName: imagenet}}]
    """
    rendered = file_pod.manifest(settings)
    labels = rendered["metadata"].pop("labels")
    assert rendered == yaml.safe_load(expected)
    assert labels == pod.labels("imagenet", "files") | pod.NO_MESH_LABELS


def test_the_user_can_be_left_to_the_cluster():
    """OpenShift refuses fixed users."""
    any_user = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    settings = file_pod.FilePod("imagenet", "ns", "registry/image:1", "a1b2c3", fixed_user=False)
    assert file_pod.manifest(settings)["spec"]["securityContext"] == any_user
    page = browse.manifests("imagenet", "ns", "browser:1", fixed_user=False)[-1]
    assert page["spec"]["template"]["spec"]["securityContext"] == any_user


def test_a_volume_of_blocks_is_refused(fake_cluster):
    fake_cluster.volume("data", "ReadWriteMany", volumeMode="Block")
    with pytest.raises(UserError, match="volume data is a raw block device"):
        file_pod.plan(fake_cluster.cluster, "data", "a1b2c3", "i:1", True)


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,250}[a-z0-9])?", fullmatch=True))
def test_any_volume_name_gives_valid_pod_names(volume):
    rendered = file_pod.manifest(file_pod.FilePod(volume, "ns", "i:1", "a1b2c3"))["metadata"]
    dns = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
    assert re.fullmatch(dns, rendered["name"])
    assert all(re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", v) for v in rendered["labels"].values())


WAITING = {
    "image": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'},
    "once": {"reason": "ErrImagePull", "message": "timeout"},
    "config": {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'},
    "creating": {"reason": "ContainerCreating"},
}


@pytest.mark.parametrize(
    ("status", "events", "reason"),
    [
        ({"phase": "Pending"}, [], ("", False)),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]},
            [],
            ("not scheduled: 0/3 nodes are available", False),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["image"]}}]},
            [
                {"reason": "Failed", "message": 'Failed to pull image "x": no such host', "type": "Warning"},
                {"reason": "Failed", "message": "Error: ImagePullBackOff", "type": "Warning"},
            ],
            ('ImagePullBackOff: Failed to pull image "x": no such host', True),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["once"]}}]},
            [],
            ("ErrImagePull: timeout", False),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["config"]}}]},
            [],
            ('CreateContainerConfigError: secret "x" not found', True),
        ),
        (
            {"containerStatuses": [{"state": {"waiting": WAITING["creating"]}}]},
            [{"reason": "FailedAttachVolume", "message": "Multi-Attach error", "type": "Warning"}],
            ("FailedAttachVolume: Multi-Attach error", False),
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, [], ("Evicted: low on disk", True)),
    ],
)
def test_why_the_pod_does_not_run(status, events, reason):
    assert file_pod.why_not_running({"status": status}, events) == reason


def test_the_page_for_a_volume_is_restricted_and_closed():
    policy, service, deployment = browse.manifests("imagenet", "ns", "filebrowser:1")
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert [one["kind"] for one in (policy, service, deployment)] == ["NetworkPolicy", "Service", "Deployment"]
    assert {one["metadata"]["name"] for one in (policy, service, deployment)} == {"browse-imagenet"}
    # Pod Security level "restricted": https://kubernetes.io/docs/concepts/security/pod-security-standards/
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["volumeMounts"][0] == {"mountPath": "/mnt/imagenet", "name": "volume", "readOnly": True}
    assert "--root=/mnt/imagenet" in container["command"]
    # There is no login: where no plugin enforces the policy, other pods could reach any non-loopback address.
    assert "--address=127.0.0.1" in container["command"]
    assert not [name for name in container if name.endswith("Probe")]
    assert policy["spec"]["ingress"] == [] and service["spec"]["clusterIP"] == "None"
    labels = template["metadata"]["labels"]
    for selector in (policy["spec"]["podSelector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    writable = browse.manifests("data.v1", "ns", "filebrowser:1", write=True)[2]
    assert writable["metadata"]["name"] == "browse-data-v1"
    for name in ("Bad_Name y", "a" * 57):
        with pytest.raises(UserError, match="invalid volume name"):
            browse.manifests(name, "ns", "filebrowser:1")
    assert writable["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is False
