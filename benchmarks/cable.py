"""Two network namespaces with a cable between them, whose rate is limited; needs root, `ip` and `tc`."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAMESPACES = ("worldsize-a", "worldsize-b")
ADDRESSES = ("10.99.0.1", "10.99.0.2")


@contextmanager
def network(rate: str) -> Iterator[None]:
    """The two namespaces, with a cable of this rate such as ``100mbit`` in each direction; empty: as fast as it gets."""
    a, b = NAMESPACES

    def ip(*words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    for name in NAMESPACES:
        ip("netns", "del", name, check=False)
    try:
        for name in NAMESPACES:
            ip("netns", "add", name)
        ip("-n", a, "link", "add", "veth", "type", "veth", "peer", "name", "veth", "netns", b)
        for name, address in zip(NAMESPACES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth")
            for link in ("veth", "lo"):
                ip("-n", name, "link", "set", link, "up")
            if not rate:
                continue
            shape = f"tc -n {name} qdisc add dev veth root tbf burst 256kb latency 20ms rate {rate}".split()
            subprocess.run(shape, check=True, capture_output=True)
        yield
    finally:
        for name in NAMESPACES:
            ip("netns", "del", name, check=False)


def inside(rank: int) -> list[str]:
    """The command that runs the words after it in the namespace of this rank."""
    return ["ip", "netns", "exec", NAMESPACES[rank]]


def place(rank: int, processes: int, port: int, cabled: bool) -> dict[str, str]:
    """torchrun's variables of a process, whose master is rank 0, in the first namespace or on this machine."""
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{processes}",
        "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{processes}",
        "MASTER_ADDR": ADDRESSES[0] if cabled else "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "GLOO_SOCKET_IFNAME": "veth" if cabled else "lo",
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
