"""Secrets, whose values are seen nowhere."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from objectserver import NS
from worldsize.errors import UserError
from worldsize.launch import secrets, volumes
from worldsize.launch.cluster import ClusterError
from worldsize.launch.secrets import SecretCreate, SecretDelete, SecretList
from worldsize.launch.volumes import VolumeCreate

CANARY = "canary-7Qx2-do-not-tell"


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
