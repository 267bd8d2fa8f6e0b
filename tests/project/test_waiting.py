"""What tests wait with, and the ports that they give to servers."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from processes import free_port
from waiting import until


def test_a_wait_returns_what_it_waited_for():
    looks = iter([None, [], "there"])
    assert until(lambda: next(looks), "it is there", every=0) == "there"


def test_a_wait_that_hangs_names_the_condition():
    with pytest.raises(AssertionError, match=r"^the sun rises: not within 0\.01 s$"):
        until(lambda: False, "the sun rises", 0.01)


def test_a_wait_for_a_process_that_has_ended_shows_its_output():
    command = [sys.executable, "-c", "import sys; print('no sun today'); sys.exit(3)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        message = "the sun rises: the process ended before, with exit code 3\nno sun today"
        with pytest.raises(AssertionError, match=message):
            until(lambda: False, "the sun rises", running=process)


def test_a_port_goes_to_the_server_that_it_is_for_and_to_nobody_else():
    port = free_port()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    for address in ("127.0.0.1", ""):
        with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)):
            pass
