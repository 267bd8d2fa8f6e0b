"""What an image registry holds under a name: its digest and labels, read by the HTTP API of the OCI distribution spec."""

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

from worldsize.errors import UserError, WorldsizeError

_TIMEOUT_S = 30.0
_LARGEST = 8 << 20  # bytes of a manifest or a configuration
_DOCKER = "application/vnd.docker.distribution.manifest"
_OCI = "application/vnd.oci.image"
_MANIFESTS = f"{_DOCKER}.v2+json, {_DOCKER}.list.v2+json, {_OCI}.manifest.v1+json, {_OCI}.index.v1+json"
_NAME = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
# Docker's own registry has three names.
_HUB, _HUB_API, _HUB_LOGIN = "docker.io", "registry-1.docker.io", "https://index.docker.io/v1/"
# In place of a user's name, says that the secret is to be exchanged for a token.
_IDENTITY = "<token>"


class RegistryError(WorldsizeError):
    """The registry cannot be reached, or answers nonsense."""

    exit_code = 1


@dataclass(frozen=True)
class Repository:
    """A place for images; ``str()`` is the name that every builder understands in the same way."""

    host: str
    path: str

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"


@dataclass(frozen=True)
class Image:
    """An image in a registry: ``sha256:...`` of its manifest, and its labels."""

    digest: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Credentials:
    """What somebody logged in with."""

    user: str
    secret: str

    @property
    def basic(self) -> str:
        """The header's value."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.secret}".encode()).decode()


def parse(name: str) -> Repository:
    """``registry.example/me/worldsize``; without a registry it is Docker Hub's, as for docker.

    Raises:
        UserError: not the name of a repository.
    """
    first, slash, rest = name.partition("/")
    has_host = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    host, path = (first, rest) if has_host else (_HUB, name if slash else f"library/{name}")
    if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", host) or not re.fullmatch(rf"{_NAME}(/{_NAME})*", path):
        raise UserError(
            f"--push {name!r} is not a repository: write it as registry.example/me/worldsize, in lower-case letters; "
            "the tag is for --tag"
        )
    return Repository(host, path)


def find(repository: Repository, tag: str, insecure: bool = False) -> Image | None:
    """The image under this tag; None where there is none. ``insecure``: the registry speaks plain http.

    Of an image for several platforms, the labels are the first one's.

    Raises:
        UserError: the registry asks for other credentials.
        RegistryError: it does not answer, or not in the way that a registry does.
    """
    registry = _Registry(repository, insecure)
    try:
        body = registry.get(f"manifests/{tag}", _MANIFESTS)
        if body is None:
            return None
        manifest = json.loads(body)
        for one in manifest.get("manifests", []):
            # Builders put notes about the build beside the images, for a platform "unknown".
            if one.get("platform", {}).get("architecture") != "unknown":
                manifest = json.loads(registry.get(f"manifests/{one['digest']}", _MANIFESTS) or b"{}")
                break
        blob = registry.get(f"blobs/{manifest['config']['digest']}", "*/*")
        labels = json.loads(blob or b"{}").get("config", {}).get("Labels")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RegistryError(
            f"{repository}:{tag} is not an image that can be read: {type(error).__name__}: {error}"
        ) from None
    return Image("sha256:" + hashlib.sha256(body).hexdigest(), labels or {})


def credentials(host: str, env: Mapping[str, str] = os.environ) -> Credentials | None:
    """What ``docker login`` or ``podman login`` left for ``host``; None where nobody logged in.

    Raises:
        UserError: a file of theirs cannot be read.
    """
    keys = [host, f"https://{host}"] + ([_HUB_LOGIN] if host == _HUB else [])
    for path in _login_files(env):
        try:
            told: dict[str, Any] = json.loads(path.read_text("utf-8"))
            for key in keys:
                if found := _entry(told, key):
                    return found
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, AttributeError, TypeError, subprocess.SubprocessError) as error:
            # Its repr may hold all of the file.
            raise UserError(f"{path} is of no use ({type(error).__name__}: {error}): log in again") from None
    return None


def _login_files(env: Mapping[str, str]) -> Iterator[Path]:
    home = Path(env.get("HOME", "/"))
    if "REGISTRY_AUTH_FILE" in env:
        yield Path(env["REGISTRY_AUTH_FILE"])
    if "XDG_RUNTIME_DIR" in env:
        yield Path(env["XDG_RUNTIME_DIR"]) / "containers/auth.json"
    yield Path(env.get("XDG_CONFIG_HOME", home / ".config")) / "containers/auth.json"
    yield Path(env.get("DOCKER_CONFIG", home / ".docker")) / "config.json"


def _entry(told: dict[str, Any], key: str) -> Credentials | None:
    """What the file says of ``key``: the credentials, or which program keeps them."""
    helper = told.get("credHelpers", {}).get(key) or told.get("credsStore")
    program = shutil.which(f"docker-credential-{helper}") if helper else None
    if program:
        asked = subprocess.run([program, "get"], input=key, capture_output=True, text=True, timeout=60, check=False)
        if asked.returncode == 0:
            answer = json.loads(asked.stdout)
            return Credentials(answer["Username"], answer["Secret"])
    entry = told.get("auths", {}).get(key, {})
    if entry.get("identitytoken"):
        return Credentials(_IDENTITY, entry["identitytoken"])
    if entry.get("auth"):
        user, _, secret = base64.b64decode(entry["auth"]).decode().partition(":")
        return Credentials(user, secret)
    return None


class _Registry:
    """Reads from one repository; logs in where the registry asks for it."""

    def __init__(self, repository: Repository, insecure: bool) -> None:
        self._repository = repository
        self._insecure = insecure
        host = _HUB_API if repository.host == _HUB else repository.host
        self._root = f"{'http' if insecure else 'https'}://{host}/v2/{repository.path}/"
        self._authorization: str | None = None

    def get(self, path: str, accept: str) -> bytes | None:
        """The body; None where there is no such thing."""
        try:
            return self._fetch(self._root + path, self._authorization, accept)
        except HTTPError as error:
            if error.code == 404:
                return None
            if error.code != 401 or self._authorization is not None:
                raise self._refusal(error) from None
            self._authorization = self._log_in(error.headers.get("WWW-Authenticate", ""))
        return self.get(path, accept)

    def _log_in(self, challenge: str) -> str:
        """The value of the header that answers the challenge."""
        login = credentials(self._repository.host)
        kind, _, rest = challenge.partition(" ")
        if kind.lower() != "bearer":
            if login is None:
                raise UserError(f"{self._repository.host} wants to know who you are: docker login {self._repository.host}")
            return login.basic
        told = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        form = {"service": told.get("service", ""), "scope": told.get("scope", f"repository:{self._repository.path}:pull")}
        try:
            answer: dict[str, str] = json.loads(self._token(told.get("realm", ""), form, login))
            return f"Bearer {answer.get('token') or answer['access_token']}"
        except HTTPError as error:
            raise self._refusal(error) from None
        except (ValueError, KeyError, AttributeError):
            raise RegistryError(f"{self._repository.host} gives no token") from None

    def _token(self, realm: str, form: dict[str, str], login: Credentials | None) -> bytes:
        if urlsplit(realm).scheme not in (("http", "https") if self._insecure else ("https",)):
            raise RegistryError(f"{self._repository.host} wants credentials sent unencrypted to {realm!r}: not done")
        if login is None or login.user != _IDENTITY:
            return self._fetch(f"{realm}?{urlencode(form)}", login.basic if login else None, "*/*")
        form = form | {"grant_type": "refresh_token", "refresh_token": login.secret, "client_id": "worldsize"}
        return self._fetch(realm, None, "*/*", urlencode(form).encode())

    def _fetch(self, url: str, authorization: str | None, accept: str, form: bytes | None = None) -> bytes:
        request = Request(url, form, {"Accept": accept})
        if authorization is not None:
            # Blobs are often elsewhere: where we are redirected to, the credentials do not belong.
            request.add_unredirected_header("Authorization", authorization)
        try:
            with urlopen(request, timeout=_TIMEOUT_S) as answer:
                return bytes(answer.read(_LARGEST))
        except HTTPError:
            raise
        except (URLError, HTTPException, OSError) as error:
            hint = "" if self._insecure else "; --insecure is for a registry that speaks plain http"
            reason = getattr(error, "reason", error)
            raise RegistryError(f"the registry {urlsplit(url).netloc} does not answer: {reason}{hint}") from None

    def _refusal(self, error: HTTPError) -> WorldsizeError:
        host = self._repository.host
        if error.code in (401, 403):
            return UserError(f"{host} does not let you read {self._repository.path}: docker login {host}")
        return RegistryError(f"{host} answers {error.code} {error.reason} when asked for {self._repository.path}")
