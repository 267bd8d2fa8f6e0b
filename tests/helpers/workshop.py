"""A folder with everything that the commands of the documents name, and a shell that runs them in this process.

A command runs to its end if that takes a moment. Otherwise it runs until the long part begins: training, building an image,
downloading, following a job. Commands about clusters talk to a fake one.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.distributed.run import get_args_parser

import documents
from documents import Block, Line
from fake_cluster import KeepingCluster, gpu_node, is_in
from paths import ROOT
from processes import worldsize
from worldsize import cli
from worldsize.bench import allreduce
from worldsize.cli import usage
from worldsize.config import command_line, recipe_files
from worldsize.errors import UserError

# Where the long part of a command begins.
LONG = (
    "training.build:train",
    "launch.local:launch",
    "launch.local_async:launch",
    "launch.agent:run",
    "reproduce.prove:_prove",
    "reproduce.replay:replay",
    "reproduce.audit:audit",
    "tune.command:tune",
    "tune.batches:micro_batches",
    "bench.scaling.command:Benchmark.run",
    "bench.scaling.jobs:Jobs.check",
    "bench.step:run",
    "bench.strategies:run",
    "bench.loader:run",
    "bench.allreduce:_measure",
    "bench.explain:_small_passes",
    "report.page:write",
    "inference.details.command:write_all",
    "cli.completion:script",
    "inference.export.command:_work",
    "data.fetch.command:_downloaded",
    "cluster.image.build:build",
    "cluster.commands:follow",
    "jobs.commands:follow",
    "jobs.display:follow",
    "cluster.storage.files:_connected",
    "cluster.storage.browse:show",
)
# What the words in capitals stand for.
NAMES = {
    **dict.fromkeys(("DIR", "FOLDER", "IMAGES", "PATHS"), "images"),
    **dict.fromkeys(("RUN", "RUN|CHECKPOINT"), "runs/digits-1"),
    **{"SHARDS": "shards", "OTHER": "runs/digits-2", "CHECKPOINT": "runs/digits-1", "EXPORT": "exported"},
    **{"RECIPE": "imagenet", "FILE": "my.yaml", "IMAGE": "registry.example/me/worldsize:1", "VOLUME": "imagenet"},
    **{"NAME": "r50", "DATASET": "cifar10", "TARGET": "local", "PAGE": "page.html", "SIZE": "400Gi", "N": "2"},
    **{"NAMES": "torchvision", "FORMAT": "onnx", "PLAN": "plan.json", "BENCH": "runs/bench-scaling-1", "PATH": "images"},
    **{"REPOSITORY": "registry.example/me/worldsize", "CIFAR10": "images", "--SETTING": "--epochs", "VALUE": "90"},
    **{"BUCKET": "bucket", "PARAMETER": "x", "OUT": "runs"},
}
SETTINGS = (
    *("--model.name", "shufflenet_v2_x0_5", "--global-batch", "160", "--micro-batch", "40", "--precision", "fp32"),
    *("--epochs", "1", "--schedule.warmup-epochs", "0", "--checkpoint.history", "all", "--checkpoint.every-epochs", "1"),
    *("--data.train-crop-size", "16", "--data.val-crop-size", "16", "--data.val-resize-size", "16"),
)


# A run on files: six images of two classes.
OWN_IMAGES = ("--data.name", "folder", "--data.root", "images", "--name", "r50", "--global-batch", "8", "--micro-batch", "8")


class Begun(BaseException):
    """The long part of a command was reached."""


def furnish(folder: Path) -> Path:
    """Fill the folder: runs of digits, benchmarks, images, shards, an export, a recipe and a home."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        _images(Path("images"), Path("home/images"), Path("home/cifar10"))
        for more in ((), OWN_IMAGES):
            done = worldsize("train", "digits", *SETTINGS, *more, cwd=folder)
            assert done.returncode == 0, done.stderr
        for name in ("digits-2", "imagenet-1", "imagenet-2", "relay"):
            shutil.copytree("runs/digits-1", f"runs/{name}")
        _edit(Path("runs/digits-2/recipe.yaml"), ("seed: 0", "seed: 1"))
        imagenet = (("shufflenet_v2_x0_5", "resnet50"), ("crop_size: 16", "crop_size: 224"), ("size: 16", "size: 256"))
        for name in ("imagenet-1", "imagenet-2"):
            _edit(Path("runs", name, "recipe.yaml"), *imagenet)
        _edit(Path("runs/relay/recipe.yaml"), ("micro_batch: 40", "micro_batch: 20"))
        for number, kind in enumerate(("pytorchjob", "mpijob", "trainjob"), 1):
            bench = Path(shutil.copytree(ROOT / "benchmarks/results/cluster" / kind, f"runs/bench-scaling-{number}"))
            _edit(
                bench / "bench.json", ("scaling digits", "scaling imagenet"), ('"recipe": "digits"', '"recipe": "imagenet"')
            )
        bandwidths = Path("runs/bench-allreduce-1")
        bandwidths.mkdir()
        allreduce._write(bandwidths, "gloo", 2, [allreduce.Measured(4096, 9, 80.0, 70.0, 90.0, 0.05, 0.05)])
        assert cli.main(["export", "runs/digits-1", "--to", "safetensors", "--out", "exported"]) == 0
        shutil.copytree("images/val", "home/new-images")
        shutil.copytree("images/val", "my-test-images")
        shutil.copytree("images/val", "imagenetv2-matched-frequency-format-val")
        assert cli.main(["data", "pack", "--root", "images", "--out", "packed"]) == 0
        Path("my.yaml").write_text("base: digits\n")
        Path("net.py").write_text("from torch import nn\n\ndef build(classes):\n    return nn.Linear(1, classes)\n")
        Path("real.json").write_text("[[0], [0], [1], []]\n")
        Path("rn50_88_epochs.yaml").write_text("training: {batch_size: 64, epochs: 3}\nlr: {lr: 0.1}\n")
        Path("corrected.csv").write_text("image,label\ncat/1.png,dog\n")
        Path("args.yaml").write_text("model: resnet18\nopt: sgd\nlr: 0.1\nbatch_size: 128\nepochs: 3\n")
        shutil.copytree(ROOT / "benchmarks", "benchmarks", ignore=shutil.ignore_patterns("results"))
        token = Path("home/.kaggle/access_token")
        token.parent.mkdir()
        token.write_text("KGAT_0123456789abcdef0123456789abcdef\n")
        token.chmod(0o600)
    return folder


