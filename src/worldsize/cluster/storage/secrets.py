"""Secrets: tokens for the pods. A value is sent to the API server and never shown anywhere.

The server's response to a value is therefore never shown, and no exception is raised from inside the handling of an
exception that may contain a value.
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

from worldsize.cluster.api.client import FIELD_MANAGER, Cluster
from worldsize.cluster.api.errors import ClusterError, Unreachable
from worldsize.cluster.kinds import KINDS
from worldsize.cluster.manifests import syntax
from worldsize.cluster.objects import OURS, Object, is_ours
from worldsize.cluster.options import Where
from worldsize.cluster.storage import named
from worldsize.cluster.storage.named import Name
from worldsize.config.command_line import Flat
from worldsize.errors import UserError
from worldsize.jobs.terminal import age, note, seconds_since

_MAX_BYTES = 1 << 20  # limit of the API server


@dataclass(frozen=True)
class SecretCreate:
    """Store a token on the cluster, for `--secret NAME/KEY` and for fetching data. The value is never shown.

    Pass exactly one of --from, --from-env and --from-stdin.
    """

    name: Name
    """Name of the secret."""
    from_file: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """File that contains the value."""
    key: str | None = None
    """Key for --from (default: the file name)."""
    from_env: tuple[str, ...] = ()
    """Names of environment variables; each becomes a key."""
    from_stdin: str | None = None
    """Key of a value read from stdin; on a terminal, prompts for the value."""
    replace: bool = False
    """Replace an existing secret and all its keys."""
    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class SecretList:
    """List the secrets that worldsize created in the namespace, without their values."""

    where: Flat[Where] = field(default_factory=Where)


@dataclass(frozen=True)
class SecretDelete:
    """Delete a secret."""

    name: Name
    """Name of the secret."""
    where: Flat[Where] = field(default_factory=Where)


def create(options: SecretCreate, cluster: Cluster) -> int:
    """``worldsize cluster secret create``.

    Raises:
        UserError: there is no value, or a secret of that name already exists.
        ClusterError: the API server rejects the secret.
    """
    secret = manifest(options.name, cluster.namespace, values(options))
    method = "POST"
    error = _send(cluster, method, secret)
    if error is not None and error.status == 409:
        _require_replaceable(cluster, options)
        method = "PUT"
        error = _send(cluster, method, secret)
    if error is not None:
        raise _without_values(cluster, method, secret, error)
    print(f"secret {options.name} {'created' if method == 'POST' else 'replaced'}, with {', '.join(secret['data'])}")
    return 0


def show(options: SecretList, cluster: Cluster) -> int:
    """``worldsize cluster secret list``."""

    from worldsize.config import tables

    secrets = cluster.list("Secret", OURS)
    if not secrets:
        print(f"no secrets created by worldsize in namespace {cluster.namespace}")
        return 0
    table = tables.table("secret", "keys", "age")
    for secret in secrets:
        metadata = secret["metadata"]
        elapsed = age(seconds_since(metadata["creationTimestamp"]))
        table.add_row(metadata["name"], ", ".join(sorted(secret.get("data") or {})), elapsed)
    tables.console().print(table)
    return 0


def delete(options: SecretDelete, cluster: Cluster) -> int:
    """``worldsize cluster secret delete``.

    Raises:
        UserError: the secret does not exist, or worldsize did not create it.
    """
    current = cluster.get("Secret", options.name)
    if current is None:
        names = [item["metadata"]["name"] for item in cluster.list("Secret", OURS)]
        raise named.missing("secret", options.name, cluster.namespace, f"existing: {', '.join(names) or 'none'}")
    named.require_ours("secret", current)
    cluster.delete("Secret", options.name)
    print(f"secret {options.name} deleted")
    return 0


def manifest(name: str, namespace: str, values_by_key: Mapping[str, bytes]) -> Object:
    """The Secret.

    Raises:
        UserError: invalid name or key, empty value, or too large.
    """
    for key, value in values_by_key.items():
        if not syntax.is_secret_key(key):
            raise UserError(f"invalid secret key {key!r}: use letters, digits, '-', '_' and '.' (--key)")
        if not value:
            raise UserError(f"the value of {key} is empty")
    if sum(map(len, values_by_key.values())) > _MAX_BYTES:
        raise UserError("the secret is larger than the limit of 1 MiB")
    data = {key: base64.b64encode(value).decode() for key, value in sorted(values_by_key.items())}
    return named.manifest("secret", name, namespace, {"data": data, "immutable": False, "type": "Opaque"})


def values(options: SecretCreate) -> dict[str, bytes]:
    """Read the values, by key.

    Raises:
        UserError: a value cannot be read, or is invalid.
    """
    if sum((options.from_file is not None, bool(options.from_env), options.from_stdin is not None)) != 1:
        raise UserError("pass exactly one of --from FILE, --from-env VARIABLE and --from-stdin KEY")
    if options.from_env:
        return {variable: _cleaned(variable, _variable(variable)) for variable in options.from_env}
    if options.from_stdin is not None:
        return {options.from_stdin: _cleaned(options.from_stdin, _stdin(options.from_stdin))}
    assert options.from_file is not None
    path = options.from_file.expanduser()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"--from {path}: {error.strerror}") from None
    key = options.key or path.name
    return {key: _cleaned(key, content)}


def _variable(name: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        # It may be NAME=VALUE, so the message must not repeat it.
        raise UserError("--from-env takes only names of environment variables, so that no value appears on a command line")
    if name not in os.environ:
        raise UserError(f"--from-env {name}: this environment variable is not set")
    return os.environb[name.encode()]


def _stdin(key: str) -> bytes:
    if sys.stdin.isatty():
        return getpass(f"{key} (input is hidden): ").encode()
    return sys.stdin.buffer.read()


def _cleaned(key: str, content: bytes) -> bytes:
    """The value, without the newline that editors append to a token."""
    parsed: Any = None
    with suppress(ValueError, RecursionError):
        parsed = json.loads(content)
    if key == "kaggle.json" and not (isinstance(parsed, dict) and parsed.get("username") and parsed.get("key")):
        raise UserError(
            "not a valid kaggle.json: expected JSON with username and key, as downloaded from Kaggle's settings page"
        )
    token = content.rstrip(b"\r\n")
    if isinstance(parsed, (dict, list)) or token == content or b"\n" in token:
        return content
    note(f"{key}: removed the newline at the end")
    return token


def _require_replaceable(cluster: Cluster, options: SecretCreate) -> None:
    current = cluster.get("Secret", options.name)
    if current is not None and not is_ours(current):
        raise UserError(f"secret {options.name} already exists, and worldsize did not create it; choose another name")
    if current is not None and not options.replace:
        keys = ", ".join(sorted(current.get("data") or {}))
        raise UserError(f"secret {options.name} already exists, with {keys}; pass --replace to replace it")


def _send(cluster: Cluster, method: str, secret: Object, dry_run: bool = False) -> ClusterError | None:
    """Create (POST) or replace (PUT) the Secret. Returns the error, if any."""
    metadata = secret["metadata"]
    path = KINDS["Secret"].path(metadata["namespace"], metadata["name"] if method == "PUT" else None)
    query = {"fieldManager": FIELD_MANAGER} | ({"dryRun": "All"} if dry_run else {})
    try:
        cluster.request(method, path, query, secret)
    except ClusterError as error:
        return error
    return None


def _without_values(cluster: Cluster, method: str, secret: Object, error: ClusterError) -> ClusterError:
    """The error without the server's message, which may contain a value.

    For a POST, a dry run with placeholder values is sent: the message of that response is safe. This does not work for a
    PUT, because the server may repeat the values of the existing Secret.
    """
    if isinstance(error, Unreachable):
        return Unreachable(f"the API server {cluster.server} does not answer")
    if method == "POST":
        harmless = secret | {"data": dict.fromkeys(secret["data"], base64.b64encode(b"-").decode())}
        second = _send(cluster, method, harmless, dry_run=True)
        if second is not None:
            return second
    verb = "create" if method == "POST" else "replace"
    return ClusterError(f"the API server refused to {verb} secret {secret['metadata']['name']} (HTTP {error.status})")
