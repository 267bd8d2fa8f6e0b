"""What volumes and secrets share: their names, and that worldsize deletes and replaces only its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import tyro

from worldsize.cluster.kinds import header
from worldsize.cluster.manifests import syntax
from worldsize.cluster.objects import Object, is_ours, labels
from worldsize.errors import UserError

What = Literal["volume", "secret"]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]

_KINDS = {"volume": "PersistentVolumeClaim", "secret": "Secret"}
_KUBECTL = {"volume": "pvc", "secret": "secret"}


def manifest(what: What, name: str, namespace: str, fields: Mapping[str, object]) -> Object:
    """The object with these fields, and with the labels by which worldsize finds it again (pure).

    Raises:
        UserError: invalid name.
    """
    if not syntax.is_label(name):
        raise UserError(f"invalid {what} name {name!r}: use at most 63 lowercase letters, digits and '-'")
    metadata = {"labels": labels(name, what), "name": name, "namespace": namespace}
    return {**header(_KINDS[what]), "metadata": metadata, **fields}


def require_ours(what: What, current: Object) -> None:
    """Refuse to delete an object that others created."""
    name = current["metadata"]["name"]
    if not is_ours(current):
        raise UserError(f"worldsize did not create {what} {name}; delete it with: kubectl delete {_KUBECTL[what]} {name}")


def missing(what: What, name: str, namespace: str, hint: str) -> UserError:
    """The error for a name that does not exist."""
    return UserError(f"no {what} {name!r} in namespace {namespace}; {hint}")
