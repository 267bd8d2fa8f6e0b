"""The interface and address of the route to another host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import pytest

from worldsize.launch import agent, route

UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
# An interface with two networks, and a third address with a label.
NETWORK = """
set -e
ip tuntap add dev t0 mode tap
ip address add 10.1.0.5/24 dev t0
ip address add 10.2.0.5/24 dev t0
ip address add 10.3.0.5/24 dev t0 label t0:1
ip link set t0 up
"""
ROUTES = "import sys; from worldsize.launch import route; print([route.to(host) for host in sys.argv[1:]])"


def test_the_route_names_an_interface_that_exists():
    interface, address = route.to("127.0.0.1")
    assert interface in [name for _, name in socket.if_nameindex()] and address == "127.0.0.1"
    assert route.to("::1") in (("lo", "::1"), None)  # None: no IPv6 here


def test_every_address_of_an_interface_is_its_own():
    """Hosts may talk over a network that is not the first one of their interface."""
    possible = subprocess.run([*UNSHARE, "sh", "-c", NETWORK], capture_output=True, check=False) if _tools() else None
    if possible is None or possible.returncode:
        pytest.skip("needs `unshare --net`, `ip tuntap`, and the right to use them")
    asked = [sys.executable, "-c", ROUTES, "10.1.0.9", "10.2.0.9", "10.3.0.9", "10.4.0.9"]
    done = subprocess.run(
        [*UNSHARE, "sh", "-c", f'{NETWORK}exec "$@"', "sh", *asked], capture_output=True, text=True, check=False, timeout=60
    )
    expected = [("t0", "10.1.0.5"), ("t0", "10.2.0.5"), ("t0:1", "10.3.0.5"), None]
    assert done.stdout.strip() == str(expected), done.stderr


def _tools() -> bool:
    return all(map(shutil.which, ("unshare", "ip")))


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".org", "no such host"])
def test_there_is_no_route_to_what_is_no_name_of_a_host(host):
    assert route.to(host) is None


def test_a_route_without_a_known_interface_is_a_route(monkeypatch):
    monkeypatch.setattr(route, "_addresses", lambda: iter([]))
    assert route.to("127.0.0.1") == ("", "127.0.0.1")


@pytest.mark.parametrize(
    ("interface", "pinned", "address"),
    [("eth0", "eth0", "10.0.0.5"), ("eth0:1", "eth0:1", "10.0.0.5"), ("", None, "10.0.0.5"), ("lo:1", None, "here")],
)
def test_an_agent_uses_what_is_known_of_the_route(monkeypatch, interface, pinned, address):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored after the test, whatever the agent sets
        monkeypatch.delenv(name)
    monkeypatch.delenv("WORLDSIZE_ADDRESS", raising=False)
    monkeypatch.setenv("WORLDSIZE_PEERS", "h2")
    monkeypatch.setattr(route, "to", lambda _: (interface, "10.0.0.5"))
    node = agent._on_the_route(agent.Node("a", (2, 2), 1, "h1", 29400, True, "here"))
    assert node.address == address
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME") == pinned