def _edit(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text("utf-8")
    for old, new in changes:
        assert old in text, (path, old)
        text = text.replace(old, new)
    path.write_text(text, "utf-8")


def _images(*folders: Path) -> None:
    random = np.random.default_rng(0)
    for folder in folders:
        for split, count in (("train", 4), ("val", 2)):
            for label in ("cat", "dog"):
                (folder / split / label).mkdir(parents=True)
                for i in range(1, count + 1):
                    name = f"ILSVRC2012_val_{i + count * (label == 'dog'):08}" if split == "val" else str(i)
                    pixels = random.integers(0, 256, (40, 48, 3), np.uint8)
                    Image.fromarray(pixels).save(folder / split / label / f"{name}.png")


class Cluster(KeepingCluster):
    """Two nodes with eight GPUs each, a volume, and a running job of the name that the documents use."""

    def __init__(self) -> None:
        super().__init__()
        self.volume("imagenet", "ReadWriteMany", resources={"requests": {"storage": "400Gi"}})
        for name in ("n0", "n1"):
            self.add("Node", **gpu_node(name, 8, cpu="128", memory="512Gi"))

    def create(self, path, query, body):
        return super().create(path, {"fieldValidation": ["Strict"]} | query, body)

    def has_job(self) -> None:
        """Add the job again if a command deleted it."""
        is_in(self, "PyTorchJob", "Running", "r50")


class Shell:
    """Runs the commands of documents in the current folder. ``problems`` are those that failed."""

    def __init__(self, patch: pytest.MonkeyPatch, connect: Callable[[], object], only_parse: bool = False) -> None:
        self._patch, self._connect, self._only_parse = patch, connect, only_parse
        self._flags: dict[str, set[str]] = {}
        self.problems: list[str] = []
        if only_parse:
            patch.setattr(command_line, "parse", _then_begin(command_line.parse))
        for place in LONG:
            module, _, name = place.partition(":")
            owner, _, name = name.rpartition(".")
            target = importlib.import_module(f"worldsize.{module}")
            patch.setattr(getattr(target, owner) if owner else target, name, _begin)

    def run(self, line: Line) -> None:
        """Run it, and note what is wrong."""
        if (loop := re.fullmatch(r"for (\w+) in (.*?); do (.*); done", line.text)) is not None:
            for value in loop[2].split():
                self.run(Line(line.where, loop[3].replace(f"${loop[1]}", value)))
            return
        try:
            problem = self._problem(line)
        except UserError as error:
            problem = str(error)
        if problem is not None:
            self.problems.append(f"{line.where}: {line.text.splitlines()[0]}\n    {problem}")

    def _problem(self, line: Line) -> str | None:
        first = line.text.split()[0]
        if first == "worldsize" or " worldsize " in line.text:
            return self._worldsize(line)
        if not line.complete and "..." in line.text:
            return None
        return getattr(self, f"_{first}", lambda _: f"no rule for {first!r} in {Path(__file__).name}")(line.text)

    def run_block(self, block: Block) -> None:
        """Run the commands or the program of a fenced block, or load its recipe; with a reason not to, do nothing."""
        try:
            if block.language == "sh" and not block.reason:
                for line in documents.commands(block):
                    self.run(line)
            elif block.language == "python" and not block.reason:
                network = block.text.replace("resnet50", "shufflenet_v2_x0_5")
                exec(compile(network, f"{block.page}:{block.line}", "exec"), _images_in_memory())
            elif block.language == "yaml" and "base:" in block.text:
                Path("document.yaml").write_text(block.text)
                recipe_files.load("document.yaml")
        except Exception as error:
            self.problems.append(f"{block.page}:{block.line}: {type(error).__name__}: {error}")

    # Programs that are not ours ------------------------------------------------------------------------------------------

    def _python(self, text: str) -> str | None:
        program, _, body = text.partition("\n")
        if body:
            out = program.partition(">")[2].split()
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(body, "document", "exec"), {})
            if out and out[0] != "<<'END'":
                Path(out[0]).write_text(printed.getvalue())
            return None
        file = ROOT / shlex.split(text)[1]
        return None if file.is_file() or shlex.split(text)[1] == "-m" else f"{file} does not exist"

    def _make(self, text: str) -> str | None:
        targets = [word for word in shlex.split(text)[1:] if "=" not in word]
        known = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.M)
        return None if {*targets} <= {*known} else f"the Makefile has no {', '.join({*targets} - {*known})}"

    def _pip(self, text: str) -> str | None:
        extras = importlib.metadata.metadata("worldsize").get_all("Provides-Extra") or []
        named = {name for group in re.findall(r"worldsize\[([\w,]+)\]", text) for name in group.split(",")}
        return None if named <= {*extras} else f"no extra {', '.join(named - {*extras})}"

    # worldsize -----------------------------------------------------------------------------------------------------------

    def _worldsize(self, line: Line) -> str | None:
        before, words = self._split(line)
        if not line.complete and (named := self._named(words)) is not True:
            return named or None
        with self._patch.context() as patch, self._redirected(patch, before, line.text, words[0] == "agent"):
            return self._main(words)

    def _split(self, line: Line) -> tuple[str, list[str]]:
        """What stands before `worldsize`, and the words after it, with names instead of placeholders."""
        before, _, after = line.text.partition("worldsize ")
        words = shlex.split(re.split(r"\s[<>]\s", after)[0].replace("$PBS_JOBID", "7").replace("$LSB_JOBID", "7"))
        return before, [str(Path("home").resolve() / word[2:]) if word.startswith("~/") else _filled(word) for word in words]

    def _named(self, words: list[str]) -> str | bool:
        """For a command that is only mentioned: "" if it exists, with its flags; True if it has to run."""
        words = [word.split("|")[0] for word in words]
        if words[0].startswith("-"):
            return True
        command = usage.find(words)
        if (
            command is not None
            and len(words) > len(command.words.split())
            and not re.search(r"\.\.\.| --\S+$", " ".join(words))
        ):
            return True
        if command is None or not command.options:
            return ""
        flags = self._flags.setdefault(command.words, _flags(command.words))
        unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]
        if command.words in ("train", "render", "bench scaling", "agent"):  # flags of targets
            return ""
        return f"no flag {', '.join(unknown)}" if unknown else ""

    @contextlib.contextmanager
    def _redirected(self, patch: pytest.MonkeyPatch, before: str, text: str, agent: bool) -> Iterator[None]:
        """The variables of the launcher, the home and the standard input that the command has."""
        patch.setenv("HOME", str(Path("home").resolve()))
        for name, value in _launched(before, agent).items():
            patch.setenv(name, value)
        data = b""
        if before.rstrip().endswith("|"):
            data = subprocess.run(["bash", "-c", before.rstrip()[:-1]], capture_output=True, check=True).stdout
        if (file := re.search(r"\s<\s(\S+)", text)) is not None:
            data = Path(file[1]).read_bytes()
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        yield

    def _main(self, words: list[str]) -> str | None:
        on = words[words.index("--on") + 1] if "--on" in words[:-1] else ""
        if words[0] == "train" and not self._only_parse and not on.endswith("job") and _lacks_data(words):
            return "the recipe's dataset needs --data.root"
        if words[0] == "train" and on in ("slurm", "ssh"):  # these need a Slurm, and hosts
            words = ["render", *words[1:]]
        if words[0] == "init":
            words = [*words, "--weights", "none"]  # without a download
        if words[0] == "recipes":
            words = [{"r50": "imagenet-a1", "runs/digits-2": "imagenet-a3"}.get(word, word) for word in words]
        if words[0] in ("jobs", "status", "logs", "wait", "stop", "delete", "cluster") or on.endswith("job"):
            self._connect()
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(words)
        except Begun:
            code = 0
            if words[0] == "train" and "--name" in words and not on:
                _keep_run(words[words.index("--name") + 1])
        except SystemExit as stop:
            code = stop.code
        if code == 0 and words[0] == "agent" and "--" in words:
            return self._main(words[words.index("--") + 1 :])
        if code == 0 or (words[0] == "compare" and code == 1):
            return None
        return f"exit code {code}: {err.getvalue().strip() or out.getvalue().strip()[-300:]}"


