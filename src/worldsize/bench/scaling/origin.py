"""The command of a scaling benchmark, and ``bench.json``, which keeps it: to continue it, and to know what it measured."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from worldsize.bench.scaling.arguments import BenchScaling
from worldsize.bench.scaling.cases import Scaling
from worldsize.config import command_line, recipe_files
from worldsize.config.listing import PROSE, flat, shown
from worldsize.config.recipe import Data, Recipe
from worldsize.data import open_dataset
from worldsize.data.datasets.published import SIZES
from worldsize.distributed.rank import cores
from worldsize.distributed.stop_signals import temporary_folder
from worldsize.errors import UserError
from worldsize.training import environment

FILE = "bench.json"
# With --resume there may be more rounds. Settings are compared one by one, and the kinds of scaling as a set.
_NOT_COMPARED = ("rounds", "resume", "out", "settings", "weak", "strong", "both")


@dataclass(frozen=True)
class Request:
    """A command line: ``source`` is RECIPE, ``job_options`` are the words after ``--``, for jobs on a cluster."""

    asked: BenchScaling
    source: str
    words: tuple[str, ...]
    job_options: tuple[str, ...]

    @property
    def scalings(self) -> list[Scaling]:
        asked = self.asked
        if asked.both or (asked.weak and asked.strong):
            return ["weak", "strong"]
        return ["strong"] if asked.strong else ["weak"]

    @property
    def on_cpu(self) -> bool:
        """Whether it asks for processes without GPUs."""
        return self.asked.settings.device == "cpu" or command_line.value_of("--gpus", list(self.job_options)) == "0"


def parse(argv: list[str]) -> Request:
    """The words after ``worldsize bench scaling``.

    Raises:
        UserError: invalid options.
        SystemExit: see `command_line.parse`.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    words, job_options = argv[:at], argv[at + 1 :]
    source = words[0] if words and not words[0].startswith("-") else None
    if source is None and not command_line.asks_help(words):
        raise recipe_files.missing("bench scaling")
    base = recipe_files.load(source) if source else Recipe()
    title = f"bench scaling {source or 'RECIPE'}"
    asked = command_line.parse(BenchScaling, words[1:] if source else words, BenchScaling(base), title)
    return Request(asked, source or "", tuple(words), tuple(job_options))


def with_classes(request: Request) -> Request:
    """The request with random images of as many classes as the recipe's dataset has, for `--synthetic`: the network is then
    that of the recipe. With ``--data.classes``, and for a folder that is not here, the recipe's own number stays. A
    benchmark that is resumed keeps its classes: older ones had 1,000.

    Raises:
        UserError: see `open_dataset` and `read`.
    """
    settings = request.asked.settings
    data, root = settings.data, settings.data.root
    if data.name == "synthetic" or data.classes != Data().classes:
        return request
    if request.asked.resume is not None:
        classes = read(request.asked.resume).asked.settings.data.classes
    elif root is not None and root.expanduser().is_dir():
        with temporary_folder(prefix="worldsize-bench-") as cache:
            classes = len(open_dataset(data, cache).classes)
    else:
        classes = SIZES[data.name].classes if data.name in SIZES else data.classes
    settings = settings.model_copy(update={"data": data.model_copy(update={"classes": classes})})
    return replace(request, asked=replace(request.asked, settings=settings))


def write(folder: Path, request: Request, token: str) -> None:
    """Write ``bench.json``; ``token`` distinguishes the benchmark's jobs from those of others with the same folder name."""
    here = {"device": environment.device_name("cpu"), "cores": cores(), **environment.versions()}
    values: dict[str, Any] = {
        "kind": "scaling",
        "recipe": request.source,
        "scaling": "+".join(request.scalings),
        "command": _command(request, request.words),
        "steps": request.asked.steps,
        "warmup": request.asked.warmup,
        "token": token,
        # Jobs run on other machines than the one that starts them.
        "environment" if request.asked.on == "local" else "client": here,
        "settings": request.asked.settings.model_dump(mode="json"),
    }
    (folder / FILE).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def to_continue(request: Request, folder: Path) -> str:
    """The command that continues the request's benchmark, which is in ``folder``."""
    return _command(request, [*command_line.without("--resume", list(request.words)), "--resume", str(folder)])


def _command(request: Request, words: Sequence[str]) -> str:
    options = ["--", *request.job_options] if request.job_options else []
    return shlex.join(["worldsize", "bench", "scaling", *words, *options])


def facts(folder: Path) -> dict[str, Any]:
    """The content of ``bench.json``.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        found = json.loads((folder / FILE).read_text("utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{folder} is not the folder of a scaling benchmark: its {FILE} is missing or damaged")
    return found


def token(folder: Path) -> list[str]:
    """The token of `write`; none in older benchmarks."""
    return [str(one) for one in [facts(folder).get("token")] if one]


def read(folder: Path) -> Request:
    """What the benchmark in ``folder`` was asked to measure. Older ones have only their command.

    Raises:
        UserError: ``bench.json`` does not say so.
    """
    found = facts(folder)
    try:
        request = parse(shlex.split(found["command"])[3:])
        if "settings" in found:
            settings = recipe_files.validate(found["settings"], str(folder / FILE))
            request = replace(request, asked=replace(request.asked, settings=settings))
    except (KeyError, TypeError, AttributeError, ValueError, UserError, SystemExit):
        raise UserError(f"{folder / FILE} does not say what was measured: its command cannot be read") from None
    return request


def differences(before: Request, now: Request) -> list[str]:
    """What two requests differ in, so that their runs cannot be compared: ``--steps: 20, now 30``."""
    old, new = _values(before), _values(now)
    return [f"{name}: {old[name]}, now {new[name]}" for name in new if old.get(name) != new[name]]


def _values(request: Request) -> dict[str, str]:
    own = {name: value for name, value in vars(request.asked).items() if name not in _NOT_COMPARED}
    recipe = flat(request.asked.settings.model_dump(mode="json"))
    recipe = {name: value for name, value in recipe.items() if name not in PROSE}
    values = {f"--{name.replace('_', '-')}": shown(value) for name, value in (own | recipe).items()}
    return values | {"scaling": "+".join(request.scalings), "options after `--`": shlex.join(request.job_options)}
