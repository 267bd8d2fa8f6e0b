"""Rank and world size from the variables that launchers set, and each process's share of the cores."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from folders import folder_recipe, images
from processes import environment, free_port, losses, reserve, start, worldsize
from worldsize.distributed import rank as places
from worldsize.distributed.rank import RankInfo, discover_rank_info, first_host, threads_per_process
from worldsize.errors import UserError

TORCHRUN = {
    **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    **{"MASTER_ADDR": "node0", "MASTER_PORT": "29400"},
}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
SLURM = {
    **{"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def test_no_launcher_is_one_process_without_a_group():
    assert discover_rank_info({}) == RankInfo("none", 0, 1, 0, 1, None)


def test_torchrun():
    assert discover_rank_info(TORCHRUN) == RankInfo("torchrun", 5, 8, 1, 4, ("node0", 29400))


@pytest.mark.parametrize("job", [{"PMIX_NAMESPACE": "prterun-a@1"}, {"OMPI_MCA_ess_base_jobid": "4711"}])
def test_open_mpi_4_and_5_on_one_machine_need_no_address(job):
    rank_info = discover_rank_info(OPEN_MPI | job)
    assert (rank_info.launcher, rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        "Open MPI",
        1,
        2,
        1,
        2,
    )
    assert rank_info.master is not None
    assert rank_info.master[0] == "127.0.0.1"
    assert 20000 <= rank_info.master[1] < 32000
    assert discover_rank_info(OPEN_MPI | {"PMIX_NAMESPACE": "another"}).master != rank_info.master


def test_open_mpi_on_several_machines_requires_the_address():
    two_machines = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(UserError, match="mpirun -x MASTER_ADDR=HOST"):
        discover_rank_info(two_machines)
    assert discover_rank_info(two_machines | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}).master == ("head", 1234)


# As mpiexec of MPICH 5.0 and Intel MPI 2021.18 set them.
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
OTHER_MPIS = {
    "MPICH": MPICH | {"MASTER_PORT": "29400"},
    "Intel MPI": MPICH | {"I_MPI_HYDRA_UUID": "164c0000-ae02-f315-1261-06005e44e447"},
    "MVAPICH": MPICH
    | {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MASTER_PORT": "29400"}
    | {"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
    "PALS": {"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_APID": "f00d", "PMI_RANK": "1", "PMI_SIZE": "2"}
    | {"PMI_LOCAL_SIZE": "2"},
}


@pytest.mark.parametrize("launcher", OTHER_MPIS)
def test_other_mpis(launcher):
    # Their daemons may have been started by srun, whose variables the processes inherit.
    rank_info = discover_rank_info(SLURM | OTHER_MPIS[launcher])
    assert (rank_info.launcher, rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        launcher,
        1,
        2,
        1,
        2,
    )
    assert rank_info.master is not None and rank_info.master[0] == "127.0.0.1"
    if launcher == "Intel MPI":
        assert discover_rank_info(OTHER_MPIS[launcher] | {"I_MPI_HYDRA_UUID": "another"}).master != rank_info.master


def test_other_mpis_ask_for_what_they_do_not_say():
    with pytest.raises(UserError, match="mpirun -genv MASTER_PORT PORT"):
        discover_rank_info(MPICH)
    with pytest.raises(UserError, match="mpirun -genv MASTER_ADDR HOST"):
        discover_rank_info(MPICH | {"PMI_SIZE": "4"})
    one = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert discover_rank_info(one | {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}) == RankInfo("MPICH", 0, 1, 0, 1, None)
    assert discover_rank_info(one) == discover_rank_info({}) == discover_rank_info({"PMIX_RANK": "0"})


@pytest.mark.parametrize(
    "env", [{"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMIX_RANK": "1"}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}]
)
def test_unknown_launchers_of_several_processes_are_refused(env):
    with pytest.raises(UserError, match=r"this process is one of several.*use torchrun, srun, or mpirun of"):
        discover_rank_info(env)


def test_srun_with_pmi2_is_slurm():
    assert discover_rank_info(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}).launcher == "Slurm"


def test_a_pod_without_local_variables_has_one_process():
    """As Kubeflow's operators set them; each pod has one GPU, with number 0."""
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert discover_rank_info(env) == RankInfo("torchrun", 3, 4, 0, 1, ("a", 1))
    with pytest.raises(UserError, match="the launcher did not set LOCAL_RANK"):
        discover_rank_info(env | {"LOCAL_WORLD_SIZE": "2"})


