"""Reading from a registry (a real one if docker-registry is installed): names, digests, labels, passwords and tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

from processes import free_port
from servers import TestServer
from waiting import until
from worldsize.cluster.image import registry
from worldsize.cluster.image.build import CONTENT
from worldsize.errors import UserError

needs_registry = pytest.mark.skipif(shutil.which("docker-registry") is None, reason="needs Debian's docker-registry")


@pytest.mark.parametrize(
    ("name", "host", "path"),
    [
        ("registry.example/me/worldsize", "registry.example", "me/worldsize"),
        ("localhost:5000/worldsize", "localhost:5000", "worldsize"),
        ("localhost/a.b/c__d/e--f", "localhost", "a.b/c__d/e--f"),
        ("me/worldsize", "docker.io", "me/worldsize"),
        ("worldsize", "docker.io", "library/worldsize"),
    ],
)
def test_repositories(name: str, host: str, path: str):
    assert registry.parse(name) == registry.Repository(host, path)
    assert registry.parse(str(registry.parse(name))) == registry.parse(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "r.example/",
        "r.example/x:tag",
        "r.example/x@sha256:00",
        "r.example/X",
        "https://r.example/x",
        "r.example/../x",
    ],
)
def test_invalid_repository_names(name: str):
    with pytest.raises(UserError, match="--push"):
        registry.parse(name)


def test_an_unreadable_login_file_is_reported_without_its_contents(home: Path):
    (home / ".docker").mkdir()
    content = json.dumps(
        {"auths": {"r.example": {"username": "Käthe", "password": "opensesame", "auth": AUTH}}}, ensure_ascii=False
    )
    (home / ".docker/config.json").write_text(content, "latin-1")
    with pytest.raises(UserError, match=r"config.json cannot be read .*: log in again") as refused:
        registry.credentials("r.example", {"HOME": str(home)})
    for secret in ("opensesame", AUTH, "auths", "r.example"):
        assert secret not in str(refused.value)


# bcrypt of "opensesame", by Python's crypt module
HTPASSWD = "alibaba:$2b$05$abcdefghijklmnopqrstuuQbLfdQZSxZ9gjhA5V9o8Tyc6aQRO0Qi\n"
AUTH = base64.b64encode(b"alibaba:opensesame").decode()
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any logins."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))
    return folder


def answers(host: str) -> bool:
    try:
        urlopen(f"http://{host}/v2/", timeout=60).close()
    except HTTPError:  # it asks for a password
        return True
    except URLError:
        return False
    return True


@contextmanager
def running_registry(folder: Path, auth: str = "") -> Iterator[str]:
    """Run a registry; yields its host:port."""
    host = f"127.0.0.1:{free_port()}"
    settings = folder / "registry.yml"
    settings.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}/registry}}}}\n"
        f"http: {{addr: {host}, secret: x}}\n{auth}"
    )
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(["docker-registry", "serve", str(settings)], **quiet)
    try:
        until(lambda: answers(host), "the registry answers", running=process)
        yield host
    finally:
        process.terminate()
        process.wait(240)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    with running_registry(tmp_path) as host:
        yield host


def send(host: str, method: str, path: str, body: bytes, kind: str, auth: str = "") -> str:
    """Send one request of a push. Returns the digest of a manifest, otherwise the location for the next request."""
    url = path if path.startswith("http") else f"http://{host}/v2/{path}"
    headers = {"Content-Type": kind} | ({"Authorization": f"Basic {auth}"} if auth else {})
    with urlopen(Request(url, body, headers, method=method), timeout=10) as answer:
        return str(answer.headers.get("Docker-Content-Digest" if "manifests" in path else "Location", ""))


def push(host: str, labels: dict[str, str], tag: str, path: str = "me/worldsize", auth: str = "") -> str:
    """Push a container image without layers. Returns the digest that the registry assigned."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Labels": labels}}).encode()
    named = "sha256:" + hashlib.sha256(config).hexdigest()
    where = send(host, "POST", f"{path}/blobs/uploads/", b"", "", auth)
    send(host, "PUT", f"{where}&digest={named}", config, "application/octet-stream", auth)
    described = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": named, "size": len(config)}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": []}
    return send(host, "PUT", f"{path}/manifests/{tag}", json.dumps(manifest).encode(), MANIFEST, auth)


@needs_registry
def test_what_a_registry_has(served: str):
    repository = registry.parse(f"{served}/me/worldsize")
    assert registry.find(repository, "t", insecure=True) is None
    named = push(served, {CONTENT: "abc"}, "t")
    assert registry.find(repository, "other", insecure=True) is None
    assert registry.find(repository, "t", insecure=True) == registry.Image(named, {CONTENT: "abc"})


@needs_registry
def test_a_multi_platform_image_is_named_by_its_index(served: str):
    notes, ours = push(served, {}, "notes"), push(served, {CONTENT: "abc"}, "ours")
    children = [
        {"mediaType": MANIFEST, "digest": notes, "size": 1, "platform": {"architecture": "unknown", "os": "unknown"}},
        {"mediaType": MANIFEST, "digest": ours, "size": 1, "platform": {"architecture": "amd64", "os": "linux"}},
    ]
    whole = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": children}).encode()
    named = send(served, "PUT", "me/worldsize/manifests/t", whole, INDEX)
    found = registry.find(registry.parse(f"{served}/me/worldsize"), "t", insecure=True)
    assert found == registry.Image(named, {CONTENT: "abc"})


