"""Following jobs on a fake cluster: the notes and log lines, each once and in order, and the exit codes.

There are no operators: each test sets the state of the job and its pods.
"""

from __future__ import annotations

import socket
import threading
import time

from fake_cluster import KeepingCluster, is_in
from followed import notes, pod
from processes import worldsize
from specs import TORCH
from worldsize import cli
from worldsize.cluster.api import logs
from worldsize.cluster.jobs import follow
from worldsize.cluster.jobs.follow import Follower, Line, Note
from worldsize.cluster.jobs.scheduler import Jobs

FAKE_CLUSTER = KeepingCluster


def test_a_log_whose_connections_break_comes_once_and_in_order(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    fake_cluster.breaks = [3, 0, 5]
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    assert [event.text for event in follower.events() if isinstance(event, Line)] == [f"line {i}" for i in range(20)]
    assert follower.state.phase == "Succeeded"


def test_a_log_that_a_proxy_ends_again_and_again_is_read_to_the_end_of_its_container(fake_cluster, monkeypatch):
    monkeypatch.setattr(logs, "_LONGEST_PAUSE_S", 0.05)
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0, logs=[f"[0] line {i}" for i in range(4)])
    fake_cluster.ends = [1, 0, 0, 0, 0, 3, 0, 0, 0]
    lines, started = [], time.monotonic()
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        lines += [event.text] if isinstance(event, Line) else []
        assert time.monotonic() - started < 120  # it would follow forever
        if len(lines) == 4:
            pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(5)])
            is_in(fake_cluster, "PyTorchJob", "Succeeded")
    assert lines == [f"line {i}" for i in range(5)]


def test_a_server_that_is_gone_is_noticed_by_connections_on_which_nothing_comes(fake_cluster):
    fake_cluster.cluster.list("Pod")
    pool = fake_cluster.cluster._client.rest_client.pool_manager.connection_from_url(fake_cluster.cluster.server)
    connected = pool._get_conn().sock
    assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # set by urllib3


def test_following_prints_each_rank_and_ends_with_0(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=["[0] one", "[1] two", "worldsize: waiting"])
    pod(fake_cluster, 1, exit_code=0, logs=["[2] three"])
    assert cli.main(["logs", "r50", "--namespace", "team"]) == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["  0 | one", "  1 | two", "  2 | three", "worker-0 | worldsize: waiting"]
    assert [line for line in out.splitlines() if "worker-0" in line or line[2] in "01"] == [
        "  0 | one",
        "  1 | two",
        "worker-0 | worldsize: waiting",
    ]
    assert err.splitlines()[-1] == "succeeded"
    assert cli.main(["logs", "r50", "--rank", "0", "--namespace", "team"]) == 0
    assert capsys.readouterr().out == "  0 | one\n"
    assert cli.main(["wait", "r50", "--namespace", "team"]) == 0
    assert capsys.readouterr().out == ""


def test_a_failed_job_exits_with_1_and_reports_the_first_failure_first(fake_cluster, capsys):
    is_in(fake_cluster, "PyTorchJob", "Failed")
    pod(fake_cluster, 0, exit_code=70)
    pod(fake_cluster, 1, exit_code=64)
    assert cli.main(["wait", "r50", "--namespace", "team"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-3:] == ["failed: it is Failed", "  worker-1 failed with exit code 64", "  worker-0 failed with exit code 70"]


def test_the_status_of_a_failed_pod_has_the_first_line_of_its_message(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Failed")
    pod(fake_cluster, 0, exit_code=64, message="/mnt/data/x: no such folder\nand more\n")
    pod(fake_cluster, 1, exit_code=70)
    parts = Jobs.of(fake_cluster.cluster).find("r50").parts()
    assert [part.reason for part in parts] == [
        "failed with exit code 64: /mnt/data/x: no such folder",
        "failed with exit code 70",
    ]


def test_following_a_job_that_keeps_running_times_out_with_3(fake_cluster, tmp_path):
    """However many other events arrive: the watches of this cluster end and restart all the time."""
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0)
    kubeconfig = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
    waited = worldsize("wait", "r50", "--timeout", "0.5", "--namespace", "team", cwd=tmp_path, **kubeconfig)
    assert waited.returncode == 3, waited.stderr
    assert "it keeps running. Follow it with: worldsize logs r50 --namespace team" in waited.stderr


def test_a_container_that_was_restarted_in_place_is_read_from_where_it_was_not_seen(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
    lines = [one.text for one in Follower(fake_cluster.cluster, TORCH, "r50").events() if isinstance(one, Line)]
    assert lines == ["before", "again"]


def test_a_run_before_that_was_read_is_not_read_again(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Running")
    pod(fake_cluster, 0, logs=["[0] before"])
    lines = []
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            if event.text == "before":
                pod(fake_cluster, 0, exit_code=0, restarts=1, logs=["[0] again"], logs_before=["[0] before"])
                is_in(fake_cluster, "PyTorchJob", "Succeeded")
    assert lines == ["before", "again"]


def test_who_reads_slowly_gets_every_line(fake_cluster, clock):
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0, logs=[f"[0] line {i}" for i in range(20)])
    lines = []
    for event in Follower(fake_cluster.cluster, TORCH, "r50").events():
        if isinstance(event, Line):
            lines.append(event.text)
            clock.now += 1.5 * follow._DRAIN_S if len(lines) == 1 else 0.1 * follow._DRAIN_S
    assert lines == [f"line {i}" for i in range(20)]


def test_a_log_that_does_not_end_with_its_job_is_abandoned_with_a_note(fake_cluster, clock, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(fake_cluster, "log", lambda *_: over.wait(600) and (200, b""))
    is_in(fake_cluster, "PyTorchJob", "Succeeded")
    pod(fake_cluster, 0, exit_code=0)
    texts = notes(Follower(fake_cluster.cluster, TORCH, "r50"), clock)
    over.set()
    assert "lines may be missing" in texts[-1]


def test_a_job_that_is_deleted_meanwhile_has_failed(fake_cluster):
    is_in(fake_cluster, "PyTorchJob", "Running")
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    texts = []
    for event in follower.events():
        texts += [event.text] if isinstance(event, Note) else []
        if follower.state.phase == "Running":  # it was seen
            fake_cluster.objects.pop("/apis/kubeflow.org/v1/namespaces/team/pytorchjobs/r50", None)
    assert follower.state.phase == "Failed" and texts[-1] == "the job was deleted"


def test_a_job_that_is_deleted_before_it_is_looked_at_has_failed(fake_cluster, clock):
    follower = Follower(fake_cluster.cluster, TORCH, "r50")
    assert notes(follower, clock) == ["the job was deleted"]
    assert follower.state.phase == "Failed"
