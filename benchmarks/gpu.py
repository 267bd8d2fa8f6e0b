"""Everything that one GPU can tell about worldsize, in under nine minutes (with CIFAR-10, in under eleven):

    python benchmarks/gpu.py [--out FOLDER] [--only PART ...] [--wheels FOLDER] [--root IMAGES] [--cifar10 FOLDER]

Needs torch and torchvision; worldsize itself is this checkout. Wheels of what else is missing can be in a folder: where
there is a network, ``pip download --only-binary :all: --dest FOLDER pydantic tyro crc32c`` puts them there.

Correctness first, then speed. Each part is a process with a time limit of its own, and a part that fails does not stop the
others. FOLDER gets the output of each part and README.md with a table, also of parts that earlier calls ran. ``--tiny`` runs
the same commands with small sizes on any device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
from gpu_parts import WORLDSIZE, Part, parts
from PIL import Image

REPOSITORY = Path(__file__).resolve().parents[1]
_ENDING = (signal.SIGINT, signal.SIGTERM)


def unpack(wheels: Path, to: Path) -> Path:
    """Unpack the wheels for this Python."""
    for wheel in sorted(wheels.glob("*.whl")):
        tag, abi, _ = wheel.stem.split("-")[-3:]
        if "py3" in tag.split(".") or abi == "abi3" or tag == f"cp{sys.version_info.major}{sys.version_info.minor}":
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(to)
    return to


def environment(*packages: Path) -> dict[str, str]:
    """What the parts see: this checkout, the packages, and each line of output as soon as it is printed."""
    places = [REPOSITORY / "src", *packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONUNBUFFERED": "1"}


def images(folder: Path, count: int) -> Path:
    """A folder of JPEGs of ImageNet's usual size, with smooth noise, in 1,000 classes, with some to evaluate; few in ten."""
    classes, evaluated = (1000, 512) if count > 1000 else (10, 20)
    paths = [folder / "train" / f"class-{i % classes}" / f"{i}.jpg" for i in range(count)]
    paths += [folder / "val" / f"class-{i % classes}" / f"{i}.jpg" for i in range(evaluated)]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        list(pool.map(_draw, paths, range(len(paths)), chunksize=50))
    return folder


def _draw(path: Path, seed: int) -> None:
    noise = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8))
    noise.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


def run(part: Part, out: Path, variables: dict[str, str]) -> tuple[str, float]:
    """Run the part. Returns its line of the table, and its seconds. A part that ends early tells what it got to."""
    begin = time.monotonic()
    log = log_of(part, out)
    with open(log, "w", encoding="utf-8") as file:
        try:
            code = finished(part, file, variables)
            trouble = f"FAILED ({code}), see {log.name}: " if code else ""
        except subprocess.TimeoutExpired:
            trouble = f"not finished after {part.limit_s:.0f} s, see {log.name}: "
    try:
        line = part.reads(log.read_text("utf-8", errors="replace"))
    except Exception as error:  # the output is not what was expected
        line = f"UNREADABLE ({type(error).__name__}: {error}), see {log.name}"
    return trouble + line, time.monotonic() - begin


def finished(part: Part, output: IO[str], variables: dict[str, str]) -> int:
    """Run the part's command; its exit code. After its time, ends it with all processes that it started."""
    asked: list[int] = []
    # A signal that arrives while the process starts is obeyed when it is known and can be ended.
    handlers = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in _ENDING}
    process = subprocess.Popen(
        part.command, cwd=REPOSITORY, env=variables, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in asked:
            signal.raise_signal(number)
        return process.wait(part.limit_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def log_of(part: Part, out: Path) -> Path:
    return out / f"{part.name.replace(', ', '-').replace(' ', '-')}.log"


def chosen(found: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """The parts named in ``only``, otherwise all but those on request."""
    names = [part.name for part in found]
    if unknown := [name for name in only if name not in names]:
        sys.exit(f"--only {unknown[0]!r} is no part; there are: {', '.join(map(repr, names))}")
    return [part for part in found if (part.name in only if only else not part.on_request)]


def write(out: Path, about: str, results: dict[str, tuple[str, float]]) -> None:
    """README.md: the machine, the table of the parts, and the tables that they printed themselves."""
    lines = ["# One GPU", "", "```", about.rstrip(), "```", "", "| part | result | seconds |", "| --- | --- | ---: |"]
    lines += [f"| {name} | {line.replace('|', '/')} | {seconds:.0f} |" for name, (line, seconds) in results.items()]
    for log in sorted(out.glob("*.log")):
        printed = log.read_text("utf-8", errors="replace").splitlines()
        tables = [list(group) for is_row, group in itertools.groupby(printed, lambda x: x.startswith("|")) if is_row]
        lines += ["", f"## {log.stem}"] if tables else []
        lines += itertools.chain.from_iterable(("", *table) for table in tables)
    (out / "README.md").write_text("\n".join(lines) + "\n", "utf-8")


def described(variables: dict[str, str]) -> str:
    """What ``worldsize env`` says, or the end of this script if worldsize cannot be imported."""
    done = subprocess.run((*WORLDSIZE, "env"), env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        sys.exit(f"worldsize does not start here ({last[0]}): pass --wheels FOLDER with wheels of what is missing")
    return done.stdout


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part that runs is ended, too
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder for the results (runs/gpu)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts, by their names in the table")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to use in addition to what is installed")
    parser.add_argument("--root", type=Path, help="images or shards (default: generated JPEGs of 500 x 375 pixels)")
    parser.add_argument("--cifar10", type=Path, help="folder of CIFAR-10: also train it to 94 %% (recipe cifar10-fast)")
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    runs = next(folder for i in itertools.count(1) if not (folder := out / f"runs-{i}").exists())
    root = (arguments.root or out / "images").resolve()
    run_parts = chosen(parts(runs, root, arguments.tiny, arguments.cifar10 and arguments.cifar10.resolve()), arguments.only)
    packages = [unpack(arguments.wheels, out / "packages")] if arguments.wheels else []
    variables = environment(*packages)
    about = described(variables)
    if arguments.root is None and any(str(root) in " ".join(part.command) for part in run_parts):
        images(root, 80 if arguments.tiny else 6000)
    record = out / "results.json"
    results = json.loads(record.read_text("utf-8")) if record.exists() else {}
    for part in run_parts:
        line, seconds = results[part.name] = run(part, out, variables)
        print(f"{part.name} ({seconds:.0f} s): {line}", flush=True)
        record.write_text(json.dumps(results), "utf-8")
        write(out, about, results)


if __name__ == "__main__":
    main()
