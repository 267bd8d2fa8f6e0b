"""A process that is killed under `worldsize agent` is named: it has no log of its own end, and the others only lost it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from processes import environment, free_port, start, workers
from waiting import until
from worldsize.errors import NoProgress
from worldsize.launch.failed_workers import LAST_FAILURE
from worldsize.runs import run_folder

KILLED = "was killed by SIGKILL; a likely cause is the kernel's out-of-memory killer"
TRAIN = (
    *("train", "digits", "--data.name", "synthetic", "--data.samples", "480", "--data.classes", "10", "--epochs", "8"),
    *("--model.name", "shufflenet_v2_x0_5", "--global-batch", "48", "--micro-batch", "6", "--precision", "fp32"),
    *("--name", "a", "--autoresume", "--checkpoint.every-steps", "2"),
)


@pytest.mark.slow
def test_a_killed_process_of_an_agent_is_named_once_and_the_run_goes_on(tmp_path):
    place = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "WORLDSIZE_ADDRESS": "127.0.0.1"}
    place |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port()), "PYTHONUNBUFFERED": "1"}
    process = start("agent", "--id", "job", "--", *TRAIN, cwd=tmp_path, **place)
    try:
        checkpoints = tmp_path / "runs/a/checkpoints"
        until(lambda: any(checkpoints.glob("step-*4")), "a checkpoint is saved", running=process)
        ranks = [pid for pid in workers(process.pid) if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
        os.kill(ranks[0], signal.SIGKILL)
        output = process.communicate(timeout=240)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    assert [line for line in output.splitlines() if "killed by" in line] == [f"worldsize: rank 1 {KILLED}"], output
    assert re.search(r"^\[0\] .*resuming after step \d+", output, re.MULTILINE), output


def test_an_unknown_option_ends_the_agent_and_is_not_tried_again(tmp_path):
    place = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0", "WORLDSIZE_ADDRESS": "127.0.0.1"}
    place |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    process = start("agent", "--id", "job", "--", "train", "digits", "--optimizer.lrr", "1", cwd=tmp_path, **place)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 64 and output.count("Unrecognized options: --optimizer.lrr") == 1, output


# Two processes that take no time to start. `report` is called as worldsize's own processes do.
AGENT = """
import sys
from worldsize.launch import agent, local
local.entry_point.worker = lambda python: [python, "-c", sys.argv[1]]
node, nodes, procs, port = map(int, sys.argv[2:])
place = agent.Node("job", (nodes, nodes), procs, "127.0.0.1", port, node == 0, "127.0.0.1")
outcome = agent.run([], place)
print("ended", outcome.code, outcome.message)
"""
WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
starts = Path(f"starts-{{rank}}")  # torch counts only an agent's own failures
with starts.open("a") as file:
    file.write("1")
def report(code):
    content = {{"message": {{"message": "m", "extraInfo": {{"timestamp": str(int(time.time()))}}}}}}
    content["worldsize"] = {{"code": code, "time": time.time()}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content))
    os._exit(code)
if starts.stat().st_size <= {failing}:
    {body}
print("last:", os.environ["WORLDSIZE_LAST_FAILURE"], flush=True)
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def agents(body: str, nodes: int = 1, failing: int = 1) -> list[tuple[list[str], list[str]]]:
    """What the agents of ``nodes`` nodes with two processes in all print to stdout and stderr.

    The processes run ``body`` in their first ``failing`` starts.
    """
    port, procs = free_port(), 2 // nodes
    words = [sys.executable, "-c", AGENT, WORKER.format(body=body, failing=failing)]
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as cwd:
        places = [[*words, *map(str, (node, nodes, procs, port))] for node in range(nodes)]
        started = [subprocess.Popen(at, cwd=cwd, env=environment(), stdout=pipe, stderr=pipe, text=True) for at in places]
        try:
            ended = [process.communicate(timeout=120) for process in started]
        finally:
            for process in started:
                process.kill()
    return [(sorted(out.splitlines()), [x for x in err.splitlines() if x.startswith("worldsize:")]) for out, err in ended]


def test_the_killed_process_is_named_and_not_the_one_that_lost_it():
    for rank in (0, 1):
        failure = f"rank {rank} {KILLED}"
        ((out, err),) = agents(f"{KILL} if rank == {rank} else report(69)")
        assert err == [f"worldsize: {failure}"]
        assert out == [f"[0] last: {failure}", f"[1] last: {failure}", "ended 0 "]


def test_it_is_named_once_per_restart():
    ((_, err),) = agents(f"{KILL} if rank == 1 else time.sleep(600)", failing=3)
    assert err == [f"worldsize: rank 1 {KILLED}"] * 3


@pytest.mark.parametrize("code", [69, 70, 72, 75])
def test_a_reported_error_and_what_the_agent_ends_because_of_it_are_not_named(code):
    ((out, err),) = agents(f"report({code}) if rank == 1 else time.sleep(600)")
    assert err == []
    assert out == ["[0] last: ", "[1] last: ", "ended 0 "]


def test_a_process_that_others_killed_after_a_report_of_the_cause_is_not_named():
    """As a watcher kills the process of which it has reported that it stands still."""
    ((_, err),) = agents(f"report(72) if rank == 1 else {KILL}")
    assert err == []


def test_a_process_that_ends_without_a_report_is_named():
    assert agents("os._exit(3) if rank == 1 else time.sleep(600)")[0][1] == ["worldsize: rank 1 exited with code 3"]


def test_a_process_that_dies_slowly_is_named_although_another_one_ended_first():
    """The kernel frees the memory of a process, and its sockets, before the process has ended."""
    slow = "(signal.signal(15, lambda *_: os.kill(os.getpid(), 9)), Path('slow').touch(), time.sleep(600))"
    lost = "([time.sleep(0.01) for _ in iter(Path('slow').exists, True)], report(69))"
    assert agents(f"{slow} if rank == 0 else {lost}")[0][1] == [f"worldsize: rank 0 {KILLED}"]


def test_the_agent_of_another_node_names_nothing():
    """Only the agent that started a process knows how it ended."""
    quiet, names = sorted(agents(f"{KILL} if rank == 1 else time.sleep(600)", nodes=2), key=lambda printed: printed[1])
    assert names[1] == [f"worldsize: rank 1 {KILLED}"]
    assert quiet[1] == []
    assert [line.partition("last: ")[2] for line in quiet[0]] == ["", ""]  # and of "ended"


def test_a_run_that_gets_no_further_says_how_its_last_process_ended(tmp_path, monkeypatch):
    folder = run_folder.RunFolder(tmp_path)
    run_folder.count_start(folder, 0, retries=0)
    monkeypatch.setenv(LAST_FAILURE, f"rank 1 {KILLED}")
    with pytest.raises(NoProgress, match=rf"with --retries 1\. The last time, rank 1 {KILLED}$"):
        run_folder.count_start(folder, 0, retries=0)
    monkeypatch.setenv(LAST_FAILURE, "")
    with pytest.raises(NoProgress, match=r"with --retries 1$"):
        run_folder.count_start(folder, 0, retries=0)
