"""Volumes: manifests, creation, provisioning reports, and deletion."""

from __future__ import annotations

import pytest
import yaml

from object_server import CLASSES, NS
from worldsize.cluster.storage import volumes
from worldsize.cluster.storage.volumes import VolumeCreate, VolumeDelete, VolumeList
from worldsize.errors import UserError


def test_claim_manifest():
    expected = """
    apiVersion: v1
    kind: PersistentVolumeClaim
    metadata:
      name: imagenet
      namespace: ns
    spec:
      accessModes: [ReadWriteMany]
      resources: {requests: {storage: 400Gi}}
      storageClassName: fast
    """
    claim = volumes.manifest("imagenet", "ns", "400Gi", "rwx", "fast")
    labels = claim["metadata"].pop("labels")
    assert claim == yaml.safe_load(expected)
    assert labels["app.kubernetes.io/managed-by"] == "worldsize" and labels["app.kubernetes.io/component"] == "volume"
    # Kubernetes API reference: "" means no class; a missing field means the cluster's default class.
    assert volumes.manifest("imagenet", "ns", "400Gi", "rwo", "")["spec"]["storageClassName"] == ""
    assert "storageClassName" not in volumes.manifest("imagenet", "ns", "400Gi", "rwo", None)["spec"]


@pytest.mark.parametrize(
    ("name", "size"), [("Image", "1Gi"), ("a_b", "1Gi"), ("x" * 64, "1Gi"), ("x", "1GB"), ("x", "0"), ("x", "100")]
)
def test_invalid_name_or_size(name, size):
    with pytest.raises(UserError, match=name if size == "1Gi" else size):
        volumes.manifest(name, "ns", size, "rwx", None)


