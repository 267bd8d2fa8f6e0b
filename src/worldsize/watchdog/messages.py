"""What watchers tell each other: datagrams of JSON, each complete in itself. A lost one is followed by the next."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from worldsize.watchdog.judgement import Finding, Seen

_LARGEST = 8192


def listen(host: str) -> socket.socket:
    """A socket for rank 0's watcher: on the loopback interface if the others reach ``host`` there, else on all of them."""
    addresses = _addresses(host, 0)
    loopback = bool(addresses) and all(address[4][0] in ("127.0.0.1", "::1") for address in addresses)
    family, address = (addresses[0][0], addresses[0][4]) if loopback else (socket.AF_INET, ("", 0))
    if not loopback and any(one[0] == socket.AF_INET6 for one in addresses):
        family, address = socket.AF_INET6, ("::", 0)
    server = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6 and not loopback:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(address)
    return server


def connect(host: str, port: int) -> socket.socket | None:
    """A socket that sends to rank 0's watcher; None if its host is unknown at the moment."""
    for family, _, _, _, address in _addresses(host, port):
        client = socket.socket(family, socket.SOCK_DGRAM)
        try:
            client.connect(address)
            return client
        except OSError:
            client.close()
    return None


def _addresses(host: str, port: int) -> list[Any]:
    with suppress(OSError):
        return socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    return []


def encode(token: str, seen: Seen | None = None, finding: Finding | None = None) -> bytes:
    """A message of the run with this secret ``token``."""
    content = {"token": token, "seen": seen and asdict(seen), "finding": finding and asdict(finding)}
    return json.dumps(content).encode()[:_LARGEST]


def receive(one: socket.socket, token: str) -> tuple[Seen | None, Finding | None, Any] | None:
    """The next message of the run that has arrived, and its sender; None if there is none. Other messages are ignored."""
    while True:
        try:
            content, sender = one.recvfrom(_LARGEST, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionRefusedError):
            return None
        except OSError:
            return None
        with suppress(ValueError, TypeError, KeyError):
            message = json.loads(content)
            if message["token"] == token:
                seen, finding = message["seen"], message["finding"]
                if seen is not None:
                    seen["place"] = tuple(seen["place"])
                return seen and Seen(**seen), finding and Finding(**finding), sender
