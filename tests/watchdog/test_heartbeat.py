"""What a process writes about itself, as its watcher reads it."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from waiting import until
from worldsize.watchdog import heartbeat, messages
from worldsize.watchdog.judgement import Finding, Seen
from worldsize.watchdog.process import is_alive, state_of

SEEN = Seen(1, "host", 7, (3, 1, 2), 2, 0.5, 30.0, 10)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, heartbeat.SIZE) as shared:
        yield shared


def test_a_beat_says_where_the_process_is(memory):
    assert heartbeat.newest(memory).beats == 0
    with heartbeat.beating(memory):
        heartbeat.begin_step(41)
        assert (heartbeat.newest(memory).stage, heartbeat.newest(memory).place[:2]) == (heartbeat.LOADING, (41, 0))
        heartbeat.beat(heartbeat.COMPUTING, 3)
        begun = heartbeat.newest(memory)
        heartbeat.end_step()
        heartbeat.begin_step(42)
    found = heartbeat.newest(memory)
    assert begun.place == (41, 3, heartbeat.STAGES.index(heartbeat.COMPUTING)) and begun.step_s == 0
    assert found.beats == 3 and found.place > begun.place and found.step_s > 0


def test_without_a_watcher_nothing_is_written(memory):
    heartbeat.begin_step(1)
    heartbeat.beat(heartbeat.SAVING)
    with heartbeat.reading("a.jpg"):
        pass
    assert heartbeat.newest(memory).beats == 0


def test_the_oldest_of_many_reads_is_named_and_those_that_ended_are_not(memory):
    names = [f"/data/{i:03d}-" + "ä" * i + ".jpg" for i in range(150)]  # some are longer than what is kept
    begun, release = [threading.Event() for _ in names], [threading.Event() for _ in names]

    def read(i: int) -> None:
        with heartbeat.reading(names[i]):
            begun[i].set()
            release[i].wait()

    with heartbeat.beating(memory):
        threads = [threading.Thread(target=read, args=(i,)) for i in range(60)]
        for i, thread in enumerate(threads):
            thread.start()
            begun[i].wait()
        for i, thread in enumerate(threads):
            found = heartbeat.oldest_read(memory)
            assert found is not None and names[i].endswith(found[0][-20:]) and found[1] <= time.monotonic()
            release[i].set()
            thread.join()
    assert heartbeat.oldest_read(memory) is None


def test_the_state_of_a_process():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert is_alive(process.pid) and not state_of(process.pid).stopped
        process.send_signal(19)  # SIGSTOP
        until(lambda: state_of(process.pid).stopped, "it is stopped")
        assert is_alive(process.pid)
    finally:
        process.kill()
    until(lambda: not is_alive(process.pid), "it has ended, although nobody has waited for it")
    process.communicate()
    assert state_of(process.pid) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_messages_of_the_run_arrive_and_others_are_ignored(host):
    try:
        server = messages.listen(host)
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    with server:
        client = messages.connect(host, server.getsockname()[1])
        assert client is not None
        with client:
            for content in (b"", b"\xff", b"{}", b"[1]", messages.encode("another", SEEN), b'{"token": "ours", "seen": 1}'):
                client.send(content)
            client.send(messages.encode("ours", SEEN))
            [(seen, finding, sender)] = [until(lambda: messages.receive(server, "ours"), "the message arrives")]
            assert (seen, finding) == (SEEN, None)
            server.sendto(messages.encode("ours", finding=Finding(1, "stuck", True)), sender)
            assert until(lambda: messages.receive(client, "ours"), "the answer arrives")[1] == Finding(1, "stuck", True)
        assert messages.receive(server, "ours") is None


def test_only_this_machine_reaches_a_watcher_that_needs_nobody_else():
    with messages.listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"


def test_an_unknown_host_and_a_closed_port_are_no_errors():
    assert messages.connect("host.invalid", 9) is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    client = messages.connect("127.0.0.1", port)
    assert client is not None
    with client:
        client.send(messages.encode("ours", SEEN))
        assert messages.receive(client, "ours") is None
