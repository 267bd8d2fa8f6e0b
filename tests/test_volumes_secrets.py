"""Volumes, and secrets whose values are seen nowhere."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worldsize.errors import UserError
from worldsize.launch import secrets, volumes
from worldsize.launch.cluster import Cluster, ClusterError
from worldsize.launch.secrets import SecretCreate, SecretDelete, SecretList
from worldsize.launch.volumes import VolumeCreate, VolumeDelete, VolumeList

CANARY = "canary-7Qx2-do-not-tell"


class Store:
    """An API server that keeps what it is sent; ``answer`` may answer first: (method, path, body) -> (status, bytes)."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.answer = lambda method, path, body: None
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                url = urlsplit(self.path)
                text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                said = store.answer(self.command, url.path, text)
                if said is not None and said[0] == 0:  # not even HTTP
                    self.wfile.write(said[1])
                    self.close_connection = True
                    return
                if said is None:
                    status, found = store.act(self.command, url.path, parse_qs(url.query), json.loads(text or b"null"))
                    said = status, json.dumps(found).encode()
                self.send_response(said[0])
                self.send_header("Content-Length", str(len(said[1])))
                self.end_headers()
                self.wfile.write(said[1])

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

            def log_message(self, *_) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def act(self, method: str, path: str, query: dict, body: dict | None) -> tuple[int, dict]:
        if method == "POST":
            path += "/" + body["metadata"]["name"]
            if path in self.objects:
                return 409, {"message": "already exists", "reason": "AlreadyExists"}
            if "dryRun" not in query:
                about = body["metadata"] | {"creationTimestamp": "2026-01-01T00:00:00Z"}
                self.objects[path] = body | {"metadata": about, "status": {"phase": "Pending"}}
            return 201, body
        if method == "PUT":
            about = self.objects[path]["metadata"] | body["metadata"]
            self.objects[path] = body | {"metadata": about}
            return 200, body
        if path.rpartition("/")[2] in ("pods", "events", "secrets", "persistentvolumeclaims", "storageclasses"):
            return 200, {"items": self.below(path + "/", query), "metadata": {"resourceVersion": "1"}}
        if path not in self.objects:
            return 404, {"message": "not found"}
        return 200, self.objects.pop(path) if method == "DELETE" else self.objects[path]

    def below(self, path: str, query: dict) -> list[dict]:
        labels = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
        items = [one for where, one in self.objects.items() if where.startswith(path)]
        return [one for one in items if labels.items() <= one["metadata"].get("labels", {}).items()]

    def put(self, path: str, **one) -> dict:
        self.objects[path] = {"metadata": {"name": path.rpartition("/")[2]}, "spec": {}, "status": {}} | one
        return self.objects[path]


NS = "/api/v1/namespaces/ns"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
DEFAULT = {"annotations": {"storageclass.kubernetes.io/is-default-class": "true"}, "name": "standard"}