@pytest.mark.parametrize(("launcher", "rank", "size", "local"), [(SLURM, 5, 8, (1, 4)), (OPEN_MPI, 1, 2, (1, 2))])
def test_scripts_that_set_rank_and_world_size_alone_keep_the_launchers_local_rank(launcher, rank, size, local):
    """As in many batch scripts: RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python -m worldsize train ..."""
    env = launcher | {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    found = discover_rank_info(env)
    assert (found.rank, found.size, found.local_rank, found.local_size, found.master) == (rank, size, *local, ("a", 1))
    assert discover_rank_info(env | {"RANK": "0", "WORLD_SIZE": "9"}).local_size == 1  # of another world


def test_horovodrun():
    job = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "2"}
    rank_info = discover_rank_info(job | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "41282"})
    assert (rank_info.launcher, rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        "horovodrun",
        1,
        2,
        1,
        2,
    )
    assert rank_info.master is not None
    assert rank_info.master[0] == "127.0.0.1"
    assert discover_rank_info(job | {"HOROVOD_GLOO_RENDEZVOUS_PORT": "41283"}).master != rank_info.master
    with pytest.raises(UserError, match="MASTER_ADDR"):
        discover_rank_info(job | {"HOROVOD_SIZE": "4"})


def test_slurm_step():
    rank_info = discover_rank_info(SLURM)
    assert (rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (5, 8, 1, 4)
    assert rank_info.master is not None
    assert rank_info.master[0] == "gpu03"


def test_a_batch_script_is_not_a_step():
    """Slurm also sets a rank and a number of tasks in the batch script itself, where no other process runs."""
    assert discover_rank_info({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}).size == 1


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[03-05,9]", "gpu03"),
        ("gpu[9]", "gpu9"),
        ("x1,gpu[03-05]", "x1"),
        ("n[1-2]-ib,m", "n1-ib"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "rank 8 of 8"),
        ({"WORLD_SIZE": "many"}, "not a number"),
        ({"LOCAL_WORLD_SIZE": "9"}, "inconsistent"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(UserError, match=message):
        discover_rank_info(TORCHRUN | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"WORLDSIZE_NODES": "1"},
            "asked for 1 nodes with 4 processes each, but torchrun started 8, 4 of them on this node",
        ),
        (
            {"WORLDSIZE_PROCS": "2"},
            "asked for 2 nodes with 2 processes each, but torchrun started 8, 4 of them on this node",
        ),
        # The same total, but on fewer nodes.
        ({"WORLDSIZE_NODES": "4", "WORLDSIZE_PROCS": "2"}, "asked for 4 nodes with 2 processes each"),
        ({"WORLDSIZE_NODES": "two"}, "WORLDSIZE_NODES is 'two', not a number"),
    ],
)
def test_a_world_that_is_not_what_the_job_asked_for_is_refused(change, message):
    asked = TORCHRUN | {"WORLDSIZE_NODES": "2", "WORLDSIZE_PROCS": "4"}
    assert discover_rank_info(asked) == discover_rank_info(TORCHRUN)
    with pytest.raises(UserError, match=message):
        discover_rank_info(asked | change)


def test_mpirun_that_does_not_find_its_hosts_is_refused():
    """mpirun then starts one process, or all of them, in the launcher's pod."""
    asked = {"WORLDSIZE_NODES": "2", "WORLDSIZE_PROCS": "2"}
    for found in (OPEN_MPI, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {}):
        with pytest.raises(UserError, match="check the launcher's host list"):
            discover_rank_info(found | asked)


