"""Reads the user's kubeconfig, or a pod's service account, into the settings of the official client."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from worldsize.cluster.objects import Object
from worldsize.errors import UserError, first_line

_NAMESPACE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


def load(config: Any, settings: Any, context: str | None) -> str:
    """Read the kubeconfig into ``settings``. Returns the namespace of the context.

    Args:
        config: the module `kubernetes.config`.
        context: None: the current one, or the pod's service account in a pod without a kubeconfig.

    Raises:
        UserError: no usable kubeconfig, no such context, or a credential plugin failed.
    """
    try:
        return _from_file(config, settings, context)
    except (config.ConfigException, OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        if context is None:
            with suppress(config.ConfigException, OSError):
                config.load_incluster_config(client_configuration=settings)
                with open(_NAMESPACE) as file:
                    return file.read().strip()
        raise UserError(
            f"no usable kubeconfig ({first_line(error)}): set KUBECONFIG to its path, or ask your cluster administrator"
        ) from None


def _from_file(config: Any, settings: Any, context: str | None) -> str:
    location = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    merged = config.kube_config.KubeConfigMerger(location).config
    if merged is None:
        raise config.ConfigException(f"{location} does not exist")
    content: Object = merged.value
    contexts = _named(content, "context")
    if not contexts:
        raise config.ConfigException(f"{location} has no contexts")
    name = context or content.get("current-context")
    if name not in contexts:
        what = (
            f"no context {name!r}" if context else f"no context {name!r}, its current one" if name else "no current context"
        )
        raise UserError(f"the kubeconfig has {what}; pass --context, one of: {', '.join(sorted(contexts))}")
    chosen = contexts[name]
    plugin = _plugin(content, name, chosen.get("user"))
    with _errors_of_the_client() as problems:
        config.load_kube_config(context=name, client_configuration=settings)
    # Versions of the client before 36 ignore it.
    if proxy := _named(content, "cluster").get(str(chosen.get("cluster")), {}).get("proxy-url"):
        settings.proxy = proxy
    # The client only logs what is wrong with a plugin, and would continue as an anonymous user.
    if plugin and not settings.api_key and not settings.cert_file:
        reason = "; ".join(problems) or "it returned no credentials"
        hint = f"\n{plugin['installHint'].strip()}" if plugin.get("installHint") else ""
        raise UserError(
            f"the credential plugin {plugin['command']} of the kubeconfig's user {chosen['user']} failed: {reason}{hint}"
        )
    return str(chosen.get("namespace") or "default")


def _named(content: Object, kind: str) -> dict[str, Object]:
    """The contexts, clusters or users of a merged kubeconfig, by name."""
    entries = [dict(getattr(entry, "value", entry)) for entry in content.get(f"{kind}s") or []]
    return {str(entry["name"]): entry.get(kind) or {} for entry in entries}


def _plugin(content: Object, context: str, name: str | None) -> Object | None:
    """The credential plugin of the user with this name; None if there is none."""
    users = _named(content, "user")
    if name and name not in users:
        raise UserError(f"context {context!r} has the user {name!r}, which the kubeconfig does not define")
    return users[name].get("exec") if name else None


@contextmanager
def _errors_of_the_client() -> Iterator[list[str]]:
    """Collects what the client logs as errors, instead of printing it."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage().removeprefix("exec: "))

    collector, root = Collector(logging.ERROR), logging.getLogger()
    root.addHandler(collector)
    try:
        yield messages
    finally:
        root.removeHandler(collector)