@pytest.fixture(scope="module")
def apiserver(tmp_path_factory):
    """A `Store` with a Cluster that talks to it."""
    module = pytest.importorskip("kubernetes.config.kube_config")
    store = Store()
    about = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{store.server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(yaml.safe_dump(about))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
        store.cluster = Cluster()
    yield store
    store.server.shutdown()
    store.server.server_close()


@pytest.fixture
def store(apiserver):
    apiserver.objects.clear()
    apiserver.answer = lambda method, path, body: None
    apiserver.put(f"{CLASSES}/standard", metadata=DEFAULT)
    return apiserver


# Volumes --------------------------------------------------------------------------------------------------------------


def test_the_claim_is_this_one():
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
    # Kubernetes' reference: "" is a volume that has no class, none at all the cluster's default.
    assert volumes.manifest("imagenet", "ns", "400Gi", "rwo", "")["spec"]["storageClassName"] == ""
    assert "storageClassName" not in volumes.manifest("imagenet", "ns", "400Gi", "rwo", None)["spec"]


@pytest.mark.parametrize(("name", "size"), [("Image", "1Gi"), ("a_b", "1Gi"), ("x" * 64, "1Gi"), ("x", "1GB"), ("x", "0")])
def test_what_no_cluster_would_take(name, size):
    with pytest.raises(UserError, match=name if size == "1Gi" else size):
        volumes.manifest(name, "ns", size, "rwx", None)


def test_the_same_volume_again_is_no_error_and_another_is_refused(store, capsys):
    create = VolumeCreate("data", "1Ti", storage_class="standard")
    assert volumes.create(create, store.cluster, wait_s=0) == 0
    store.objects[f"{NS}/persistentvolumeclaims/data"]["status"]["phase"] = "Bound"
    before = dict(store.objects)
    assert volumes.create(VolumeCreate("data", "1024Gi"), store.cluster, wait_s=0) == 0
    assert "is there already: 1Ti, rwx, class standard" in capsys.readouterr().out
    with pytest.raises(UserError, match="--size 1Ti, not 2Ti; --access rwx, not rwo; --class 'standard', not 'x'"):
        volumes.create(VolumeCreate("data", "2Ti", "x", "rwo"), store.cluster)
    store.objects[f"{NS}/persistentvolumeclaims/data"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    with pytest.raises(UserError, match="just being deleted"):
        volumes.create(create, store.cluster)
    assert store.objects.keys() == before.keys()


def test_a_class_that_does_not_exist_is_refused_with_those_that_do(store):
    with pytest.raises(UserError, match=r"--class nix: .* there are: standard"):
        volumes.create(VolumeCreate("data", "1Gi", "nix"), store.cluster)
    store.put(f"{CLASSES}/standard")
    with pytest.raises(UserError, match=r"no default StorageClass.* there are: standard"):
        volumes.create(VolumeCreate("data", "1Gi"), store.cluster)
    assert volumes.create(VolumeCreate("data", "1Gi", ""), store.cluster, wait_s=0) == 0
    store.answer = lambda method, path, body: (403, b"{}") if path == CLASSES else None
    assert volumes.create(VolumeCreate("other", "1Gi", "nix"), store.cluster, wait_s=0) == 0


EVENT = {"involvedObject": {"name": "data"}, "metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}


@pytest.mark.parametrize(
    ("event", "code", "words"),
    [
        ({"reason": "WaitForFirstConsumer", "message": "waiting"}, 0, "with the first pod that uses it"),
        (
            {"reason": "ExternalProvisioning", "message": "waiting for a volume"},
            0,
            "ExternalProvisioning: waiting for a volume",
        ),
        ({"reason": "ProvisioningFailed", "message": "no such pool"}, 1, "no such pool\nnot every StorageClass"),
    ],
)
def test_what_becomes_of_a_new_volume_is_said(store, capsys, event, code, words):
    store.put(f"{NS}/events/e", **EVENT, **event)
    assert volumes.create(VolumeCreate("data", "1Gi"), store.cluster, wait_s=0.5) == code
    assert words in "".join(capsys.readouterr())


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
    with pytest.raises(UserError, match="in use by p:"):
        volumes.delete(VolumeDelete("data", yes=True), store.cluster)
    del store.objects[f"{NS}/pods/p"]
    with pytest.raises(UserError, match="all its data would be lost for good: add --yes"):
        volumes.delete(VolumeDelete("data"), store.cluster)
    with pytest.raises(UserError, match="no volume 'date'; there are: data"):
        volumes.delete(VolumeDelete("date", yes=True), store.cluster)
    assert volumes.delete(VolumeDelete("data", yes=True), store.cluster) == 0
    assert f"{NS}/persistentvolumeclaims/data" not in store.objects
    store.put(f"{NS}/persistentvolumeclaims/foreign", spec={"accessModes": []})
    with pytest.raises(UserError, match="not made by worldsize"):
        volumes.delete(VolumeDelete("foreign", yes=True), store.cluster)


# Secrets --------------------------------------------------------------------------------------------------------------


def kept(store, name="token"):
    """The values that the server has."""
    return {key: base64.b64decode(value) for key, value in store.objects[f"{NS}/secrets/{name}"]["data"].items()}


@pytest.fixture
def typed(monkeypatch):
    """typed(content): this comes from stdin."""

    def there(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(content)))

    return there


def test_the_secret_is_this_one():
    secret = secrets.manifest("kaggle", "ns", {"b": b"\xff\0", "a": b"x"})
    labels = secret["metadata"].pop("labels")
    assert secret == yaml.safe_load(
        "{apiVersion: v1, kind: Secret, type: Opaque, immutable: false, data: {a: eA==, b: /wA=},"
        " metadata: {name: kaggle, namespace: ns}}"
    )
    assert labels["app.kubernetes.io/managed-by"] == "worldsize" and labels["app.kubernetes.io/component"] == "secret"


def test_values_come_from_files_variables_and_stdin(store, tmp_path, monkeypatch, typed, capsys):
    (tmp_path / "kaggle.json").write_text(json.dumps({"username": "me", "key": CANARY}) + "\n")
    secrets.create(SecretCreate("kaggle", tmp_path / "kaggle.json"), store.cluster)
    assert kept(store, "kaggle") == {"kaggle.json": (tmp_path / "kaggle.json").read_bytes()}

    (tmp_path / "t").write_bytes(CANARY.encode() + b"\r\n")
    secrets.create(SecretCreate("token", tmp_path / "t", key="other"), store.cluster)
    assert kept(store) == {"other": CANARY.encode()}
    assert "the newline at its end is left out" in capsys.readouterr().err

    (tmp_path / "t").write_bytes(b"  a phrase\t\n")
    secrets.create(SecretCreate("phrase", tmp_path / "t", key="k"), store.cluster)
    assert kept(store, "phrase") == {"k": b"  a phrase\t"}
    secrets.delete(SecretDelete("phrase"), store.cluster)
    capsys.readouterr()

    pem = b"-----BEGIN KEY-----\nabc\n-----END KEY-----\n"
    typed(pem)
    secrets.create(SecretCreate("token", from_stdin="pem", replace=True), store.cluster)
    assert kept(store) == {"pem": pem}
    assert capsys.readouterr() == ("secret token replaced, with pem\n", "")

    monkeypatch.setenv("ONE", CANARY)
    monkeypatch.setenv("TWO", "2\n")
    secrets.create(SecretCreate("env", from_env=("ONE", "TWO")), store.cluster)
    assert kept(store, "env") == {"ONE": CANARY.encode(), "TWO": b"2\n"}

    secrets.show(SecretList(), store.cluster)
    captured = capsys.readouterr()
    assert [line.split()[:2] for line in captured.out.splitlines()[2:]] == [
        ["kaggle", "kaggle.json"],
        ["token", "pem"],
        ["env", "ONE,"],
    ]
    assert CANARY not in "".join(captured)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "kaggle"),
        (f'{{"username": "{CANARY}"}}', "JSON with username and key"),
        (f'{{"username": "me", "key": "{CANARY}"', "JSON with username and key"),
        (f'["{CANARY}"]', "JSON with username and key"),
        (f'{{"username": "{CANARY}", "key": ""}}', "JSON with username and key"),
        ("[" * 100_000, "JSON with username and key"),
    ],
)
def test_a_kaggle_json_that_is_none_is_refused_without_repeating_it(tmp_path, content, words):
    (tmp_path / "kaggle.json").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        secrets.values(SecretCreate("kaggle", tmp_path / "kaggle.json"))
    assert CANARY not in told(caught.value)