@needs_registry
def test_a_registry_that_asks_for_a_password(tmp_path: Path, home: Path):
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    with running_registry(tmp_path, f"auth: {{htpasswd: {{realm: x, path: {tmp_path}/htpasswd}}}}\n") as host:
        repository = registry.parse(f"{host}/me/worldsize")
        named = push(host, {CONTENT: "abc"}, "t", auth=AUTH)
        with pytest.raises(UserError, match=f"docker login {host}"):
            registry.find(repository, "t", insecure=True)
        (home / ".docker").mkdir()
        login = home / ".docker/config.json"
        login.write_text(json.dumps({"auths": {host: {"auth": base64.b64encode(b"alibaba:wrong").decode()}}}))
        with pytest.raises(UserError, match="no permission to read me/worldsize"):
            registry.find(repository, "t", insecure=True)
        login.write_text(json.dumps({"auths": {host: {"auth": AUTH}}}))
        assert registry.find(repository, "t", insecure=True) == registry.Image(named, {CONTENT: "abc"})
        assert registry.find(repository, "other", insecure=True) is None


@needs_registry
def test_a_registry_that_does_not_speak_https(served: str):
    with pytest.raises(registry.RegistryError, match=f"{served} does not answer.*--insecure"):
        registry.find(registry.parse(f"{served}/me/worldsize"), "t")


def test_no_registry_there():
    host = f"127.0.0.1:{free_port()}"
    with pytest.raises(registry.RegistryError, match=f"{host} does not answer.*refused$"):
        registry.find(registry.parse(f"{host}/me/worldsize"), "t", insecure=True)


def test_what_logins_leave_behind(home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert registry.credentials("r.example") is None
    (home / ".docker").mkdir()
    login = home / ".docker/config.json"
    login.write_text(json.dumps({"auths": {registry._HUB_LOGIN: {"auth": AUTH}, "t.example": {"identitytoken": "tok"}}}))
    assert registry.credentials("docker.io") == registry.Credentials("alibaba", "opensesame")
    assert registry.credentials("t.example") == registry.Credentials("<token>", "tok")
    assert registry.credentials("r.example") is None
    # podman's file takes precedence, and a credential helper takes precedence over the file's own entries.
    (home / ".config/containers").mkdir(parents=True)
    helper = tmp_path / "docker-credential-test"
    helper.write_text('#!/bin/sh\nread host\necho "{\\"Username\\": \\"$1\\", \\"Secret\\": \\"for $host\\"}"\n')
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (home / ".config/containers/auth.json").write_text(json.dumps({"credHelpers": {"docker.io": "test"}}))
    assert registry.credentials("docker.io") == registry.Credentials("get", "for docker.io")
    login.write_text("{")
    with pytest.raises(UserError, match=str(login)):
        registry.credentials("r.example")


class _Guarded(BaseHTTPRequestHandler):
    """A registry that requires a token, issues it for the right password, and stores its blobs on another host."""

    labels = {CONTENT: "abc"}
    config = json.dumps({"config": {"Labels": labels}}).encode()
    manifest = json.dumps({"config": {"digest": "sha256:c"}}).encode()
    elsewhere = ""

    def do_GET(self) -> None:
        host, given = self.headers["Host"], self.headers.get("Authorization", "")
        if self.path.startswith("/token?"):
            asked = "service=its+name&scope=repository%3Ame%2Fworldsize%3Apull" in self.path
            self.answer(200 if asked and given == f"Basic {AUTH}" else 401, json.dumps({"access_token": "ok"}).encode())
        elif given != "Bearer ok":
            challenge = f'Bearer realm="http://{host}/token",service="its name",scope="repository:me/worldsize:pull"'
            self.answer(401, b"", {"WWW-Authenticate": challenge})
        elif "/blobs/" in self.path:
            self.answer(307, b"", {"Location": f"http://{self.elsewhere}/blob"})
        else:
            self.answer(200, self.manifest)

    def do_POST(self) -> None:
        form = self.rfile.read(int(self.headers["Content-Length"]))
        right = b"grant_type=refresh_token&refresh_token=tok" in form and b"service=its+name" in form
        self.answer(200 if right else 401, json.dumps({"token": "ok"}).encode())

    def answer(self, code: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class _Elsewhere(_Guarded):
    """The host of the blobs; it rejects requests with the registry's credentials."""

    def do_GET(self) -> None:
        self.answer(400 if "Authorization" in self.headers else 200, self.config)


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with TestServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("entry", [{"auth": AUTH}, {"identitytoken": "tok"}, {}])
def test_a_registry_that_requires_a_token(entry: dict[str, str], home: Path):
    (home / ".docker").mkdir()
    with serving(_Elsewhere) as elsewhere, serving(_Guarded) as host:
        _Guarded.elsewhere = elsewhere
        (home / ".docker/config.json").write_text(json.dumps({"auths": {host: entry}}))
        repository = registry.parse(f"{host}/me/worldsize")
        if not entry:
            with pytest.raises(UserError, match=f"docker login {host}"):
                registry.find(repository, "t", insecure=True)
            return
        named = "sha256:" + hashlib.sha256(_Guarded.manifest).hexdigest()
        assert registry.find(repository, "t", insecure=True) == registry.Image(named, {CONTENT: "abc"})
