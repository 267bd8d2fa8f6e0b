"""Faults in real runs of two processes; see fault_runs.py. docs/reliability.md lists them with what was measured."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fault_runs import PROCS, SAVING, SETTINGS, Fault, Scene, check, of_files, record
from paths import SHARED
from processes import free_port, newest, worldsize
from trees import image_bytes
from waiting import all_end

HOSTS = SHARED / "hosts"
ON_HOSTS = (
    pytest.mark.hosts,
    pytest.mark.skipif(
        "WORLDSIZE_HOSTS" not in os.environ, reason="no hosts: WORLDSIZE_HOSTS is not set (see CONTRIBUTING)"
    ),
)
QUICK = ("--parallel.stall-s", "2")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOUR = 3600
HOST = "rank0.test"
IMAGE = Path("images/train/cat/3.png")


def stop(scene: Scene) -> None:
    scene.process.send_signal(signal.SIGTERM)


def storm(scene: Scene) -> None:
    dice, ranks = random.Random(0), scene.ranks
    for _ in range(100):
        with suppress(ProcessLookupError):
            os.kill(dice.choice([scene.process.pid, *ranks]), dice.choice(STOP_SIGNALS))
    all_end(ranks)


def in_a_terminal(scene: Scene) -> None:
    scene.kept, inside = os.openpty()
    scene.train(
        stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)


def lose_the_terminal(scene: Scene) -> None:
    with open(scene.log, "ab") as log:
        log.write(os.read(scene.kept, 65536))
    os.close(scene.kept)


def lose_the_reader(scene: Scene) -> None:
    scene.process.stdout.close()


def kill_the_shell(scene: Scene) -> int:
    [launcher] = scene.ranks  # the children of the shell
    scene.process.kill()
    scene.until(lambda: not Path(f"/proc/{launcher}").exists(), "the run ends", running=False)
    return 0 if (scene.run / "result.json").exists() else 1


def kill_the_launcher(scene: Scene) -> None:
    ranks = scene.ranks
    scene.process.kill()
    scene.process.wait()
    all_end(ranks)


def kill_a_rank(scene: Scene) -> None:
    os.kill(scene.ranks[1], signal.SIGKILL)


def damage_the_checkpoint(scene: Scene) -> None:
    with open(newest(scene.run) / "optimizer.safetensors", "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"\x55")


def freeze_a_rank(scene: Scene) -> None:
    os.kill(scene.ranks[1], signal.SIGSTOP)


def see_the_stacks(scene: Scene) -> None:
    assert "sabotage.py" in (scene.run / "stalls" / "rank-1.txt").read_text()


def start_again_while_stuck(scene: Scene) -> None:
    everyone = [scene.process.pid, *scene.ranks, *(pid for rank in scene.ranks for pid in children(rank))]
    for pid in everyone:
        os.kill(pid, signal.SIGSTOP)
    second = worldsize("train", "--resume", "runs/a", *PROCS, cwd=scene.cwd)
    with open(scene.log, "a") as log:
        log.write(second.stderr)
    scene.until_it_says()
    for pid in reversed(everyone):
        os.kill(pid, signal.SIGCONT)
    assert second.returncode == 64


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def on_a_port_that_is_taken(scene: Scene) -> None:
    scene.kept = socket.create_server(("127.0.0.1", 0))
    for rank in (0, 1):
        scene.rank(rank, scene.kept.getsockname()[1])


def end_as_a_launcher(scene: Scene) -> None:
    with scene.kept:
        scene.until(lambda: scene.processes[0].poll() is not None, "rank 0 ends", running=False)
    scene.process.kill()
    scene.processes.pop().wait()


def shim(scene: Scene) -> str:
    library = scene.cwd / "shim.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = Path(__file__).parent / "shim.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return str(library)


def with_an_unknown_host(scene: Scene) -> None:
    known = scene.cwd / "host-is-known"
    port = free_port()
    unknown = {"LD_PRELOAD": shim(scene), "FAULTS_HOST": HOST, "FAULTS_HOST_IS_KNOWN": str(known)}
    for rank in (0, 1):
        scene.rank(rank, port, HOST, **unknown)


def know_the_host(scene: Scene) -> None:
    scene.until_it_says()
    (scene.cwd / "host-is-known").touch()


def rank_0_alone(scene: Scene) -> None:
    scene.kept = free_port()
    scene.rank(0, scene.kept)


def come_late(scene: Scene) -> None:
    scene.until_it_says()
    scene.rank(1, scene.kept)


def in_little_shared_memory(scene: Scene) -> None:
    own = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    small = [*own, "sh", "-c", 'mount -t tmpfs -o size=64k small /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*small, "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made")
    scene.train(*small)


def with_another_clock(scene: Scene) -> None:
    (scene.cwd / "clock").write_bytes(struct.pack("=q", 0))
    scene.train(env={"LD_PRELOAD": shim(scene), "FAULTS_CLOCK": str(scene.cwd / "clock")})


def see_steps(scene: Scene, more: int) -> None:
    end = scene.steps() + more
    scene.until(lambda: scene.steps() >= end, f"{more} more steps are done")


def set_the_clock(scene: Scene) -> None:
    for seconds, more in ((HOUR, 5), (-HOUR, 5), (0, 1)):
        with open(scene.cwd / "clock", "r+b") as file:
            file.write(struct.pack("=q", seconds))
        see_steps(scene, more)
    assert "no progress" not in scene.printed()
    saved = [json.loads(line)["time"] for line in (scene.run / "history.jsonl").read_text().splitlines()]
    assert max(saved) > time.time() + HOUR / 2, "the run did not see the other clock"


def change_an_image(scene: Scene) -> None:
    (scene.cwd / IMAGE).write_bytes(image_bytes("gray"))


def delete_an_image(scene: Scene) -> None:
    scene.kept = (scene.cwd / IMAGE).read_bytes()
    (scene.cwd / IMAGE).unlink()


def put_the_image_back(scene: Scene) -> None:
    (scene.cwd / IMAGE).write_bytes(scene.kept)


def take_the_descriptors(scene: Scene) -> None:
    resource.prlimit(scene.ranks[1], resource.RLIMIT_NOFILE, (3, 3))


def on_two_hosts(scene: Scene) -> None:
    port = free_port()
    for rank, host in enumerate(("h1", "h2")):
        scene.rank(rank, port, "h1", str(HOSTS / "exec"), host, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")


def cut_the_network(scene: Scene) -> None:
    subprocess.run([HOSTS / "partition", "h2"], check=True, timeout=60)
    try:
        scene.end()
    finally:
        subprocess.run([HOSTS / "heal", "h2"], check=True, timeout=60)


def on_a_small_disk(scene: Scene) -> None:
    disk = scene.run.parent
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    scene.finally_do(lambda: subprocess.run(["umount", str(disk)], check=True))
    scene.train()


def fill_the_disk(scene: Scene) -> None:
    ballast = scene.run.parent / "ballast"
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    scene.until_it_says()
    ballast.unlink()


def nothing(scene: Scene) -> None:
    """The rule or the start has done it."""


def remember(scene: Scene) -> None:
    scene.train()
    scene.kept = (scene.cwd / IMAGE).read_bytes()


FAULTS = (
    Fault("stop", "SIGTERM, Ctrl-C", "the run saves after the step and ends", stop, (75,), "stopping after this step"),
    Fault(
        "signal_storm", "a hundred SIGTERM, SIGINT and SIGHUP, to all processes",
        "they count as one within two seconds; a later one ends the run at once", storm, (75, 129, 130, 143), lost=10,
    ),
    Fault(
        "lost_terminal", "the terminal is closed, or its connection lost", "the run saves after the step and ends",
        lose_the_terminal, (75,), start=in_a_terminal,
    ),
    Fault(
        "lost_reader", "the reader of the output is gone", "training continues", lose_the_reader, (0,),
        start=lambda scene: scene.train(stdout=subprocess.PIPE),
    ),
    Fault(
        "killed_shell", "the shell that started the run is killed", "training continues", kill_the_shell, (0,),
        start=lambda scene: scene.train("sh", "-c", '"$@"; exit', "sh"),
    ),
    Fault(
        "partition", "the network between two hosts drops everything", "each names the other, which is not heard of",
        # "never", if its watcher has not started yet
        cut_the_network, (72,), r"rank 1 (\(h2, process \d+\) has not|has never) been heard of.* the network between",
        step=30, lost=10, start=on_two_hosts, again=on_two_hosts, options=QUICK, marks=ON_HOSTS,
    ),
    Fault("killed_launcher", "`kill -9` of the launcher", "its processes save and end", kill_the_launcher, (137,)),
    Fault(
        "killed_rank", "`kill -9` of a process, out of memory", "all end; the killed rank and the signal are named",
        kill_a_rank, (137,), "rank 1 was killed by SIGKILL", lost=10,
    ),
    Fault(
        "damaged_checkpoint", "the same, and the newest checkpoint is damaged",
        "the checkpoint is skipped, with the name of its file", kill_a_rank, (137,), "rank 1 was killed by SIGKILL", lost=15,
        step=12, repair=damage_the_checkpoint,
    ),
    Fault(
        "stopped_rank", "a process is stopped", "it is named with its step; `--autoresume` starts again", freeze_a_rank,
        (72,),
        r"rank 1 \(\S+, process \d+\) has made no progress .* is stopped \(SIGSTOP or a debugger\)", lost=10, options=QUICK,
    ),
    Fault(
        "deadlock", "a process is in a deadlock", "it is named with its step; `--autoresume` starts again", nothing, (72,),
        "rank 1 .* has made no progress .* in step 6, updating the weights", lost=10, step=5, options=QUICK, rule="deadlock",
        repair=see_the_stacks,
    ),
    Fault(
        "dead_storage", "storage stops answering", "the file is named; later the run ends", nothing, (72,),
        r"rank 1 .* it has been reading \S+\.png for", lost=10, options=QUICK, files=True, rule="dead_storage",
    ),
    Fault(
        "flipped_bit", "a flipped bit in the weights of one process", "the tensor is named, nothing of it is saved", nothing,
        (73,), "the weights fc.weight differ between the ranks", lost=10, step=5, rule="flipped_bit",
    ),
    Fault(
        "nan", "one process computes NaN or infinity", "its rank and the step are named", nothing, (76,),
        "the loss is nan on rank 1, and finite on the others, at step 3", step=2, rule="nan_on_rank_1", resumes=False,
    ),
    Fault(
        "second_start", "a second start while the first is stuck", "the second is refused; the first continues",
        start_again_while_stuck, (0,), "is being trained by process",
    ),
    Fault(
        "taken_port", "the port that the user chose is taken", "the port and the remedy are named", end_as_a_launcher, (64,),
        r"port \d+ on 127.0.0.1 is in use, perhaps by another job: set MASTER_PORT to a free port",
        start=on_a_port_that_is_taken, step=0,
    ),
    Fault(
        "late_name", "the name of rank 0's host becomes known late", "it is named and waited for", know_the_host, (0,),
        f"waiting for {HOST}, the host of rank 0, to become known", start=with_an_unknown_host, step=0,
    ),
    Fault(
        "unknown_name", "the name of rank 0's host stays unknown", "it is named, with the remedy", nothing, (69,),
        f"{HOST}, the host of rank 0, is unknown after 5 s .* check MASTER_ADDR", start=with_an_unknown_host, step=0,
        options=("--parallel.timeout-s", "5"),
    ),
    Fault(
        "late_rank", "a process comes late", "it is named and waited for", come_late, (0,), "waiting for rank 1",
        start=rank_0_alone, step=0,
    ),
    Fault(
        "little_shared_memory", "`/dev/shm` has hardly any room", "training needs none", nothing, (0,),
        start=in_little_shared_memory,
    ),
    Fault(
        "clock", "the clock jumps an hour ahead, and two back", "training continues", set_the_clock, (0,),
        start=with_another_clock,
    ),
    Fault(
        "changed_image", "an image changes during the run", "it is named", change_an_image, (65,),
        r"train/cat/3\.png is not what this run first read there", lost=10, start=remember,
        repair=put_the_image_back, files=True,
    ),
    Fault(
        "deleted_image", "an image is deleted during the run", "it is named", delete_an_image, (65,),
        r"train/cat/3\.png was deleted since this run first read it", lost=10, repair=put_the_image_back, files=True,
    ),
    Fault(
        "full_disk", "the disk is full for a while", "training continues; a later checkpoint is on disk",
        fill_the_disk, (0,), r"the checkpoint of step \d+ could not be saved \(.*No space left", start=on_a_small_disk,
    ),
    Fault(
        "descriptors", "too few file descriptors", "the limit and the remedy are named", take_the_descriptors, (69,),
        r"raise the limit of open files \(ulimit -n\)", lost=10, files=True,
    ),
)  # fmt: skip


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory):
    """undisturbed(files) is the folder of the same run, without any fault."""
    runs: dict[bool, Path] = {}

    def run(files: bool) -> Path:
        if files not in runs:
            cwd = tmp_path_factory.mktemp("undisturbed")
            settings = of_files(cwd / "images") if files else SETTINGS
            done = worldsize("train", "digits", *settings, *PROCS, *SAVING, "--name", "a", cwd=cwd)
            assert done.returncode == 0, done.stderr
            runs[files] = cwd / "runs" / "a"
        return runs[files]

    return run


@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name, marks=fault.marks) for fault in FAULTS])
def test_fault(fault, tmp_path, undisturbed):
    record(fault, check(fault, tmp_path, undisturbed(fault.files)))