def test_what_cannot_be_a_secret_is_refused_without_repeating_it(store, tmp_path, monkeypatch, typed):
    def refused(words, *arguments, **more):
        with pytest.raises(UserError, match=words) as caught:
            secrets.create(SecretCreate(*arguments, **more), store.cluster)
        assert CANARY not in told(caught.value)
        assert not any("/secrets/" in path for path in store.objects)

    monkeypatch.setenv("EMPTY", "")
    (tmp_path / "x").write_text(CANARY)
    refused("where is the value", "token")
    refused("where is the value", "token", tmp_path / "x", from_stdin="y")
    refused("no such environment variable", "token", from_env=("NOT_THERE",))
    refused("names of environment variables alone", "token", from_env=(f"TOKEN={CANARY}",))
    refused("the value of EMPTY is empty", "token", from_env=("EMPTY",))
    refused("No such file", "token", tmp_path / "nix")
    refused("Is a directory", "token", tmp_path)
    refused("cannot be called 'A'", "A", tmp_path / "x")
    refused("'a b' cannot be the key", "token", tmp_path / "x", "a b")
    refused("cannot be the key", "token", tmp_path / "x", "..")
    typed(b"\n")
    refused("the value of k is empty", "token", from_stdin="k")
    typed(bytes((1 << 20) + 1))
    refused("1 MiB at most", "token", from_stdin="k")


