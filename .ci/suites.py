"""The two test suites: `.ci/run` is the gate, for every commit; `.ci/full` is everything, each night and before a release.

    .ci/run
    .ci/full [gate|slow|horovod|slurm|hosts|relay|cluster]...

This file says what runs; runner.py runs it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from runner import PYTHON, Runner, Step, Tests, log_of

BEDS = Path("../shared")  # a Slurm, hosts and a cluster that can be started next to this checkout
PASSED = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "worldsize-ci/passed"

PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
NO_BED = "not slurm and not hosts and not cluster"
QUICK, SLOW = f"not slow and {NO_BED}", f"slow and {NO_BED}"
# With more threads than cores, waiting OpenMP threads must sleep, not spin: torch is then three times as fast.
PASSIVE = {"OMP_WAIT_POLICY": "passive"}
HOROVOD_TESTS = "tests/parallel/test_horovod.py"  # a step of its own, after Horovod is built
DECODER_TESTS = [f"tests/data/{room}" for room in ("images", "loading", "shards", "datasets")]
# Launchers, servers and a browser that tests start. Where they are missing, those tests are skipped and say why.
DEBIAN = "openmpi-bin openssh-server buildah docker-registry libjpeg-dev chromium"
INSTALL = f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {DEBIAN} >/dev/null"

PACKAGES = Step("packages", ["bash", "-c", INSTALL], tries=3)
ENVIRONMENT = Step("environment", ["make", ".venv/ready"], tries=3)
HOROVOD = Step("build Horovod", ["make", "horovod"], tries=3)  # cached by version
# What is quick and fails often comes first.
GATE = (
    PACKAGES,
    ENVIRONMENT,
    # mypy uses one core. Importing all tests uses the other, and compiles files that each worker would compile for itself.
    Step("checks", ["make", "-j2", "--output-sync", "check", "collect"]),
    Tests("tests", [*PARALLEL, "-m", QUICK, f"--ignore={HOROVOD_TESTS}"], limit=2700, env=PASSIVE),
    Step("native decoder", ["make", "native"], env={"FUZZ_SECONDS": "10"}),
    Tests("no native decoder", [*PARALLEL, "-m", QUICK, *DECODER_TESTS], env=PASSIVE | {"WORLDSIZE_DECODER": "pillow"}),
    Step("demo", ["bash", "-c", f"make demo && {PYTHON} .ci/demo_accuracy.py 0.97"]),
    HOROVOD,
    Tests("Horovod", ["-m", QUICK, HOROVOD_TESTS], env=PASSIVE),
)


def gate(runner: Runner) -> None:
    """Every step until one fails: later ones would only delay the answer."""
    can_install = shutil.which("apt-get") and os.geteuid() == 0
    not_run = ""
    for step in GATE:
        if step is PACKAGES and not can_install:
            runner.run(step, "needs apt-get and root")
        elif runner.run(step, not_run).failed:
            not_run = f"{step.name} failed"


def slow(runner: Runner) -> None:
    runner.run(Tests("slow", [*PARALLEL, "-m", SLOW, f"--ignore={HOROVOD_TESTS}"], limit=7200, env=PASSIVE))


def horovod(runner: Runner) -> None:
    build = runner.run(HOROVOD)
    not_run = "it was not built" if build.failed else ""
    runner.run(Tests("slow Horovod", ["-m", "slow", HOROVOD_TESTS], limit=3600, env=PASSIVE), not_run)


def slurm(runner: Runner) -> None:
    on_beds(runner, ["slurm"], Tests("Slurm", ["-m", "slurm and not hosts"], limit=3600))


def hosts(runner: Runner) -> None:
    on_beds(runner, ["hosts"], Tests("hosts", ["-m", "hosts and not slurm"], limit=3600))


def relay(runner: Runner) -> None:
    on_beds(runner, ["slurm", "hosts"], Tests("Slurm and hosts", ["-m", "slurm and hosts"], limit=3600))


def cluster(runner: Runner) -> None:
    """The first start takes 20 minutes and the container image 10; later starts use a cache."""
    image = "worldsize:ci"
    arguments = ["--target", "mpi", "--build-arg", "BASE=localhost:5000/base:debian12"]
    build = Step("container image", [f"{BEDS}/cluster/build-image", ".", image, *arguments], limit=3600)
    tests = Tests("cluster", ["-m", "cluster"], limit=7200, env={"WORLDSIZE_TEST_IMAGE": f"localhost:5000/{image}"})
    on_beds(runner, ["cluster"], build, tests)


def on_beds(runner: Runner, beds: Sequence[str], *steps: Step) -> None:
    """Start these test beds, run the steps with the variables that the beds print, and end the beds."""
    missing = [f"{BEDS}/{bed} does not exist" for bed in beds if not (BEDS / bed / "up").exists()]
    not_run = missing[0] if missing else ""
    variables: dict[str, str] = {}
    with runner.processes_kept():
        for bed in beds:
            up = Step(f"start {bed}", [f"{BEDS}/{bed}/up"], limit=3600)
            not_run = not_run or (f"{bed} did not start" if runner.run(up, not_run).failed else "")
            variables |= exported(log_of(up.name))
        for step in steps:
            step.env = step.env | variables
            not_run = not_run or (f"{step.name} failed" if runner.run(step, not_run).failed else "")
        for bed in beds if not missing else []:
            runner.run(Step(f"end {bed}", [f"{BEDS}/{bed}/down"]))


def exported(log: Path) -> dict[str, str]:
    """The variables of the lines ``export NAME=VALUE`` of a log, expanded as a shell would."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("export ")] if log.exists() else []
    names = [line.split()[1].partition("=")[0] for line in lines]
    script = "\n".join([*lines, *(f'printf "%s\\0" "${name}"' for name in names)])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split("\0"), strict=False))


PARTS: dict[str, Callable[[Runner], None]] = {
    "gate": gate,
    "slow": slow,
    "horovod": horovod,
    "slurm": slurm,
    "hosts": hosts,
    "relay": relay,
    "cluster": cluster,
}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False).stdout.strip()


def record_passed() -> str:
    """Append the id of this commit to `PASSED`, unless the tree differs from it."""
    if git("status", "--porcelain"):
        return "not recorded, because there are uncommitted changes"
    PASSED.parent.mkdir(parents=True, exist_ok=True)
    with open(PASSED, "a") as file:
        file.write(git("rev-parse", "HEAD") + "\n")
    return f"recorded in {PASSED}"


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=".ci/suites.py", description=__doc__, formatter_class=formatter)
    parser.add_argument("suite", choices=["gate", "full"])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of the full suite: {', '.join(PARTS)}; default: all")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner()
    try:
        parts = ["gate"] if options.suite == "gate" else options.parts or list(PARTS)
        if "gate" not in parts:
            runner.run(ENVIRONMENT)
        for part in parts:
            PARTS[part](runner)
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 130
    finally:
        runner.close()
        runner.print_table()
    if runner.failed:
        return 1
    if options.suite == "gate":
        print(f"The gate has passed; {record_passed()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
