"""benchmarks/gpu.py works the first time on a machine that has torch; a part that fails or hangs spoils nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bare import bare_python, wheels
from paths import ROOT
from processes import environment
from waiting import until

sys.path.append(str(ROOT / "benchmarks"))
import gpu
import gpu_parts

SCRIPT = ROOT / "benchmarks" / "gpu.py"
# What the usual image for GPUs lacks, and what importing worldsize needs.
FEW = ("pydantic", "tyro", "crc32c", "fsspec", "pyyaml", "safetensors", "rich")
ALL = (*FEW, "jinja2", "scikit-learn", "pytest", "pytest-timeout", "hypothesis")


def script(python: Path | str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it in a folder of no meaning, with the variables of a user who has set none."""
    command = [str(python), str(SCRIPT), *map(str, arguments)]
    variables = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    return subprocess.run(command, cwd="/", env=variables, capture_output=True, text=True, timeout=1500, check=False)


def table(out: Path) -> dict[str, str]:
    lines = [
        line.split("|")[1:-1] for line in (out / "README.md").read_text().split("##")[0].splitlines() if line[:2] == "| "
    ]
    return {name.strip(): result.strip() for name, result, _ in lines[2:]}


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


def test_missing_packages_are_named_with_a_remedy(bare, tmp_path):
    done = script(bare, "--tiny", "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "has no module" in done.stderr and "pass --wheels FOLDER" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_wheels_in_a_folder_are_enough_and_parts_can_run_one_by_one(bare, tmp_path):
    options = ("--tiny", "--out", tmp_path / "out", "--wheels", wheels(FEW, tmp_path / "wheels"), "--only")
    for part in ("host time", "DDP, one rank"):
        done = script(bare, *options, part)
        assert done.returncode == 0, done.stderr
    found = table(tmp_path / "out")
    assert list(found) == ["host time", "DDP, one rank"]
    assert found["host time"].endswith("outside of the network (target 0.3)")
    assert found["DDP, one rank"].endswith(" ms") and "one rank" in found["DDP, one rank"]
    done = script(bare, *options, "hosttime")
    assert done.returncode == 1 and "--only 'hosttime' is no part; there are: 'correctness', 'host time'," in done.stderr


@pytest.mark.slow
def test_the_script_runs_to_its_end_on_a_bare_machine(bare, tmp_path):
    out, carried = tmp_path / "out", wheels(ALL, tmp_path / "wheels")
    cifar10 = gpu.images(tmp_path / "cifar10", 80)
    done = script(bare, "--tiny", "--out", out, "--wheels", carried, "--cifar10", cifar10)
    assert done.returncode == 0, done.stderr
    found = table(out)
    every = [part for part in gpu_parts.parts(out, out, tiny=True, cifar10=cifar10) if not part.on_request]
    assert list(found) == [part.name for part in every]
    assert not [line for line in found.values() if line.startswith(("FAILED", "UNREADABLE", "not finished"))]
    assert torch.cuda.is_available() or "torch finds no GPU on this machine" in found["correctness"]
    assert "94 % was not reached" in found["CIFAR-10 to 94 %"] and "evaluation" in found["real and synthetic images"]
    assert "worldsize fp32" in found["step"] and "bare fp32" in found["step, compiled"]
    assert "images/s needs" in found["loader and device"] and "after a snapshot" in found["snapshots"]
    recipe = (out / "runs-1" / "real" / "recipe.yaml").read_text()
    assert "every_seconds: 1.0" in recipe  # metrics are not collected after each step, which would wait for the GPU
    # A second call has names of its own.
    again = script(bare, "--tiny", "--out", out, "--wheels", carried, "--only", "snapshots")
    assert again.returncode == 0 and not table(out)["snapshots"].startswith("FAILED"), again.stdout
    assert list(table(out)) == list(found)


def test_the_tables_of_a_part_stay_apart(tmp_path):
    (tmp_path / "step.log").write_text("preparing\n| a |\n| - |\n| 1 |\n\n| b |\n| - |\n| 2 |\n\nAll measurements: x\n")
    (tmp_path / "host-time.log").write_text("0.2 ms\n")
    gpu.write(tmp_path, "one GPU", {"step": ("fine", 3.0)})
    text = (tmp_path / "README.md").read_text()
    assert text.endswith("| step | fine | 3 |\n\n## step\n\n| a |\n| - |\n| 1 |\n\n| b |\n| - |\n| 2 |\n")


def test_the_limits_leave_nine_minutes_for_everything(tmp_path):
    every = gpu_parts.parts(tmp_path, tmp_path, tiny=False)
    assert sum(part.limit_s for part in every if not part.on_request) <= 515  # and half a minute for images


def test_the_forms_that_are_measured_exist():
    from worldsize.bench import step
    from worldsize.bench.options import BenchStep

    for names, formats in ((gpu_parts.FORMS, ("bf16", "fp16")), (gpu_parts.COMPILED + gpu_parts.COMPILED_SPLIT, ("bf16",))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
            found = step.chosen(BenchStep(precision=formats, only=names, compile=True), torch.device("cuda", 0))
        assert {form.name for form in found} == set(names)


PARTIAL = """preparing    bare bf16
round 1/2  bare bf16                       3,000.0 images/s
round 1/2  worldsize bf16                  2,700.0 images/s
round 2/2  worldsize bf16                  2,800.0 images/s
round 2/2  bare bf16 compiled              5,000.0 images/s
round 2/2  worldsize bf16 compiled         4,000.0 images/s
"""


def test_what_was_measured_before_the_time_was_up_is_kept(tmp_path):
    waits = f"cat <<'end'\n{PARTIAL}end\nsleep 600"
    part = gpu_parts.Part("step", ("bash", "-c", waits), 2, gpu_parts.speeds)
    line, _ = gpu.run(part, tmp_path, gpu.environment())
    assert line == (
        "not finished after 2 s, see step.log: bare bf16 3,000; worldsize bf16 2,750 (0.917 of bare); "
        "bare bf16 compiled 5,000; worldsize bf16 compiled 4,000 (0.800 of bare)"
    )


def test_a_command_that_is_ended_has_shown_all_that_it_printed(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    program = "import time; print('measured'); time.sleep(600)"
    part = gpu_parts.Part("late", (sys.executable, "-S", "-c", program), 5, gpu_parts.last_line)
    assert gpu.run(part, tmp_path, gpu.environment())[0] == "not finished after 5 s, see late.log: measured"


def test_tests_that_ran_before_the_time_was_up_are_counted():
    begun = (
        "tests/gpu/test_gpu.py::a PASSED [ 10%]\n[gw1] [ 20%] FAILED tests/gpu/test_gpu.py::b \ntests/gpu/test_gpu.py::c "
    )
    assert gpu_parts.outcomes(begun) == "1 passed, 1 failed"
    ended = "SKIPPED [2] tests/gpu/test_gpu.py:9: no GPU\n=== 1 passed, 2 skipped in 3.10s ==="
    assert gpu_parts.outcomes(ended) == "1 passed, 2 skipped in 3.10s; no GPU"


def test_a_part_that_takes_too_long_ends_with_all_its_processes(tmp_path):
    command = ("bash", "-c", "sleep 600 & echo $!; wait")
    line, _ = gpu.run(gpu_parts.Part("slow", command, 3, str.strip), tmp_path, dict(os.environ))
    assert line.startswith("not finished after 3 s")
    child = Path("/proc") / (tmp_path / "slow.log").read_text().strip()
    until(lambda: state_of(child) in ("", "Z"), "the child has ended")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_part_starts_ends_it(tmp_path, monkeypatch, number):
    """The signal of a user who gives up comes before the script knows the process."""
    started = []

    def interrupted(*arguments, **options):
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), number)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(gpu.subprocess, "Popen", interrupted)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as in main
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        gpu.run(gpu_parts.Part("slow", ("sleep", "600"), 3, str.strip), tmp_path, dict(os.environ))
    assert started[0].returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_why_a_test_failed_is_printed_although_the_run_is_cut_short(tmp_path):
    (tmp_path / "test_two.py").write_text(
        "import os\ndef test_one():\n    assert 2 + 2 == 5\ndef test_other():\n    os._exit(9)\n"
    )
    variables = environment(PYTHONPATH=str(ROOT / "tests" / "helpers"))
    command = [sys.executable, "-m", "pytest", "-p", "instant_failures", "-p", "no:cacheprovider", "test_two.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 9
    assert "test_two.py::test_one failed:" in done.stdout and "assert (2 + 2) == 5" in done.stdout


def state_of(process: Path) -> str:
    """Linux's letter for the state of a process given as a folder of /proc; nothing if it has gone."""
    try:
        return (process / "stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_part_that_fails_does_not_stop_the_others(tmp_path):
    parts = [
        gpu_parts.Part("a", ("bash", "-c", "echo so far; false"), 120, gpu_parts.last_line),
        gpu_parts.Part("b", ("echo", "fine"), 120, lambda output: {}[output]),
        gpu_parts.Part("c", ("echo", "fine"), 120, gpu_parts.last_line),
    ]
    assert [gpu.run(part, tmp_path, dict(os.environ))[0] for part in parts] == [
        "FAILED (1), see a.log: so far",
        "UNREADABLE (KeyError: 'fine\\n'), see b.log",
        "fine",
    ]


def test_the_median_step_after_a_snapshot_is_compared_with_the_others(tmp_path):
    run = tmp_path / "snapshots"
    run.mkdir()
    steps = [
        {"kind": "step", "step": s, "step_ms": 90.0 if s % 10 == 1 else 70.0 if s % 10 == 0 else 50.0} for s in range(1, 61)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    part = gpu_parts.snapshots(tmp_path, gpu_parts.FULL)
    assert part.reads("") == "a step 50.0 ms, the one after a snapshot 90.0 ms"