def test_same_volume_again_succeeds_and_a_different_one_is_refused(store, capsys):
    create = VolumeCreate("data", "1Ti", storage_class="standard")
    assert volumes.create(create, store.cluster, wait_s=0) == 0
    store.objects[f"{NS}/persistentvolumeclaims/data"]["status"]["phase"] = "Bound"
    before = dict(store.objects)
    assert volumes.create(VolumeCreate("data", "1024Gi"), store.cluster, wait_s=0) == 0
    assert "already exists: 1Ti, rwx, class standard" in capsys.readouterr().out
    with pytest.raises(UserError, match="--size 1Ti, not 2Ti; --access rwx, not rwo; --class 'standard', not 'x'"):
        volumes.create(VolumeCreate("data", "2Ti", "x", "rwo"), store.cluster)
    store.objects[f"{NS}/persistentvolumeclaims/data"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(UserError, match="is being deleted; wait"):
        volumes.create(create, store.cluster)
    assert store.objects.keys() == before.keys()


def test_unknown_class_is_refused_and_existing_ones_are_listed(store):
    with pytest.raises(UserError, match=r"--class nix: .* existing: standard"):
        volumes.create(VolumeCreate("data", "1Gi", "nix"), store.cluster)
    store.put(f"{CLASSES}/standard")
    with pytest.raises(UserError, match=r"no default StorageClass; pass --class with one of: standard"):
        volumes.create(VolumeCreate("data", "1Gi"), store.cluster)
    beta = {"storageclass.beta.kubernetes.io/is-default-class": "true"}
    store.put(f"{CLASSES}/old", metadata={"name": "old", "annotations": beta})
    assert volumes.create(VolumeCreate("beta", "1Gi"), store.cluster, wait_s=0) == 0
    assert volumes.create(VolumeCreate("data", "1Gi", ""), store.cluster, wait_s=0) == 0
    store.answer = lambda method, path, body: (403, b"{}") if path == CLASSES else None
    assert volumes.create(VolumeCreate("other", "1Gi", "nix"), store.cluster, wait_s=0) == 0


EVENT = {"involvedObject": {"name": "data"}, "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("event", "code", "message"),
    [
        ({"reason": "WaitForFirstConsumer", "message": "waiting"}, 0, "allocated when the first pod uses the volume"),
        (
            {"reason": "ExternalProvisioning", "message": "waiting for a volume"},
            0,
            "ExternalProvisioning: waiting for a volume",
        ),
        ({"reason": "ProvisioningFailed", "message": "no such pool"}, 1, "no such pool\nnot every StorageClass"),
    ],
)
def test_state_of_a_new_volume_is_reported(store, capsys, event, code, message):
    store.put(f"{NS}/events/e", **EVENT, **event)
    assert volumes.create(VolumeCreate("data", "1Gi"), store.cluster, wait_s=0.5) == code
    assert message in "".join(capsys.readouterr())


def user(name, claim, phase="Running"):
    source = {"persistentVolumeClaim": {"claimName": claim}}
    spec = {"volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "v", **source}]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


def test_a_volume_in_use_or_without_yes_is_not_deleted(store, capsys):
    volumes.create(VolumeCreate("data", "1Gi"), store.cluster, wait_s=0)
    store.put(f"{NS}/pods/p", **user("p", "data"))
    store.put(f"{NS}/pods/q", **user("q", "data", "Succeeded"))
    store.put(f"{NS}/pods/r", **user("r", "other"))
    leaving = store.put(f"{NS}/pods/s", **user("s", "data"))
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    capsys.readouterr()
    volumes.show(VolumeList(), store.cluster)
    assert capsys.readouterr().out.splitlines()[1].split() == ["data", "1Gi", "rwx", "Pending", "p,", "s"]
    with pytest.raises(UserError, match="in use by p; stop"):
        volumes.delete(VolumeDelete("data", yes=True), store.cluster)
    del store.objects[f"{NS}/pods/p"]
    with pytest.raises(UserError, match=r"permanently deletes volume data .* and all its data; pass --yes"):
        volumes.delete(VolumeDelete("data"), store.cluster)
    with pytest.raises(UserError, match="no volume 'date' in namespace ns; existing volumes: data"):
        volumes.delete(VolumeDelete("date", yes=True), store.cluster)
    assert volumes.delete(VolumeDelete("data", yes=True), store.cluster) == 0
    assert f"{NS}/persistentvolumeclaims/data" not in store.objects
    store.put(f"{NS}/persistentvolumeclaims/foreign", spec={"accessModes": []})
    with pytest.raises(UserError, match="worldsize did not create volume foreign"):
        volumes.delete(VolumeDelete("foreign", yes=True), store.cluster)


@pytest.mark.cluster
def test_a_volume_on_a_cluster(cluster, capsys):
    create = VolumeCreate("data", "1Gi")
    assert volumes.create(create, cluster) == 0
    assert volumes.create(create, cluster) == 0
    assert capsys.readouterr().out.splitlines()[0] == "volume data created: 1Gi, rwx, class standard"
    with pytest.raises(UserError, match="--size 1Gi, not 2Gi"):
        volumes.create(VolumeCreate("data", "2Gi"), cluster)
    with pytest.raises(UserError, match="--class nix"):
        volumes.create(VolumeCreate("other", "1Gi", "nix"), cluster)
    cluster.create(volumes.manifest("unbound", cluster.namespace, "1Gi", "rwo", "nix"))
    assert volumes.create(VolumeCreate("unbound", "1Gi", access="rwo"), cluster, wait_s=5) == 1
    assert 'ProvisioningFailed: storageclass.storage.k8s.io "nix" not found' in capsys.readouterr().err
    volumes.show(VolumeList(), cluster)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["data", "1Gi", "rwx", "standard", "Bound"] in rows and ["unbound", "1Gi", "rwo", "nix", "Pending"] in rows
    for name in ("data", "unbound"):
        assert volumes.delete(VolumeDelete(name, yes=True), cluster) == 0
        assert cluster.get("PersistentVolumeClaim", name) is None


def test_events_of_a_deleted_volume_of_the_same_name_do_not_count(store, monkeypatch):
    claim = store.put(f"{NS}/persistentvolumeclaims/data")
    claim["metadata"]["uid"] = "u-2"
    asked, list_all = [], store.cluster.list
    monkeypatch.setattr(store.cluster, "list", lambda *a, **k: asked.append(k.get("fields", "")) or list_all(*a, **k))
    volumes.why_pending(store.cluster, claim)
    assert asked == ["involvedObject.kind=PersistentVolumeClaim,involvedObject.name=data,involvedObject.uid=u-2"]
