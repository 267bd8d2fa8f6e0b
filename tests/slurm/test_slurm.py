"""Batch scripts and options of Slurm jobs, without a Slurm."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from waiting import until
from worldsize import cli
from worldsize.errors import UserError
from worldsize.jobs.spec import Resources
from worldsize.launch import entry_point
from worldsize.slurm import api, script, states
from worldsize.slurm.spec import SlurmSpec, problems, seconds

PLAIN = SlurmSpec(
    name="r50",
    recipe="epochs: 1\n",
    nodes=2,
    procs=8,
    resources=Resources(gpus=8, cpu="96", memory="700Gi"),
    out=Path("/shared/runs"),
    python="/shared/venv/bin/python",
    partition="gpu",
    time="1-12:00:00",
)
specs = st.builds(
    SlurmSpec,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    recipe=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=40).map(lambda text: text + "\n"),
    nodes=st.integers(1, 20),
    procs=st.integers(1, 8),
    out=st.sampled_from([Path("runs"), Path("/shared/my runs"), Path("it's $HOME")]),
    python=st.sampled_from(["/usr/bin/python3", "/my venv/bin/python"]),
    env=st.lists(
        st.tuples(st.from_regex(r"[A-Z]{1,5}", fullmatch=True), st.text("ab =$()'\"`", max_size=8)), max_size=3
    ).map(tuple),
    needs_mpi=st.booleans(),
    chain=st.booleans(),
    seeds=st.sampled_from([(), (0, 1)]),
    container=st.sampled_from([None, "my image.sqsh"]),
    container_runtime=st.sampled_from(["pyxis", "apptainer"]),
)


def rendered(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["render", "digits", "--on", "slurm", *arguments]) == 0
    return capsys.readouterr().out


@given(specs)
def test_every_script_is_valid_bash_and_the_same_each_time(spec):
    text = script.render(spec)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr
    assert script.render(replace(spec)) == text


@given(specs)
def test_the_processes_get_exactly_the_words_and_variables_of_the_spec(tmp_path_factory, spec):
    """Runs the script with a stand-in for srun and mpirun that records what it was given."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "bin").mkdir()
    for name in ("srun", "mpirun"):
        (folder / "bin" / name).write_text('#!/bin/bash\nprintf "%s\\0" "$@" > words\nenv -0 > variables\n')
        (folder / "bin" / name).chmod(0o755)
    out = folder / spec.out.name
    spec = replace(spec, out=out)
    variables = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    variables |= {"SLURMD_NODENAME": "n1"}
    variables |= {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"} if spec.seeds else {}
    done = subprocess.run(
        ["bash"],
        input=script.render(spec),
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    words = (folder / "words").read_text().split("\0")[:-1]
    job = spec.folder / "1" if spec.seeds else spec.folder
    name = f"{spec.name}-seed1" if spec.seeds else spec.name
    train = [*entry_point.command(spec.python), "train", str(job / "recipe.yaml"), "--out", str(out), "--name", name]
    train += ["--autoresume", "--retries", "3", *(["--seed", "1"] if spec.seeds else [])]
    assert words[-len(train) :] == train
    assert (job / "recipe.yaml").read_text() == spec.recipe
    assert (job / "exit").read_text() == "0\n"
    got = dict(entry.split("=", 1) for entry in (folder / "variables").read_text().split("\0")[:-1])
    assert dict(spec.env).items() <= got.items()
    if spec.needs_mpi and spec.nodes > 1:
        # Only the ranks get it: sbatch would hand the shell's variables to the next job, on other nodes.
        assert words[words.index("-x") + 1] == "MASTER_ADDR=n1" and "MASTER_ADDR" not in got
    if spec.container and not spec.needs_mpi:
        expected = {"pyxis": [f"--container-mounts={folder}:{folder},{out}:{out}"], "apptainer": [str(folder), str(out)]}
        assert set(expected[spec.container_runtime]) <= set(words)


def test_the_script_asks_slurm_for_what_the_options_say(capsys):
    text = rendered(
        *("--nodes", "2", "--procs", "4", "--cpu", "64", "--memory", "200Gi", "--gpu-type", "a100", "--time", "4:00:00"),
        *("--partition", "gpu", "--account", "lab", "--qos", "high", "--constraint", "ib", "--sbatch=--exclude=n7"),
        *("--setup", "module load cuda", "--env", "NCCL_DEBUG=INFO", "--grace", "300", "--name", "r50"),
        *("--micro-batch", "8"),
        capsys=capsys,
    )
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        *("--job-name=r50", "--comment=worldsize", '--output="runs/.jobs/r50/log.txt"', "--open-mode=append", "--requeue"),
        *("--signal=TERM@300", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=16", "--mem=204800M"),
        *("--gpus-per-node=a100:4", "--time=4:00:00", "--partition=gpu", "--account=lab", "--qos=high"),
        '--constraint="ib"',
        "--exclude=n7",
    ]
    assert "\nmodule load cuda\n" in text and "\nexport NCCL_DEBUG=INFO\n" in text
    assert "srun --label --kill-on-bad-exit=0 --wait=0 --cpus-per-task=16 " in text
    recipe = text.partition("<<'END_OF_RECIPE'\n")[2].partition("END_OF_RECIPE")[0]
    assert yaml.safe_load(recipe)["model"]["name"] == "resnet50"


def test_the_name_is_a_function_of_recipe_and_shape(capsys):
    def name(*arguments: str) -> str:
        return rendered(*arguments, capsys=capsys).partition("--job-name=")[2].partition("\n")[0]

    assert name() == name("--time", "10", "--partition", "other") == name("--cpu", "4")
    assert len({name(), name("--procs", "2"), name("--nodes", "2"), name("--epochs", "13")}) == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:02:03", 3723), ("2-0", 172800), ("1-12:30", 131400), ("0-0:0:9", 9)],
)
def test_time_limits_in_slurms_notation(text, expected):
    """The forms that sbatch's manual lists under --time."""
    assert seconds(text) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "my run"}, "--name 'my run'"),
        ({"resources": Resources(gpus=4)}, "--gpus 4 and --procs 8 must be equal"),
        ({"resources": Resources(cpu="12")}, "--cpu 12: pass a number of cores per node that --procs 8 divides"),
        ({"resources": Resources(memory="lots")}, "--memory 'lots'"),
        ({"time": "3"}, "--time 3 leaves no time to train"),
        ({"seeds": (1, 1)}, "--array-seeds 1,1"),
        ({"env": (("A B", "c"),)}, "--env A B"),
        ({"setup": ("a\nb",)}, "one line only"),
        ({"partition": "gpu\ncpu"}, "one line only"),
        ({"container": "image\n"}, "one line only"),
        ({"out": Path('a"b')}, "without quotes"),
        ({"out": Path("r\udcff")}, "'r\\udcff' is not UTF-8"),
        ({"env": (("A", "\udcff"),)}, "is not UTF-8"),
        ({"setup": ("cd \udcff",)}, "is not UTF-8"),
        ({"python": "/\udcff/python"}, "is not UTF-8"),
        ({"constraint": 'a"b'}, "without quotes"),
        ({"nodes": 0}, "--nodes 0 must be at least 1"),
        ({"needs_mpi": True, "container": "image"}, "--container is not supported"),
    ],
)
def test_bad_options_are_named(change, message):
    assert [message in problem for problem in problems(replace(PLAIN, **change))] == [True]
    assert list(problems(PLAIN)) == []


