"""The command lines of ``train`` and ``eval``, typed, and how tyro turns those of all commands into flags and ``--help``."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import sys
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from pydantic import BaseModel, ValidationError

from worldsize.config.recipe import Recipe
from worldsize.config.recipe_files import explain, is_class
from worldsize.errors import UserError

T = TypeVar("T")

# A nested dataclass whose fields are flags of their own: --namespace, not --where.namespace.
Flat = Annotated[T, tyro.conf.OmitArgPrefixes]
# The recipe; its settings keep their sections: --data.root, not --settings.data.root, and not --root.
RecipeFlags = Annotated[Recipe, tyro.conf.arg(name="")]


@dataclass
class Train:
    """Train RECIPE (a name from `worldsize recipes`, or a YAML file), or resume a run.

    Every setting of the recipe is a flag with its dotted name; the defaults shown are those of the recipe. `none` unsets a
    setting that is optional. `--on pytorchjob`, `mpijob` or `trainjob` trains on a Kubernetes cluster, `--on slurm` as a
    Slurm job, `--on ssh` on a list of hosts: `worldsize train RECIPE --on slurm --help`.
    """

    settings: RecipeFlags
    procs: int = 1
    """Processes on this machine; each uses one GPU, or its share of the cores."""
    name: str | None = None
    """Name of the run folder (default: RECIPE-N)."""
    out: Path = Path("runs")
    """Where run folders are created."""
    resume: Path | None = None
    """Resume this run at the exact step where it stopped, also with another --procs."""
    allow_changes: bool = False
    """With --resume: continue although the recipe or the data changed, but never on other classes."""
    autoresume: bool = False
    """Resume OUT/NAME if it exists, and restart after a temporary failure; also for schedulers that restart jobs. Requires
    --name."""
    retries: int = 3
    """With --autoresume: give up after this many restarts in a row without a new checkpoint."""
    stop_after: int | None = None
    """Save and stop after this step, as after Ctrl-C (exit code 75); --resume continues."""


@dataclass
class Agent:
    """Start this node's processes of a job, together with those of the other nodes, and start them again if a node is lost.

    The pods of a PyTorchJob or TrainJob run it (torchrun's PET_* variables). Let SkyPilot, dstack, PBS with pbsdsh, or LSF
    with blaunch -z start it once per node. Exits with 143 if it was asked to leave, or if the
    other nodes did not connect within half an hour (retry), and with the run's own exit code if a retry would fail again.
    """

    id: str
    """The run, the same on all nodes."""
    procs: int | None = None
    """Processes on this node (default: one per GPU)."""


@dataclass
class Evaluate:
    """Evaluate a run's newest checkpoint, or one checkpoint, on the validation set. Every image counts exactly once.

    Every setting of the recipe is a flag with its dotted name: evaluate at another size or precision, or on other images.
    """

    settings: RecipeFlags
    procs: int = 1
    """Processes on this machine; each uses one GPU, or its share of the cores."""
    raw: bool = False
    """Evaluate the weights themselves, not their average, of a run with --average.name ema or swa."""
    images: Path | None = None
    """Evaluate on these images instead, FOLDER/CLASS/IMAGE, where CLASS is a class of the run or, as in ImageNet-V2, its
    number."""
    details: Path | None = None
    """Also write to this folder what the network gets right and wrong: a page (page.html), details.json, classes.csv,
    confusion.csv and images.csv. Needs the extra `report`."""
    against: Path | None = None
    """With --details: another run or checkpoint with the same classes, to compare with on the same images."""
    real_labels: Path | None = None
    """real.json of ImageNet-ReaL: a prediction is right if the file lists it for the image; images without labels in it are
    left out."""


def parse(kind: type[T], argv: list[str], default: T | None, title: str, recorded: Recipe | None = None) -> T:
    """The command line as a ``kind``; without a ``default``, its fields' own defaults apply.

    Args:
        recorded: the recipe of an existing run, whose values are not checked again.

    Raises:
        UserError: invalid settings, or settings that contradict each other.
        SystemExit: 0 after ``--help``, 64 after tyro has printed what is wrong.
    """
    values = tyro.MISSING_NONPROP if default is None else default
    refuse_empty_arguments(argv)
    printed = io.StringIO()
    _show_as_read(kind)
    try:
        with redirect_stderr(printed):
            parsed = tyro.cli(kind, prog=f"worldsize {title}", args=_none_as_read(kind, with_values(argv)), default=values)
    except ValidationError as error:
        raise UserError(f"invalid settings:\n{explain(error)}") from None
    except SystemExit as stop:
        # tyro turns an error of one section into a message with pydantic's own text.
        if (invalid := _validation_error(stop)) is not None:
            raise UserError(f"invalid settings:\n{explain(invalid)}") from None
        sys.stderr.write(printed.getvalue())
        raise SystemExit(UserError.exit_code if stop.code else 0) from None
    _check_scale(getattr(parsed, "settings", None), recorded)
    return parsed


def refuse_empty_arguments(argv: list[str]) -> None:
    """Refuse an empty argument: in scripts, it comes from a variable that is not set, and an empty path would be the current
    folder.

    Raises:
        UserError: names the option that it belongs to.
    """
    for word, after in itertools.zip_longest(argv, argv[1:]):
        if word.startswith("--") and (after == "" or (word.endswith("=") and word.count("=") == 1)):
            raise UserError(f"{word.rstrip('=')} is empty; is the shell variable set?")
    if "" in argv:
        raise UserError("an argument is empty; is the shell variable set?")


# Flags that stand alone like other flags, or before "auto".
_SWITCHES = {
    "--model.compile": ("--model.compile", "True"),
    "--model.no-compile": ("--model.compile", "False"),
    "--cuda-graphs": ("--cuda-graphs", "True"),
    "--no-cuda-graphs": ("--cuda-graphs", "False"),
}


def with_values(argv: list[str]) -> list[str]:
    """The command line with a value for each of the `_SWITCHES`."""
    found = []
    for argument, after in itertools.zip_longest(argv, argv[1:]):
        name, value = _SWITCHES.get(argument, (argument, None))
        found.append(name)
        if value is not None and after not in ("auto", "True", "False"):
            found.append(value)
    return found


def _none_as_read(kind: type[Any], argv: list[str]) -> list[str]:
    """The command line with None, as tyro reads it, for a ``none`` in any case that is the value of an optional setting."""
    optional, found = _optional_flags(kind), list(argv)
    for i, argument in enumerate(argv):
        name, joined, value = argument.partition("=")
        if name.replace("_", "-") not in optional:
            continue
        if joined and value.lower() == "none":
            found[i] = f"{name}=None"
        elif not joined and i + 1 < len(argv) and argv[i + 1].lower() == "none":
            found[i + 1] = "None"
    return found


def _optional_flags(kind: type[Any], prefix: str = "--") -> frozenset[str]:
    """The flags that can be None: all such settings of a recipe, and of the command's own options those that are no text.

    The name of a run or a folder can be "none".
    """
    found: set[str] = set()
    of_recipe = issubclass(kind, BaseModel)
    hints = get_type_hints(kind, include_extras=True)
    for name in kind.model_fields if of_recipe else [one.name for one in dataclasses.fields(kind)]:
        inner, flag = _without_extras(hints[name]), prefix + name.replace("_", "-")
        if is_class(inner) and (dataclasses.is_dataclass(inner) or issubclass(inner, BaseModel)):
            # Sections of a recipe have prefixes; the recipe itself and other groups are `Flat`.
            found |= _optional_flags(inner, f"{flag}." if of_recipe else prefix)
        elif NoneType in get_args(inner) and (of_recipe or not {str, Path} & {*get_args(inner)}):
            found.add(flag)
    return frozenset(found)


_SHOWN: set[type] = set()


def _show_as_read(kind: type[Any]) -> None:
    """Let ``--help`` show values as users read them: INT, not {None}|INT, and no default where it is None or empty.

    What None or nothing means is in the text of the flag.
    """
    if kind in _SHOWN:
        return
    _SHOWN.add(kind)
    hints = get_type_hints(kind, include_extras=True)
    fields = kind.model_fields if issubclass(kind, BaseModel) else {one.name: one for one in dataclasses.fields(kind)}
    for name in fields:
        inner = _without_extras(hints[name])
        if is_class(inner) and (dataclasses.is_dataclass(inner) or issubclass(inner, BaseModel)):
            _show_as_read(inner)
        elif NoneType in get_args(inner):
            shown = tyro.conf.arg(metavar=_metavar(inner), help_behavior_hint=_default)
            kind.__annotations__[name] = Annotated[hints[name], shown]
        elif fields[name].default == "" or (get_origin(inner) is tuple and not _repeatable(hints[name])):
            kind.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(help_behavior_hint=_default)]


def _without_extras(hint: Any) -> Any:
    return _without_extras(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _repeatable(hint: Any) -> bool:
    return tyro.conf.UseAppendAction in get_args(hint)  # tyro says so instead of a default


def _metavar(hint: Any) -> str:
    """INT for ``int | None``; the choices of a Literal; INT|PATH for ``int | Path | None``."""
    hint = _without_extras(hint)
    inner = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return "|".join(dict.fromkeys(_metavar(one) for one in inner if one is not NoneType))
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, inner)) + "}"
    if get_origin(hint) is tuple:
        return " ".join("..." if one is Ellipsis else _metavar(one) for one in inner)
    return str(hint.__name__).upper()


def _default(label: str) -> str:
    return "" if label in ("None", "", "''") else f"(default: {label})"


def _check_scale(recipe: object, recorded: Recipe | None) -> None:
    """Refuse values of ``data.mean`` and ``data.std`` on the scale 0 to 255, but for those of an existing run."""
    if not isinstance(recipe, Recipe) or (problem := recipe.data.scale_problem()) is None:
        return
    if recorded is None or (recorded.data.mean, recorded.data.std) != (recipe.data.mean, recipe.data.std):
        raise UserError(problem)


def _validation_error(error: BaseException | None) -> ValidationError | None:
    """The validation error that led to ``error``, if any."""
    while error is not None and not isinstance(error, ValidationError):
        error = error.__cause__ or error.__context__
    return error


def check_price(per_hour: float | None) -> None:
    """Refuse a --price-per-hour that is no price."""
    if per_hour is not None and not 0 <= per_hour < math.inf:
        raise UserError(f"--price-per-hour {per_hour:g}: pass a price of at least 0")


def value_of(flag: str, argv: list[str]) -> str | None:
    """The value of ``flag``, for flags that decide how the rest is parsed; None without.

    Raises:
        UserError: it has no value, or several that differ.
    """
    values = []
    for i, argument in enumerate(argv):
        if argument.startswith(flag + "="):
            values.append(argument.split("=", 1)[1])
        elif argument == flag:
            if i + 1 == len(argv):
                raise UserError(f"{flag} needs a value")
            values.append(argv[i + 1])
    if len({*values}) > 1:
        raise UserError(f"{flag} is given as {' and as '.join(values)}: keep one of them")
    return values[0] if values else None


def without(flag: str, argv: list[str]) -> list[str]:
    """The command line without ``flag`` and its value."""
    kept = [argument for argument in argv if not argument.startswith(flag + "=")]
    if flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept


def asks_help(argv: list[str]) -> bool:
    """Whether ``--help`` or ``-h`` is among the arguments."""
    return "-h" in argv or "--help" in argv
