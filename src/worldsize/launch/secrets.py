"""Secrets: tokens for the pods. A value goes from where it is to the API server and nowhere else.

So what the server says to a value is never shown, and no error is raised while one that may hold a value is handled.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from getpass import getpass
from pathlib import Path
from typing import Annotated, Any

import tyro

from worldsize.errors import UserError
from worldsize.launch import pod
from worldsize.launch.answers import ClusterError, Unreachable
from worldsize.launch.cluster import FIELD_MANAGER, Cluster
from worldsize.launch.kinds import KINDS
from worldsize.launch.options import Where
from worldsize.launch.show import age, note, seconds_since
from worldsize.launch.volumes import Name

Object = dict[str, Any]

_LARGEST = 1 << 20  # bytes; what the API server takes


@dataclass(frozen=True)
class SecretCreate:
    """Keep a token on the cluster, for `--secret NAME/KEY` and for fetching data. The value is never shown.

    Say one of --from, --from-env and --from-stdin.
    """

    name: Name
    """Its name."""
    from_file: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """A file with the value."""
    key: str | None = None
    """With --from: the key (default: the file's name)."""
    from_env: tuple[str, ...] = ()
    """Environment variables, by name; each becomes a key."""
    from_stdin: str | None = None
    """The key of a value that is read from stdin, or asked for in a terminal."""
    replace: bool = False
    """Replace the secret, with all its keys, if it is there."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


@dataclass(frozen=True)
class SecretList:
    """The secrets that worldsize keeps in the namespace, without their values."""

    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


@dataclass(frozen=True)
class SecretDelete:
    """Delete a secret."""

    name: Name
    """Its name."""
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)


def create(asked: SecretCreate, cluster: Cluster) -> int:
    """``worldsize cluster secret create``.

    Raises:
        UserError: there is nothing to keep, or something of that name already.
        ClusterError: the API server refuses.
    """
    secret = manifest(asked.name, cluster.namespace, values(asked))
    method = "POST"
    refused = _send(cluster, method, secret)
    if refused is not None and refused.status == 409:
        _refuse_to_replace(cluster, asked)
        method = "PUT"
        refused = _send(cluster, method, secret)
    if refused is not None:
        raise _in_safe_words(cluster, method, secret, refused)
    print(f"secret {asked.name} {'created' if method == 'POST' else 'replaced'}, with {', '.join(secret['data'])}")
    return 0


def show(asked: SecretList, cluster: Cluster) -> int:
    """``worldsize cluster secret list``."""
    from rich.console import Console
    from rich.table import Table

    secrets = cluster.list("Secret", "app.kubernetes.io/managed-by=worldsize")
    if not secrets:
        print(f"worldsize keeps no secret in namespace {cluster.namespace}")
        return 0
    table = Table("secret", "keys", "age", box=None, header_style="bold")
    for secret in secrets:
        about = secret["metadata"]
        old = age(seconds_since(about["creationTimestamp"]))
        table.add_row(about["name"], ", ".join(sorted(secret.get("data") or {})), old)
    Console().print(table)
    return 0


def delete(asked: SecretDelete, cluster: Cluster) -> int:
    """``worldsize cluster secret delete``.

    Raises:
        UserError: there is no such secret, or it is not ours.
    """
    there = cluster.get("Secret", asked.name)
    if there is None:
        names = [one["metadata"]["name"] for one in cluster.list("Secret", "app.kubernetes.io/managed-by=worldsize")]
        raise UserError(
            f"namespace {cluster.namespace} has no secret {asked.name!r}; ours are: {', '.join(names) or 'none'}"
        )
    if not _is_ours(there):
        raise UserError(f"secret {asked.name} was not made by worldsize: kubectl delete secret {asked.name} would delete it")
    cluster.delete("Secret", asked.name)
    print(f"secret {asked.name} deleted")
    return 0


def manifest(name: str, namespace: str, kept: Mapping[str, bytes]) -> Object:
    """The Secret.

    Raises:
        UserError: no cluster would take it.
    """
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise UserError(f"a secret cannot be called {name!r}: use at most 63 lower-case letters, digits and '-'")
    for key, value in kept.items():
        if not re.fullmatch(r"[-._a-zA-Z0-9]{1,253}", key) or key == "." or key.startswith(".."):
            raise UserError(f"{key!r} cannot be the key of a secret: use letters, digits, '-', '_' and '.' (--key)")
        if not value:
            raise UserError(f"the value of {key} is empty")
    if sum(map(len, kept.values())) > _LARGEST:
        raise UserError("a secret holds 1 MiB at most")
    return {
        "apiVersion": "v1",
        "data": {key: base64.b64encode(value).decode() for key, value in sorted(kept.items())},
        "immutable": False,
        "kind": "Secret",
        "metadata": {"labels": pod.labels(name, "secret"), "name": name, "namespace": namespace},
        "type": "Opaque",
    }


def values(asked: SecretCreate) -> dict[str, bytes]:
    """Read what is to be kept, by key.

    Raises:
        UserError: it cannot be read, or cannot be right.
    """
    if sum((asked.from_file is not None, bool(asked.from_env), asked.from_stdin is not None)) != 1:
        raise UserError("where is the value? say one of --from FILE, --from-env VARIABLE and --from-stdin KEY")
    if asked.from_env:
        return {variable: _variable(variable) for variable in asked.from_env}
    if asked.from_stdin is not None:
        return {asked.from_stdin: _checked(asked.from_stdin, _stdin(asked.from_stdin))}
    assert asked.from_file is not None
    path = asked.from_file.expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--from {path}: {error.strerror}") from None
    key = asked.key or path.name
    return {key: _checked(key, content)}


def _variable(name: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # It may be NAME=VALUE: then it must not be repeated.
        raise UserError("--from-env takes names of environment variables alone, so that no value is seen on a command line")
    if name not in os.environ:
        raise UserError(f"--from-env {name}: there is no such environment variable")
    return os.environb[name.encode()]


def _stdin(key: str) -> bytes:
    if sys.stdin.isatty():
        return getpass(f"{key} (it is not shown): ").encode()
    return sys.stdin.buffer.read()


def _checked(key: str, content: bytes) -> bytes:
    """The value: without the newline that editors put at the end of a token."""
    parsed: Any = None
    with suppress(ValueError, RecursionError):
        parsed = json.loads(content)
    if key == "kaggle.json" and not (isinstance(parsed, dict) and parsed.get("username") and parsed.get("key")):
        raise UserError("this is no kaggle.json: it must be JSON with username and key, as Kaggle's settings page gives it")
    token = content.rstrip(b"\r\n")
    if isinstance(parsed, (dict, list)) or token == content or b"\n" in token:
        return content
    note(f"{key}: the newline at its end is left out")
    return token


def _refuse_to_replace(cluster: Cluster, asked: SecretCreate) -> None:
    there = cluster.get("Secret", asked.name)
    if there is not None and not _is_ours(there):
        raise UserError(f"a secret {asked.name} is there already and was not made by worldsize: choose another name")
    if there is not None and not asked.replace:
        keys = ", ".join(sorted(there.get("data") or {}))
        raise UserError(f"secret {asked.name} is there already, with {keys}: --replace replaces it")


def _send(cluster: Cluster, method: str, secret: Object, dry_run: bool = False) -> ClusterError | None:
    """Create (POST) or replace (PUT) the Secret. Returns the server's refusal."""
    about = secret["metadata"]
    path = KINDS["Secret"].path(about["namespace"], about["name"] if method == "PUT" else None)
    query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
    try:
        cluster.request(method, path, query, secret)
    except ClusterError as error:
        return error
    return None


def _in_safe_words(cluster: Cluster, method: str, secret: Object, refused: ClusterError) -> ClusterError:
    """A refusal without the server's words, which may repeat a value.

    The server is asked again whether it would take the same with other values: what it says then is safe. Not so where it
    has a Secret of that name, with values that it may repeat.
    """
    if isinstance(refused, Unreachable):
        return Unreachable(f"the API server {cluster.server} does not answer")
    if method == "POST":
        harmless = secret | {"data": dict.fromkeys(secret["data"], base64.b64encode(b"-").decode())}
        again = _send(cluster, method, harmless, dry_run=True)
        if again is not None:
            return again
    verb = "keep" if method == "POST" else "replace"
    return ClusterError(f"the API server refuses to {verb} secret {secret['metadata']['name']} (HTTP {refused.status})")


def _is_ours(secret: Object) -> bool:
    return bool(secret["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "worldsize")