def test_times_that_are_not_slurms_and_unknown_targets_are_refused(fails):
    with pytest.raises(UserError, match="--time 'soon': expected minutes"):
        seconds("soon")
    assert all(seconds(text) == math.inf for text in ("0", "UNLIMITED", "infinite"))
    assert "--on slrum: expected one of" in fails("render", "digits", "--on", "slrum")
    for seeds in ("1,b", "²"):
        assert f"--array-seeds {seeds}" in fails("render", "digits", "--on", "slurm", "--array-seeds", seeds)
    assert "--container is empty; is the shell variable set?" in fails(
        "render", "digits", "--on", "slurm", "--container", ""
    )


def test_an_entry_of_waiting_tasks_stands_for_each(tmp_path):
    one = api.SlurmJob("12_[3-5,8,10-30:10%2]", "PENDING", "Resources", "", 0, 0)
    assert [task.array_task for task in states._tasks(one)] == ["3", "4", "5", "8", "10", "20", "30"]
    assert [task.job_id for task in states._tasks(replace(one, job_id="12_7"))] == ["12_7"]


def test_all_waiting_tasks_of_an_array_are_asked_for(stand_in):
    """Not only the first 64 characters of their list, squeue's default."""
    stand_in("squeue", 'echo "12_[0-$SLURM_BITSTR_LEN]|PENDING|None||0|0|"')
    assert [one.job_id for one in api.jobs(["12"])] == ["12_[0-0]"]


@pytest.mark.parametrize("code", [75, 1])
def test_a_job_of_mpirun_that_is_preempted_is_requeued(stand_in, tmp_path, code):
    """mpirun, for which a program stands in here, ends with 75 of a rank that has saved, or with 1 if one was killed."""
    stand_in("mpirun", f"trap 'exit {code}' USR1; echo >> starts; for _ in {{1..1200}}; do sleep 0.1; done")
    stand_in("scontrol", 'echo "$@" >> asked; echo "Job is pending execution"; exit 1')
    stand_in("squeue", "")
    (tmp_path / "job.sh").write_text(script.render(replace(PLAIN, needs_mpi=True, out=Path("runs"))))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=os.environ | variables)

    def ended() -> bool:
        job.send_signal(signal.SIGUSR1)  # again, should bash not know yet what it has started
        return job.poll() is not None

    until(lambda: (tmp_path / "starts").exists(), "mpirun has started", running=job)
    until(ended, "the job has ended", every=0.5)
    assert job.returncode == 75
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    assert (tmp_path / "starts").read_text() == "\n"


def test_without_slurm_the_message_says_where_to_go(fails, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "Slurm's sinfo is not on this machine: run this on a login node" in fails("train", "digits", "--on", "slurm")


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("gpu:2", 2), ("gpu:a100:8(S:0-1)", 8), ("gpu:a100:4,gpu:h100:2,nvme:1", 6), ("(null)", 0), ("gpu", 0)],
)
def test_gpus_of_a_node(text, gpus):
    """Generic resources in the notation of sinfo's manual."""
    assert api._gpus(text) == gpus