def test_one_that_is_there_is_replaced_on_request_and_a_foreign_one_never(store, monkeypatch, capsys):
    monkeypatch.setenv("ONE", CANARY)
    asked = SecretCreate("token", from_env=("ONE",))
    secrets.create(asked, store.cluster)
    with pytest.raises(UserError, match="is there already, with ONE: --replace"):
        secrets.create(asked, store.cluster)
    store.put(f"{NS}/secrets/foreign", data={"k": "eA=="})
    for replace in (False, True):
        with pytest.raises(UserError, match="not made by worldsize"):
            secrets.create(SecretCreate("foreign", from_env=("ONE",), replace=replace), store.cluster)
    with pytest.raises(UserError, match="not made by worldsize"):
        secrets.delete(SecretDelete("foreign"), store.cluster)
    with pytest.raises(UserError, match="no secret 'nix'; ours are: token"):
        secrets.delete(SecretDelete("nix"), store.cluster)
    assert secrets.delete(SecretDelete("token"), store.cluster) == 0
    assert [path for path in store.objects if "/secrets/" in path] == [f"{NS}/secrets/foreign"]


def told(error: BaseException) -> str:
    """All that could be printed of an exception."""
    return "".join((str(error), repr(error), *traceback.format_exception(error), repr(vars(error))))


WAYS = {
    "plain": lambda value: value,
    "base64": lambda value: base64.b64encode(value),
    "hex": lambda value: value.hex().encode(),
    "backwards": lambda value: value[::-1],
    "a part": lambda value: value[3:-3],
    "repr": lambda value: repr(value).encode(),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.binary(min_size=16, max_size=40).filter(lambda value: len(set(value)) > 8),
    way=st.sampled_from(sorted(WAYS)),
    statuses=st.tuples(*[st.sampled_from([400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 0])] * 2),
    as_json=st.booleans(),
    there=st.booleans(),
)
def test_no_answer_of_a_server_makes_a_value_seen(store, tmp_path, capfd, caplog, value, way, statuses, as_json, there):
    """Whatever an API server or a webhook does with the object that it was sent, it ends in none of our messages."""
    store.objects.clear()
    store.answer = lambda method, path, body: None
    caplog.set_level(logging.DEBUG)

    def repeating(method, path, body):
        if method not in ("POST", "PUT"):
            return None
        known = [json.loads(body), *(one for path, one in store.objects.items() if "/secrets/" in path)]
        text = b"denied:" + b", ".join(WAYS[way](base64.b64decode(one["data"]["file"])) for one in known)
        if as_json:
            text = json.dumps({"message": text.decode("latin-1"), "reason": text.decode("latin-1")}).encode()
        return (409 if there and method == "POST" else statuses[method == "PUT"]), text

    if there:
        secrets.create(SecretCreate("token", _file(tmp_path, value)), store.cluster)
    store.answer = repeating
    with pytest.raises((ClusterError, UserError)) as caught:
        secrets.create(SecretCreate("token", _file(tmp_path, value), replace=True), store.cluster)
    seen = told(caught.value) + "".join(capfd.readouterr()) + caplog.text
    for form in WAYS.values():
        assert form(value).decode("latin-1") not in seen
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def _file(folder: Path, value: bytes) -> Path:
    (folder / "file").write_bytes(value)
    return folder / "file"


