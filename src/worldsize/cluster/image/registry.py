"""Looks up the digest and labels of a container image in a registry, through the HTTP API of the OCI distribution spec.

Docker's package is not used: it asks a running daemon, which machines with podman or buildah do not have.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode, urlsplit
from urllib.request import Request, urlopen

from worldsize.errors import ServiceFailed, UserError, WorldsizeError

_TIMEOUT_S = 30.0
_MAX_BYTES = 8 << 20  # of a manifest or a configuration
_DOCKER = "application/vnd.docker.distribution.manifest"
_OCI = "application/vnd.oci.image"
_MANIFESTS = f"{_DOCKER}.v2+json, {_DOCKER}.list.v2+json, {_OCI}.manifest.v1+json, {_OCI}.index.v1+json"
_NAME = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
# Docker Hub's host names: in image names, of its API, and in login files.
_HUB, _HUB_API, _HUB_LOGIN = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
# Used as the user name of an identity token, which is exchanged for an access token.
_IDENTITY = "<token>"


class RegistryError(ServiceFailed):
    """The registry cannot be reached, or its response is invalid."""


@dataclass(frozen=True)
class Repository:
    """A repository of container images; ``str()`` is its full name, which every builder resolves in the same way."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"


@dataclass(frozen=True)
class Image:
    """A container image in a registry: the digest ``sha256:...`` of its manifest, and its labels."""

    digest: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Credentials:
    """User name and password of a registry, or `_IDENTITY` and an identity token."""

    user: str
    secret: str

    @property
    def basic(self) -> str:
        """The value of the Authorization header."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def parse(name: str) -> Repository:
    """Parse ``registry.example/me/worldsize``; as in docker, a name without a registry is on Docker Hub.

    Raises:
        UserError: an invalid repository name.
    """
    first, slash, rest = name.partition("/")
    has_host = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    host, path = (first, rest) if has_host else (_HUB, name if slash else f"library/{name}")
    if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", host) or not re.fullmatch(rf"{_NAME}(/{_NAME})*", path):
        raise UserError(
            f"--push {name!r} is not a repository: expected a lower-case name such as registry.example/me/worldsize; "
            "pass the tag with --tag"
        )
    return Repository(host, path)


def find(repository: Repository, tag: str, insecure: bool = False) -> Image | None:
    """The container image with this tag; None if there is none. ``insecure``: use plain HTTP.

    For a multi-platform image, the labels are those of the first platform.

    Raises:
        UserError: the registry rejects the credentials, or requires some.
        RegistryError: the registry does not answer, or its response is invalid.
    """
    registry = _Registry(repository, insecure)
    try:
        body = registry.get(f"manifests/{tag}", _MANIFESTS)
        if body is None:
            return None
        manifest = json.loads(body)
        for one in manifest.get("manifests", []):
            # Builders store attestations next to the images, with the platform "unknown".
            if one.get("platform", {}).get("architecture") != "unknown":
                manifest = json.loads(registry.get(f"manifests/{one['digest']}", _MANIFESTS) or b"{}")
                break
        blob = registry.get(f"blobs/{manifest['config']['digest']}", "*/*")
        labels = json.loads(blob or b"{}").get("config", {}).get("Labels")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegistryError(
            f"{repository}:{tag} has an invalid manifest or configuration: {type(error).__name__}: {error}"
        ) from None
    return Image("sha256:" + hashlib.sha256(body).hexdigest(), labels or {})


def credentials(host: str, env: Mapping[str, str] = os.environ) -> Credentials | None:
    """The credentials that ``docker login`` or ``podman login`` stored for ``host``; None without a login.

    Raises:
        UserError: a login file cannot be read.
    """
    keys = [host, f"https://{host}"] + ([_HUB_LOGIN] if host == _HUB else [])
    for path in _login_files(env):
        try:
            content: dict[str, Any] = json.loads(path.read_text("utf-8"))
            for key in keys:
                if found := _entry(content, key):
                    return found
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, AttributeError, TypeError, subprocess.SubprocessError) as error:
            # Not its repr, which may contain the complete file.
            raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}): log in again") from None
    return None


def _login_files(env: Mapping[str, str]) -> Iterator[Path]:
    home = Path(env.get("HOME", "/"))
    if "REGISTRY_AUTH_FILE" in env:
        yield Path(env["REGISTRY_AUTH_FILE"])
    if "XDG_RUNTIME_DIR" in env:
        yield Path(env["XDG_RUNTIME_DIR"]) / "containers/auth.json"
    yield Path(env.get("XDG_CONFIG_HOME", home / ".config")) / "containers/auth.json"
    yield Path(env.get("DOCKER_CONFIG", home / ".docker")) / "config.json"


def _entry(content: dict[str, Any], key: str) -> Credentials | None:
    """The credentials for ``key``: from the file, or from the credential helper that it names."""
    helper = content.get("credHelpers", {}).get(key) or content.get("credsStore")
    program = shutil.which(f"docker-credential-{helper}") if helper else None
    if program:
        done = subprocess.run([program, "get"], input=key, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            answer = json.loads(done.stdout)
            return Credentials(answer["Username"], answer["Secret"])
    entry = content.get("auths", {}).get(key, {})
    if entry.get("identitytoken"):
        return Credentials(_IDENTITY, entry["identitytoken"])
    if entry.get("auth"):
        user, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
        return Credentials(user, secret)
    return None


class _Registry:
    """A client that reads from one repository, and logs in if the registry requires it."""

    def __init__(self, repository: Repository, insecure: bool) -> None:
        self._repository = repository
        self._insecure = insecure
        host = _HUB_API if repository.host == _HUB else repository.host
        self._root = f"{'http' if insecure else 'https'}://{host}/v2/{repository.path}/"
        self._authorization: str | None = None

    def get(self, path: str, accept: str) -> bytes | None:
        """The body of the response; None if it is 404."""
        try:
            return self._fetch(self._root + path, self._authorization, accept)
        except HTTPError as error:
            if error.code == 404:
                return None
            if error.code != 401 or self._authorization is not None:
                raise self._rejection(error) from None
            self._authorization = self._log_in(error.headers.get("WWW-Authenticate", ""))
        return self.get(path, accept)

    def _log_in(self, challenge: str) -> str:
        """The value of the Authorization header for this challenge."""
        login = credentials(self._repository.host)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            if login is None:
                raise UserError(f"{self._repository.host} requires a login: docker login {self._repository.host}")
            return login.basic
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        form = {
            "service": fields.get("service", ""),
            "scope": fields.get("scope", f"repository:{self._repository.path}:pull"),
        }
        try:
            answer: dict[str, str] = json.loads(self._token(fields.get("realm", ""), form, login))
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except HTTPError as error:
            raise self._rejection(error) from None
        except (ValueError, KeyError, AttributeError):
            raise RegistryError(f"{self._repository.host} returned no token") from None

    def _token(self, realm: str, form: dict[str, str], login: Credentials | None) -> bytes:
        if urlsplit(realm).scheme not in (("http", "https") if self._insecure else ("https",)):
            raise RegistryError(f"{self._repository.host} asks for credentials to be sent unencrypted to {realm!r}: refused")
        if login is None or login.user != _IDENTITY:
            return self._fetch(f"{realm}?{urlencode(form)}", login.basic if login else None, "*/*")
        form = form | {"grant_type": "refresh_token", "refresh_token": login.secret, "client_id": "worldsize"}
        return self._fetch(realm, None, "*/*", urlencode(form).encode())

    def _fetch(self, url: str, authorization: str | None, accept: str, form: bytes | None = None) -> bytes:
        request = Request(url, form, {"Accept": accept})
        if authorization is not None:
            # Blobs are often stored on another host: the credentials must not follow a redirect.
            request.add_unredirected_header("Authorization", authorization)
        try:
            with urlopen(request, timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read(_MAX_BYTES))
        except HTTPError:
            raise
        except (URLError, HTTPException, OSError) as error:
            hint = "" if self._insecure else "; if it uses plain HTTP, pass --insecure"
            reason = getattr(error, "reason", error)
            raise RegistryError(f"the registry {urlsplit(url).netloc} does not answer: {reason}{hint}") from None

    def _rejection(self, error: HTTPError) -> WorldsizeError:
        host = self._repository.host
        if error.code in (401, 403):
            return UserError(f"no permission to read {self._repository.path} on {host}: docker login {host}")
        return RegistryError(f"{host} returned {error.code} {error.reason} for {self._repository.path}")
