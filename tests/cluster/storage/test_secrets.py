"""Secrets: values are stored and never shown."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from object_server import NS
from waiting import until
from worldsize.cluster.api.client import ClusterError
from worldsize.cluster.storage import secrets, volumes
from worldsize.cluster.storage.secrets import SecretCreate, SecretDelete, SecretList
from worldsize.cluster.storage.volumes import VolumeCreate
from worldsize.errors import UserError

CANARY = "canary-7Qx2-do-not-tell"


def stored(store, name="token"):
    """The values stored on the server."""
    return {key: base64.b64decode(value) for key, value in store.objects[f"{NS}/secrets/{name}"]["data"].items()}


@pytest.fixture
def stdin(monkeypatch):
    """stdin(content) replaces standard input."""

    def provide(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO(content)))

    return provide


def test_secret_manifest():
    secret = secrets.manifest("kaggle", "ns", {"b": b"\xff\0", "a": b"x"})
    labels = secret["metadata"].pop("labels")
    assert secret == yaml.safe_load(
        "{apiVersion: v1, kind: Secret, type: Opaque, immutable: false, data: {a: eA==, b: /wA=},"
        " metadata: {name: kaggle, namespace: ns}}"
    )
    assert labels["app.kubernetes.io/managed-by"] == "worldsize" and labels["app.kubernetes.io/component"] == "secret"


def test_values_come_from_files_variables_and_stdin(store, tmp_path, monkeypatch, stdin, capsys):
    (tmp_path / "kaggle.json").write_text(json.dumps({"username": "me", "key": CANARY}) + "\n")
    secrets.create(SecretCreate("kaggle", tmp_path / "kaggle.json"), store.cluster)
    assert stored(store, "kaggle") == {"kaggle.json": (tmp_path / "kaggle.json").read_bytes()}

    (tmp_path / "t").write_bytes(CANARY.encode() + b"\r\n")
    secrets.create(SecretCreate("token", tmp_path / "t", key="other"), store.cluster)
    assert stored(store) == {"other": CANARY.encode()}
    assert "removed the newline at the end" in capsys.readouterr().err

    (tmp_path / "t").write_bytes(b"  a phrase\t\n")
    secrets.create(SecretCreate("phrase", tmp_path / "t", key="k"), store.cluster)
    assert stored(store, "phrase") == {"k": b"  a phrase\t"}
    secrets.delete(SecretDelete("phrase"), store.cluster)
    capsys.readouterr()

    pem = b"-----BEGIN KEY-----\nabc\n-----END KEY-----\n"
    stdin(pem)
    secrets.create(SecretCreate("token", from_stdin="pem", replace=True), store.cluster)
    assert stored(store) == {"pem": pem}
    assert capsys.readouterr() == ("secret token replaced, with pem\n", "")

    monkeypatch.setenv("ONE", CANARY)
    monkeypatch.setenv("TWO", "2\n")
    secrets.create(SecretCreate("env", from_env=("ONE", "TWO")), store.cluster)
    assert stored(store, "env") == {"ONE": CANARY.encode(), "TWO": b"2"}

    secrets.show(SecretList(), store.cluster)
    captured = capsys.readouterr()
    assert "TWO: removed the newline at the end" in captured.err
    assert [line.split()[:2] for line in captured.out.splitlines()[2:]] == [
        ["kaggle", "kaggle.json"],
        ["token", "pem"],
        ["env", "ONE,"],
    ]
    assert CANARY not in "".join(captured)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a valid kaggle.json"),
        (f'{{"username": "{CANARY}"}}', "JSON with username and key"),
        (f'{{"username": "me", "key": "{CANARY}"', "JSON with username and key"),
        (f'["{CANARY}"]', "JSON with username and key"),
        (f'{{"username": "{CANARY}", "key": ""}}', "JSON with username and key"),
        ("[" * 100_000, "JSON with username and key"),
    ],
)
def test_an_invalid_kaggle_json_is_refused_without_showing_it(tmp_path, content, message):
    (tmp_path / "kaggle.json").write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        secrets.values(SecretCreate("kaggle", tmp_path / "kaggle.json"))
    assert CANARY not in everything_printable(caught.value)


def test_invalid_secrets_are_refused_without_showing_the_value(store, tmp_path, monkeypatch, stdin):
    def refused(message, *arguments, **more):
        with pytest.raises(UserError, match=message) as caught:
            secrets.create(SecretCreate(*arguments, **more), store.cluster)
        assert CANARY not in everything_printable(caught.value)
        assert not any("/secrets/" in path for path in store.objects)

    monkeypatch.setenv("EMPTY", "")
    (tmp_path / "x").write_text(CANARY)
    refused("pass exactly one of", "token")
    refused("pass exactly one of", "token", tmp_path / "x", from_stdin="y")
    refused("environment variable is not set", "token", from_env=("NOT_THERE",))
    refused("only names of environment variables", "token", from_env=(f"TOKEN={CANARY}",))
    refused("the value of EMPTY is empty", "token", from_env=("EMPTY",))
    refused("No such file", "token", tmp_path / "nix")
    refused("Is a directory", "token", tmp_path)
    refused("invalid secret name 'A'", "A", tmp_path / "x")
    refused("invalid secret key 'a b'", "token", tmp_path / "x", "a b")
    refused("invalid secret key", "token", tmp_path / "x", "..")
    stdin(b"\n")
    refused("the value of k is empty", "token", from_stdin="k")
    stdin(bytes((1 << 20) + 1))
    refused("limit of 1 MiB", "token", from_stdin="k")


def test_an_existing_secret_is_replaced_on_request_and_a_foreign_one_never(store, monkeypatch, capsys):
    monkeypatch.setenv("ONE", CANARY)
    options = SecretCreate("token", from_env=("ONE",))
    secrets.create(options, store.cluster)
    with pytest.raises(UserError, match="already exists, with ONE; pass --replace"):
        secrets.create(options, store.cluster)
    store.put(f"{NS}/secrets/foreign", data={"k": "eA=="})
    for replace in (False, True):
        with pytest.raises(UserError, match="worldsize did not create it"):
            secrets.create(SecretCreate("foreign", from_env=("ONE",), replace=replace), store.cluster)
    with pytest.raises(UserError, match="worldsize did not create secret foreign"):
        secrets.delete(SecretDelete("foreign"), store.cluster)
    with pytest.raises(UserError, match="no secret 'nix' in namespace ns; existing: token"):
        secrets.delete(SecretDelete("nix"), store.cluster)
    assert secrets.delete(SecretDelete("token"), store.cluster) == 0
    assert [path for path in store.objects if "/secrets/" in path] == [f"{NS}/secrets/foreign"]


def everything_printable(error: BaseException) -> str:
    """Everything about an exception that could be printed."""
    return "".join((str(error), repr(error), *traceback.format_exception(error), repr(vars(error))))


ENCODINGS = {
    "plain": lambda value: value,
    "base64": lambda value: base64.b64encode(value),
    "hex": lambda value: value.hex().encode(),
    "reversed": lambda value: value[::-1],
    "part": lambda value: value[3:-3],
    "repr": lambda value: repr(value).encode(),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.binary(min_size=16, max_size=40).filter(lambda value: len(set(value)) > 8),
    encoding=st.sampled_from(sorted(ENCODINGS)),
    statuses=st.tuples(*[st.sampled_from([400, 401, 403, 404, 409, 413, 422, 429, 500, 503, 0])] * 2),
    as_json=st.booleans(),
    exists=st.booleans(),
)
def test_no_server_response_reveals_a_value(store, tmp_path, capfd, caplog, value, encoding, statuses, as_json, exists):
    """Whatever an API server or a webhook echoes of the submitted object, none of it appears in our messages."""
    store.objects.clear()
    store.answer = lambda method, path, body: None
    caplog.set_level(logging.DEBUG)

    def echo(method, path, body):
        if method not in ("POST", "PUT"):
            return None
        secrets_seen = [json.loads(body), *(item for path, item in store.objects.items() if "/secrets/" in path)]
        text = b"denied:" + b", ".join(ENCODINGS[encoding](base64.b64decode(item["data"]["file"])) for item in secrets_seen)
        if as_json:
            text = json.dumps({"message": text.decode("latin-1"), "reason": text.decode("latin-1")}).encode()
        return (409 if exists and method == "POST" else statuses[method == "PUT"]), text

    if exists:
        secrets.create(SecretCreate("token", _write(tmp_path, value)), store.cluster)
    store.answer = echo
    with pytest.raises((ClusterError, UserError)) as caught:
        secrets.create(SecretCreate("token", _write(tmp_path, value), replace=True), store.cluster)
    seen = everything_printable(caught.value) + "".join(capfd.readouterr()) + caplog.text
    for encoded in ENCODINGS.values():
        assert encoded(value).decode("latin-1") not in seen
    assert caught.value.__context__ is None and caught.value.__cause__ is None


def _write(folder: Path, value: bytes) -> Path:
    (folder / "file").write_bytes(value)
    return folder / "file"


def test_an_error_unrelated_to_the_value_is_shown(store, monkeypatch):
    monkeypatch.setenv("ONE", CANARY)
    store.answer = lambda method, *_: (403, b'{"message": "exceeded quota: team"}') if method == "POST" else None
    with pytest.raises(ClusterError, match="exceeded quota: team"):
        secrets.create(SecretCreate("token", from_env=("ONE",)), store.cluster)
    store.answer = lambda method, path, body: (422, b"{}") if base64.b64encode(CANARY.encode()) in body else None
    with pytest.raises(ClusterError, match=r"refused to create secret token \(HTTP 422\)"):
        secrets.create(SecretCreate("token", from_env=("ONE",)), store.cluster)
    assert not any("/secrets/" in path for path in store.objects)


# On a cluster ---------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_quota_errors_show_the_servers_message(cluster, monkeypatch):
    monkeypatch.setenv("TOKEN", CANARY)
    hard = {"count/secrets": "0", "persistentvolumeclaims": "0"}
    metadata = {"name": "none", "namespace": cluster.namespace}
    cluster.create({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": {"hard": hard}})
    until(lambda: cluster.get("ResourceQuota", "none").get("status", {}).get("hard"), "the quota applies", every=0.1)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        volumes.create(VolumeCreate("data", "1Gi"), cluster)
    with pytest.raises(ClusterError, match="exceeded quota: none"):
        secrets.create(SecretCreate("token", from_env=("TOKEN",)), cluster)


@pytest.mark.cluster
def test_a_value_is_found_only_in_its_secret(cluster, tmp_path):
    script = (
        "import sys; from worldsize.cluster.storage import secrets; from worldsize.cluster.api.client import Cluster;"
        "options = secrets.SecretCreate('token', from_stdin='key', replace=len(sys.argv) > 2);"
        "sys.exit(secrets.create(options, Cluster(namespace=sys.argv[1])))"
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

    forms = (CANARY, base64.b64encode(CANARY.encode()).decode())
    token = cluster.get("Secret", "token")
    token.pop("data")
    everything = [json.dumps(token)]
    for group in ("/api/v1", "/apis/batch/v1", "/apis/apps/v1", "/apis/events.k8s.io/v1"):
        for resource in cluster.request("GET", group)["resources"]:
            if resource["namespaced"] and "list" in resource["verbs"]:
                found = cluster.request("GET", f"{group}/namespaces/{cluster.namespace}/{resource['name']}")["items"]
                everything += [json.dumps(item) for item in found if item["metadata"]["name"] != "token"]
    assert len(everything) > 2  # at least the namespace's default ConfigMap and ServiceAccount
    assert not any(encoded in text for text in everything for encoded in forms)


def command_lines() -> list[bytes]:
    """Command line of every process on this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return found