def test_a_refusal_that_has_nothing_to_do_with_the_value_is_shown(store, monkeypatch):
    monkeypatch.setenv("ONE", CANARY)
    store.answer = lambda method, *_: (403, b'{"message": "exceeded quota: team"}') if method == "POST" else None
    with pytest.raises(ClusterError, match="exceeded quota: team"):
        secrets.create(SecretCreate("token", from_env=("ONE",)), store.cluster)
    store.answer = lambda method, path, body: (422, b"{}") if base64.b64encode(CANARY.encode()) in body else None
    with pytest.raises(ClusterError, match=r"refuses to keep secret token \(HTTP 422\)"):
        secrets.create(SecretCreate("token", from_env=("ONE",)), store.cluster)
    assert not any("/secrets/" in path for path in store.objects)


# On a cluster ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.cluster
def test_quota_refuses_a_volume_and_a_secret_in_the_servers_words(cluster, monkeypatch):
    monkeypatch.setenv("TOKEN", CANARY)
    hard = {"count/secrets": "0", "persistentvolumeclaims": "0"}
    about = {"name": "none", "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": about, "spec": {"hard": hard}})
    time.sleep(2)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        volumes.create(VolumeCreate("data", "1Gi"), cluster)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        secrets.create(SecretCreate("token", from_env=("TOKEN",)), cluster)


@pytest.mark.cluster
def test_a_canary_is_found_in_its_secret_alone(cluster, tmp_path):
    script = (
        "import sys; from worldsize.launch import secrets; from worldsize.launch.cluster import Cluster;"
        "asked = secrets.SecretCreate('token', from_stdin='key', replace=len(sys.argv) > 2);"
        "sys.exit(secrets.create(asked, Cluster(namespace=sys.argv[1])))"
    )
    outputs = []
    for more in ([], ["replace"]):
        command = [sys.executable, "-c", script, cluster.namespace, *more]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            process.stdin.write(CANARY.encode())
            process.stdin.close()
            while process.poll() is None:
                assert not any(CANARY.encode() in line for line in command_lines())
            outputs += [process.stdout.read(), process.stderr.read()]
            assert process.returncode == 0, outputs
    assert CANARY.encode() not in b"".join(outputs)
    assert base64.b64decode(cluster.get("Secret", "token")["data"]["key"]) == CANARY.encode()
    assert os.listdir(tmp_path) == []

    hidden = (CANARY, base64.b64encode(CANARY.encode()).decode())
    token = cluster.get("Secret", "token")
    token.pop("data")
    everything = [json.dumps(token)]
    for group in ("/api/v1", "/apis/batch/v1", "/apis/apps/v1", "/apis/events.k8s.io/v1"):
        for resource in cluster.request("GET", group)["resources"]:
            if resource["namespaced"] and "list" in resource["verbs"]:
                found = cluster.request("GET", f"{group}/namespaces/{cluster.namespace}/{resource['name']}")["items"]
                everything += [json.dumps(one) for one in found if one["metadata"]["name"] != "token"]
    assert len(everything) > 2  # the namespace's own ConfigMap and ServiceAccount at least
    assert not any(form in text for text in everything for form in hidden)


def command_lines() -> list[bytes]:
    """Of every process here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found
