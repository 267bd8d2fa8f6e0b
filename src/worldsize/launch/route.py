"""The network interface and address by which this machine reaches another one."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import suppress


def to(host: str) -> tuple[str, str] | None:
    """(interface, this machine's address) of the route to ``host``; None if there is no route.

    The interface is empty if none has the address, as in some sandboxes. Sends nothing: connecting a UDP socket only chooses
    the route.
    """
    unnamed = None
    with suppress(OSError, UnicodeError):  # UnicodeError: no name of a host, such as a..b
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
                if interface := _interface(own):
                    return interface, own
                unnamed = unnamed or ("", own)
    return unnamed


def _interface(own: str) -> str:
    """The interface with this address of the machine; empty if there is none."""
    address, _, scope = own.partition("%")  # link-local addresses name their interface
    return scope or next((name for name, other in _addresses() if other == address), "")


class _IfAddrs(ctypes.Structure):
    """The beginning of getifaddrs' struct ifaddrs."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _addresses() -> Iterator[tuple[str, str]]:
    """(interface, address) of each address, IPv4 and IPv6, of this machine.

    The names are those that gloo and NCCL compare with theirs: getifaddrs has the label of an address, such as eth0:1.
    """
    libc = ctypes.CDLL(None)
    first = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        return
    try:
        one = first
        while one:
            if one.contents.address:
                yield from _address(os.fsdecode(one.contents.name), one.contents.address)
            one = one.contents.next
    finally:
        libc.freeifaddrs(first)


def _address(name: str, at: int) -> Iterator[tuple[str, str]]:
    """The name and the address of the struct sockaddr at this place in memory; nothing if it is no address of IP."""
    family = ctypes.c_uint16.from_address(at).value
    if family == socket.AF_INET:
        yield name, socket.inet_ntop(family, ctypes.string_at(at + 4, 4))
    elif family == socket.AF_INET6:
        yield name, socket.inet_ntop(family, ctypes.string_at(at + 8, 16))
