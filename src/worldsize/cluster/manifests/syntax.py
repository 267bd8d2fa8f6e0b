"""What Kubernetes accepts as names, labels, resources and container images (pure): rules of its API server and kubelet."""

from __future__ import annotations

import re

MAX_INT32 = 2**31 - 1
_MAX_IMAGE_NAME = 255

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*", re.DOTALL)
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
# A first part without a dot or a port is a folder on Docker Hub, not a host.
_HOST_LABEL = r"[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
_HOST = rf"(localhost|{_HOST_LABEL}(\.{_HOST_LABEL})+|{_HOST_LABEL}(?=:))(:\d+)?"
_IMAGE = re.compile(
    rf"(?P<name>({_HOST}/)?{_PATH}(/{_PATH})*)(:[A-Za-z0-9_][-A-Za-z0-9_.]{{0,127}})?(@sha256:[0-9a-f]{{64}}|@sha512:[0-9a-f]{{128}})?"
)


def is_label(text: str) -> bool:
    """Whether it can name a namespace: lowercase letters, digits and '-', at most 63 characters."""
    return re.fullmatch(_LABEL, text) is not None


def is_name(text: str) -> bool:
    """Whether it can name most objects: labels joined by dots, at most 253 characters."""
    return _SUBDOMAIN.fullmatch(text) is not None


def is_label_key(text: str) -> bool:
    """Whether it can be the key of a label or taint: NAME or DOMAIN/NAME."""
    domain, slash, name = text.rpartition("/")
    return re.fullmatch(_WORD, name) is not None and (not slash or is_name(domain))


def is_label_value(text: str) -> bool:
    """Whether it can be the value of a label or taint, which may be empty."""
    return re.fullmatch(rf"({_WORD})?", text) is not None


def is_device(text: str) -> bool:
    """Whether it can be the name of an extended resource: DOMAIN/NAME, of a domain that is not Kubernetes' own."""
    domain, slash, _ = text.rpartition("/")
    own = domain == "kubernetes.io" or domain.endswith(".kubernetes.io") or text.startswith("requests.")
    return bool(slash) and is_label_key(text) and not own


def is_variable(text: str) -> bool:
    """Whether it can name an environment variable."""
    return re.fullmatch(r"[-._A-Za-z][-._A-Za-z0-9]*", text) is not None and not _is_path(text)


def is_secret_key(text: str) -> bool:
    """Whether it can be a key of a Secret."""
    return re.fullmatch(r"[-._A-Za-z0-9]{1,253}", text) is not None and not _is_path(text)


def _is_path(text: str) -> bool:
    """Kubernetes makes files of such names, which must not lead out of their folder."""
    return text == "." or text.startswith("..")


def is_image(text: str) -> bool:
    """Whether it is a reference of a container image."""
    match = _IMAGE.fullmatch(text)
    return match is not None and len(match["name"]) <= _MAX_IMAGE_NAME
