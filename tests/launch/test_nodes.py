"""One command per node: the variables of SkyPilot, dstack, PBS and LSF."""

from __future__ import annotations

import json
import socket

import pytest

from processes import Forked, free_port, losses, start, worldsize
from worldsize.errors import UserError
from worldsize.launch import agent, nodes

HERE = socket.gethostname()
# As documented by docs.skypilot.co (distributed jobs) and dstack.ai (tasks).
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
DSTACK = {"DSTACK_NODES_NUM": "3", "DSTACK_NODE_RANK": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1", "DSTACK_GPUS_PER_NODE": "4"}
IPS = {"DSTACK_NODES_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3"}
# Some of dstack's backends know no internal addresses.
NO_ADDRESSES = DSTACK | {
    "DSTACK_NODES_NUM": "1",
    "DSTACK_NODE_RANK": "0",
    "DSTACK_MASTER_NODE_IP": "",
    "DSTACK_NODES_IPS": "",
}


@pytest.mark.parametrize(
    ("env", "procs", "expected"),
    [
        (SKYPILOT, None, ("2", "1", "8", "10.0.0.1", "10.0.0.1")),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "0"}, 2, ("2", "0", "2", "10.0.0.1", "10.0.0.2")),
        (DSTACK, None, ("3", "2", "4", "10.0.0.1", "10.0.0.1")),
        (DSTACK | IPS | {"DSTACK_NODE_RANK": "0"}, None, ("3", "0", "4", "10.0.0.1", "10.0.0.2")),
        (NO_ADDRESSES, None, ("1", "0", "4", "127.0.0.1", "")),
    ],
)
def test_variables_of_clouds(env, procs, expected):
    found = nodes.torchrun_variables(env, procs)
    names = ("PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "WORLDSIZE_PEERS")
    assert tuple(found[name] for name in names) == expected


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_host_files_have_a_line_per_slot(variable, tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text(f"n1.cluster\nn1.cluster\n{HERE}.cluster\n{HERE}.cluster\n")
    found = nodes.torchrun_variables({variable: str(tmp_path / "hosts")}, 2)
    assert (found["PET_NNODES"], found["PET_NODE_RANK"], found["PET_MASTER_ADDR"]) == ("2", "1", "n1.cluster")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    found = [nodes.torchrun_variables({variable: str(tmp_path / "hosts")}, procs) for procs in (None, 2)]
    assert [one["PET_NPROC_PER_NODE"] for one in found] == ["4", "2"]
    (tmp_path / "hosts").write_text("n1\nn2\n")
    with pytest.raises(UserError, match=f"does not list this host, {HERE.partition('.')[0]}"):
        nodes.torchrun_variables({variable: str(tmp_path / "hosts")}, 2)


@pytest.mark.parametrize(
    ("hosts", "here", "full", "expected"),
    [
        (["vm.rack1", "vm.rack2"], "vm.rack2", "vm.rack2", "1"),
        (["vm.rack1", "vm.rack2"], "vm.rack2.site.org", "vm.rack2.site.org", "1"),
        (["vm.rack1", "vm.rack2"], "vm", "vm.rack2", "1"),
        (["vm.rack1", "vm.rack2"], "vm", "vm", "lists vm.rack1, vm.rack2, and this host calls itself vm: give it its full"),
        (["vm.rack1", "vm"], "vm", "vm.rack1", "1"),
        (["N1", "N2"], "n2", "n2", "1"),
        (["n1.a", "n2.a"], "N2.b", "N2.b", "1"),
        (["n1", "n2"], "n", "n", "does not list this host, n"),
        ([], "n1", "n1", "does not list this host, n1"),
    ],
)
def test_a_host_finds_itself_by_the_name_that_fits_best(hosts, here, full, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(nodes.socket, "gethostname", lambda: here)
    monkeypatch.setattr(nodes.socket, "getfqdn", lambda: full)
    (tmp_path / "hosts").write_text("\n".join(hosts))
    if expected.isdigit():
        assert nodes.torchrun_variables({"PBS_NODEFILE": str(tmp_path / "hosts")}, 2)["PET_NODE_RANK"] == expected
        return
    with pytest.raises(UserError, match=expected):
        nodes.torchrun_variables({"PBS_NODEFILE": str(tmp_path / "hosts")}, 2)


def test_what_is_missing_is_named():
    assert nodes.torchrun_variables({}, 8) is None
    with pytest.raises(UserError, match="SkyPilot did not set SKYPILOT_NODE_IPS"):
        nodes.torchrun_variables({"SKYPILOT_NODE_RANK": "0"}, None)
    for change, message in (({"SKYPILOT_NODE_IPS": ""}, "list 0 hosts"), ({"SKYPILOT_NODE_RANK": "2"}, "is number 2")):
        with pytest.raises(UserError, match=f"SkyPilot's variables cannot be read: .*{message}"):
            nodes.torchrun_variables(SKYPILOT | change, 1)
    with pytest.raises(UserError, match="no internal addresses"):
        nodes.torchrun_variables(NO_ADDRESSES | {"DSTACK_NODES_NUM": "2"}, None)
    with pytest.raises(UserError, match="dstack's variables cannot be read"):
        nodes.torchrun_variables(DSTACK | {"DSTACK_NODES_NUM": "two"}, None)
    with pytest.raises(UserError, match=r"torchrun's PET_\* variables, or those of SkyPilot"):
        agent.discover("a", {})


def test_jobs_on_one_host_use_different_ports():
    ports = {nodes.torchrun_variables(SKYPILOT | {"SKYPILOT_TASK_ID": job}, 1)["PET_MASTER_PORT"] for job in "abcdef"}
    assert len(ports) > 4 and all(29400 <= int(port) < 30400 for port in ports)


SETTINGS = (
    *("--data.name", "synthetic", "--data.samples", "96", "--data.classes", "10", "--deterministic", "--precision", "fp32"),
    *("--model.name", "shufflenet_v2_x0_5", "--epochs", "1", "--global-batch", "48", "--micro-batch", "12"),
    *("--schedule.warmup-epochs", "0", "--track.every-seconds", "0"),
)


@pytest.mark.slow
def test_a_skypilot_task_trains_on_two_nodes(tmp_path):
    """The command of the task's `run` section on each node, with the variables that SkyPilot sets there."""
    port = str(free_port())

    def node(rank: int) -> Forked:
        place = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NODE_RANK": str(rank), "MASTER_PORT": port}
        train = ("train", "digits", *SETTINGS, "--name", "a", "--autoresume")
        options = ("agent", "--id", "job", "--procs", "1", "--", *train)
        return start(*options, cwd=tmp_path, **place, WORLDSIZE_ADDRESS="127.0.0.1")

    both = [node(0), node(1)]
    outputs = [one.communicate(timeout=180)[0] for one in both]
    assert [one.returncode for one in both] == [0, 0], outputs
    done = worldsize("train", "digits", *SETTINGS, "--name", "alone", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    started = json.loads((tmp_path / "runs/a/history.jsonl").read_text().splitlines()[0])
    assert started["world_size"] == 2
    assert losses(tmp_path / "runs/a") == pytest.approx(losses(tmp_path / "runs/alone"), rel=1e-4)