def test_threads_are_a_fair_share_unless_the_user_sets_them(monkeypatch):
    monkeypatch.setattr(places, "cores", lambda: 16)
    rank_info = discover_rank_info(TORCHRUN)
    assert threads_per_process(rank_info, {}) == 4
    assert threads_per_process(rank_info, {"OMP_NUM_THREADS": "3"}) == 3
    assert threads_per_process(rank_info, {"OMP_NUM_THREADS": "1"}) == 1
    assert threads_per_process(rank_info, {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) == 4
    own = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", places.LOCAL_LAUNCH: "4"}
    assert threads_per_process(rank_info, own) == 1
    pbs = {"PBS_JOBID": "1.s", "NCPUS": "16"}
    assert [threads_per_process(rank_info, pbs | {"OMP_NUM_THREADS": n}) for n in ("16", "3")] == [4, 3]
    assert threads_per_process(RankInfo("none", 0, 1, 0, 1), {}) == 16


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"cpu/cpu.cfs_quota_us": "60000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({}, 16),
        # Of systemd and Slurm: the limit may be that of a cgroup around this process's.
        ({"membership": "0::/job/step\n", "job/cpu.max": "300000 100000\n", "job/step/cpu.max": "max 100000\n"}, 3),
        ({"membership": "0::/job/step\n", "job/cpu.max": "300000 100000\n", "job/step/cpu.max": "200000 100000\n"}, 2),
        ({"membership": "0::/job\n", "other/cpu.max": "100000 100000\n"}, 16),
        (
            {
                "membership": "2:cpu,cpuacct:/job\n",
                "cpu,cpuacct/job/cpu.cfs_quota_us": "500000\n",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ({"membership": "0::/../../job\n", "job/cpu.max": "100000 100000\n"}, 16),  # as seen from another container
    ],
)
def test_the_cgroups_quota_limits_the_cores(monkeypatch, tmp_path, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    assert places.cores(root, root / "membership") == expected


def test_procs_that_contradict_the_launcher_are_refused(tmp_path):
    env = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    done = worldsize("train", "digits", "--procs", "2", "--global-batch", "256", cwd=tmp_path, **env)
    assert done.returncode == 64
    assert "torchrun started 4 processes on this machine" in done.stderr


def job_with_a_port(variable: str, form: str) -> dict[str, str]:
    """The variable with the id of a job, of which follows a port that is free and now reserved."""
    two = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    two |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    jobs = ({variable: form.format(number)} for number in itertools.count(os.getpid()))
    return next(job for job in jobs if reserve(discover_rank_info(two | job).master[1]))


@pytest.mark.slow
@pytest.mark.parametrize("version", [4, 5])
def test_processes_started_as_mpirun_would_train_together(tmp_path, version):
    names = {4: ("OMPI_MCA_ess_base_jobid", "{}"), 5: ("PMIX_NAMESPACE", "prterun-{}@1")}
    job = job_with_a_port(*names[version])
    quick = ("--model.name", "shufflenet_v2_x0_5", "--max-steps", "2", "--name", "a")
    together = [
        start(
            "train",
            "digits",
            *quick,
            cwd=tmp_path,
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE="2",
            **job,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0], outputs
    assert "2 processes" in outputs[0]
    assert outputs[1] == ""
    assert len(losses(tmp_path / "runs" / "a")) == 2


def trains_two_steps_together(launcher: list[str], cwd: Path) -> None:
    """Run a short training with a real launcher; its two processes must connect to each other."""
    train = ("train", "digits", "--model.name", "shufflenet_v2_x0_5", "--max-steps", "2", "--name", "a")
    done = subprocess.run(
        [*launcher, "-m", "worldsize", *train],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert len(losses(cwd / "runs" / "a")) == 2


def test_torchrun_itself(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    trains_two_steps_together(torchrun, tmp_path)


@pytest.mark.slow
def test_mpirun_itself(tmp_path):
    if shutil.which("mpirun") is None:
        pytest.skip("needs mpirun (Debian: openmpi-bin)")
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
    trains_two_steps_together(mpirun, tmp_path)


def test_mpiexec_of_mpich_itself(tmp_path):
    if shutil.which("mpiexec.hydra") is None or shutil.which("mpichversion") is None:
        pytest.skip("needs MPICH (pip install mpich)")
    mpiexec = ["mpiexec.hydra", "-genv", "MASTER_PORT", str(free_port()), "-n", "2", sys.executable]
    trains_two_steps_together(mpiexec, tmp_path)


def test_evaluation_counts_every_sample_once_at_any_world_size(ranks):
    """101 images on 1, 2 and 3 processes, with a batch size that divides none of the shards."""
    root = images(ranks.cwd / "images", {"cat": 12, "dog": 12, "emu": 12}, {"cat": 50, "dog": 31, "emu": 20})
    recipe = folder_recipe(ranks.cwd, root)
    ranks(1).run("train", recipe, "--name", "a", "--precision", "fp64")
    own = json.loads((ranks.cwd / "runs" / "a" / "result.json").read_text())
    results = set()
    for size in (1, 2, 3):
        output = ranks(size).run("eval", "runs/a", "--micro-batch", "7", "--global-batch", "7")
        results |= {line for line in output.splitlines() if line.startswith("top-1 ")}
    [result] = results
    assert f"top-1 {own['top1']:.2%}" in result
    assert result.endswith("on 101 images")


@pytest.mark.slow
def test_eval_starts_processes(tmp_path):
    root = images(tmp_path / "images", {"cat": 12, "dog": 12}, {"cat": 5, "dog": 6})
    assert worldsize("train", folder_recipe(tmp_path, root), "--name", "a", cwd=tmp_path).returncode == 0
    done = worldsize("eval", "runs/a", "--procs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 11 images" in done.stdout