def _keep_run(name: str) -> None:
    """Leave a run of this name for the commands that follow."""
    if not Path("runs", name).exists():
        shutil.copytree("runs/r50", Path("runs", name))


def _lacks_data(words: list[str]) -> bool:
    """Whether these arguments of `train` name no folder of images, although the recipe has to read one."""
    if words[1] not in recipe_files.names() or {"--data.root", "--help"} & {*words}:
        return False
    return recipe_files.load(words[1]).data.name not in ("digits", "synthetic")


def _images_in_memory() -> dict[str, object]:
    """What the programs of the documents take as given: an image, as several types, and the file a.png."""
    array = np.zeros((16, 16, 3), np.uint8)
    Image.fromarray(array).save("a.png")
    return {"array": array, "pil_image": Image.fromarray(array), "tensor": torch.zeros(2, 3, 16, 16, dtype=torch.uint8)}


def _begin(*_: object, **__: object) -> None:
    raise Begun


def _then_begin(parse: Callable[..., object]) -> Callable[..., object]:
    def parsed(*arguments: object, **options: object) -> None:
        parse(*arguments, **options)
        raise Begun

    return parsed


def _filled(word: str) -> str:
    """The word with names for what it has in capitals: runs/NAME, VOLUME:/runs/relay."""
    if word in NAMES:
        return NAMES[word]
    return re.sub(r"(?<![\w.-])[A-Z][A-Z0-9]*(?![\w-])", lambda found: NAMES.get(found[0], found[0]), word)


def _flags(words: str) -> set[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        cli.main([*words.split(), "--help"])
    return {*re.findall(r"--[\w.-]+", out.getvalue())}


def _launched(before: str, agent: bool) -> dict[str, str]:
    """The variables that the launcher before `worldsize` sets in rank 0, or on the first node."""
    words = shlex.split(before.rstrip("| "))
    first = words[0] if words else ""
    hosts = Path("hosts")
    hosts.write_text(f"{socket.gethostname()}\n")
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    if first == "torchrun":
        asked = get_args_parser().parse_args([*words[1:], "worldsize"])
        nodes, local = int(asked.nnodes.split(":")[0]), int(asked.nproc_per_node)
        return master | {"RANK": "0", "WORLD_SIZE": str(nodes * local), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local)}
    if first == "mpirun":
        sizes = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), words[words.index("-np") + 1])
        return master | sizes | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    if first == "srun":
        size = words[words.index("-n") + 1]
        return master | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": size, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    agents = {"pbsdsh": {"PBS_NODEFILE": str(hosts)}, "blaunch": {"LSB_DJOB_HOSTFILE": str(hosts)}}
    skypilot = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "h1", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    return agents.get(first, skypilot) if agent else {}
