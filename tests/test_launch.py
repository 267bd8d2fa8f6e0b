"""Local launchers: the reported cause of a failure is the first failure, and the port of asynchronous runs is reserved."""

from __future__ import annotations

import socket
import subprocess

import pytest

from worldsize.launch import async_workers
from worldsize.launch.local import Outcome, cause

EXPECTED, INTERNAL = Outcome(64, "wrong"), Outcome(70, "lost a peer")


@pytest.mark.parametrize(
    ("exit_codes", "reports", "code"),
    [
        ({0: 64, 1: -15}, [(99.0, EXPECTED)], 64),
        ({0: 64, 1: 64}, [(98.0, EXPECTED), (99.0, INTERNAL)], 64),
        ({0: 64, 1: -9}, [(99.0, EXPECTED)], 64),
        ({0: 70, 1: -9}, [(99.0, INTERNAL)], 137),
        ({0: 70, 1: -9}, [(60.0, INTERNAL)], 70),
        ({0: -15, 1: -11}, [], 139),
        ({0: -15, 1: 3}, [], 3),
    ],
)
def test_the_cause_of_a_failure(exit_codes, reports, code):
    assert cause(exit_codes, reports, now=100.0).code == code


def test_nobody_gets_the_port_of_an_asynchronous_run_before_rank_0_listens(monkeypatch):
    ports = []

    def rank(argv, number, processes, port, logs):
        ports.append(port)
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        if number == 0:
            socket.create_server(("", port)).close()  # with SO_REUSEADDR, as torch does
        return subprocess.Popen(["true"])

    monkeypatch.setattr(async_workers, "_start", rank)
    assert async_workers.launch(["train"], 2) == Outcome(0)
    assert len(set(ports)) == 1
