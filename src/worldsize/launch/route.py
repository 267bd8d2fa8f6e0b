"""The network interface and address by which this machine reaches another one."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def to(host: str) -> tuple[str, str] | None:
    """(interface, this machine's address) of the route to ``host``; None if there is no route or it has no name here.

    Sends nothing: connecting a UDP socket only chooses the route.
    """
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
            for interface in addresses():
                if own in interface[1]:
                    return interface[0], own
    return None


def addresses() -> list[tuple[str, Sequence[str]]]:
    """The addresses, IPv4 and IPv6, of each network interface of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    six = _ipv6()
    return [(name, [*_ipv4(name), *six.get(name, [])]) for name in names]


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def _ipv6() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found
