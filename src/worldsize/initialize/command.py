"""``worldsize init``: look at a folder of images, choose how to train on it, and write a recipe."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
import yaml

from worldsize.config import output_files, recipe_files
from worldsize.config.recipe import Model, Recipe, own_network
from worldsize.config.wording import count, quoted
from worldsize.data.layouts import Hints, packed
from worldsize.data.layouts.reading import Kind
from worldsize.errors import UserError, WorldsizeError
from worldsize.initialize import survey, writing
from worldsize.initialize.writing import Choice


@dataclass
class Init:
    """Inspect a folder of images, and write a recipe that fine-tunes a pretrained network on it.

    Reads class folders at any depth, with or without splits, tables of labels (CSV, lists, JSON, XML), and classes in file
    names, and reports what it reads and leaves out; what is unclear, the flags below decide. Decodes every image once. If
    there is no validation split, chooses validation images by their content, of each class the same share, and lists
    them in a file; no image is moved. The settings follow BiT-HyperRule (Kolesnikov et
    al. 2020, arXiv 1912.11370) and this machine; the recipe explains them. Nothing is trained.
    """

    root: tyro.conf.Positional[Path]
    """The folder of the dataset, or a table of labels in it."""
    out: Path | None = None
    """The recipe (default: FOLDER.yaml in the current folder). The list of images is put next to it."""
    val_share: float = 0.1
    """Without a validation split: the share of each class to validate with."""
    labels: str | None = None
    """Where the labels are: `folders`, `names` (of the files), or the path of a table in the folder."""
    label_column: str | None = None
    """The column of the table with the labels."""
    kind: Kind | None = None
    """Whether an image has a single label, or may have several."""
    class_level: int | None = None
    """Which folders are the classes: 1 for the outermost that not all images share, 2 for those inside, ..."""
    group_by: str | None = None
    """Images with the same value in this column of a table stay in one split; `none`: all are on their own."""
    ignore: tuple[str, ...] = ()
    """Folders and files that do not belong to the dataset, relative to its folder."""
    unpack: Path | None = None
    """Images in tar, zip or Parquet files: write them to files in this new folder, and use it as the dataset."""
    model: str | None = None
    """The network (default: resnet50 on a GPU, else resnet18)."""
    weights: str | None = None
    """Initial weights as in --model.weights, or none (default: those that torchvision publishes for the network)."""
    no_flip: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Do not mirror training images: a mirrored digit, letter or left hand is not one."""
    force: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace existing files."""


def run(options: Init) -> int:
    """Run the command; returns its exit code.

    Raises:
        UserError: the folder has no usable layout, a file already exists or cannot be written, or there is no such network.
    """
    root, labels = _root(options)
    if not 0 < options.val_share < 1:
        raise UserError(f"--val-share {options.val_share:g} must be between 0 and 1")
    output_files.check_text(options.unpack or root)  # the recipe names it
    out = options.out or Path(f"{(options.unpack or root).resolve().name}.yaml")

    def check(path: Path) -> None:
        # --unpack makes its folder, and the recipe may be in it.
        if options.unpack is None or path.absolute().parent != options.unpack.expanduser().absolute():
            output_files.check("--out", path)
        _check_new(path, options.force)

    recipe_files.refuse_shipped_name("--out", out)
    check(out)
    choice = _choose(options)  # before the images are read, which may take long: mistakes in its flags show at once
    if options.unpack is not None:
        packed.unpack(root, options.unpack.expanduser())
        root = options.unpack.expanduser()
    hints = Hints(labels, options.label_column, options.kind, options.class_level, options.group_by, options.ignore)
    found = survey.take(root, out, options.val_share, hints, check)
    text = writing.text(found, choice, root, not options.no_flip)
    recipe_files.validate(yaml.safe_load(text), str(out))
    _write(found, out, text)
    recipe = recipe_files.load(str(out))
    print(f"\n{out} {'fine-tunes' if choice.weights else 'trains'} {choice.model} for {count(recipe.epochs, 'epoch')}.")
    print(f"Read it, then: {_command(out, recipe, choice.gpus)}")
    return 0


def _write(found: survey.Survey, out: Path, recipe: str) -> None:
    """Write the listing and the recipe. After an error, neither is left that was not there: the next call would refuse it.

    Raises:
        UserError, StoreUnreachable: one of them cannot be written.
    """
    listing = {found.listing: found.content} if found.setting is not None else {}
    output_files.write_together({**listing, out: recipe.encode()})


def _root(options: Init) -> tuple[Path, str | None]:
    """The folder, and where its labels are if the user says so."""
    root = options.root.expanduser()
    if root.is_file() and options.labels is None:
        return root.parent, root.name
    if not root.is_dir():
        raise UserError(f"{options.root}: no such folder")
    if options.labels is not None and not (root / options.labels).exists():
        given = Path(options.labels).expanduser().resolve()
        if given.is_file() and given.is_relative_to(root.resolve()):
            return root, given.relative_to(root.resolve()).as_posix()
    return root, options.labels


def _check_new(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise UserError(f"{path} already exists: pass --out NEW.yaml, or --force to replace it")


def _command(out: Path, recipe: Recipe, gpus: int) -> str:
    """The training command, on as many of the machine's GPUs as can share the micro-batches of a step evenly."""
    shares = recipe.global_batch // recipe.micro_batch
    procs = max((n for n in range(1, gpus + 1) if shares % n == 0), default=1)
    return shlex.join(["worldsize", "train", str(out), *(["--procs", str(procs)] if procs > 1 else [])])


# Choosing -----------------------------------------------------------------------------------------------------------------


def _choose(options: Init) -> Choice:
    import torch

    gpus = torch.cuda.device_count()
    trained = _trained_network(options)
    model = options.model or (trained.name if trained else "resnet50" if gpus else "resnet18")
    side = _only_side(model)
    if options.weights == "none":
        return Choice(model, None, gpus, side)
    weights = options.weights or _published(model)
    if weights is not None and Path(weights).exists():
        weights = str(Path(weights).resolve())  # the recipe may be used in another folder
    choice = Choice(model, weights, gpus, side)
    if trained is not None:
        choice = replace(choice, stem=trained.stem, blurpool=trained.blurpool)
    problem = f"torchvision publishes none for {model}" if weights is None else _problem(choice)
    if problem is None:
        return choice
    if options.weights is not None:
        raise UserError(f"--weights {options.weights}: {problem}")
    print(f"no pretrained weights: {problem}")
    print("The recipe trains from random weights. --weights FILE, --weights RUN or --weights timm:NAME would be better.")
    return Choice(model, None, gpus, side)


def _trained_network(options: Init) -> Model | None:
    """The network of the run that --weights names; None if it names no run, or --model another network.

    Raises:
        UserError: it is the user's own: the recipe needs its file.
    """
    from worldsize import checkpoint

    weights = options.weights
    if weights in (None, "none") or not Path(weights).expanduser().is_dir():
        return None
    try:
        network = recipe_files.load(str(checkpoint.find(Path(weights).expanduser()) / "recipe.yaml")).model
    except WorldsizeError:
        return None  # `_problem` says what is wrong with them
    own = own_network.is_own(network.name)
    name = network.name.rpartition("#")[0] if own else network.name
    if own and options.model is None:
        raise UserError(
            f"--weights {weights}: its network is your own: pass --model {quoted(name)}, or where that file is now"
        )
    return network if options.model in (None, name) else None


def _only_side(model: str) -> int | None:
    """The size of the images, in pixels, if the network accepts no other.

    Raises:
        UserError: there is no such network.
    """
    import torch

    from worldsize.models import factory as models
    from worldsize.models import network_names, trusted_code

    network_names.check("--model", model)
    recipe = recipe_files.validate({"model": {"name": model}}, f"--model {model}")
    trusted_code.trust(recipe)
    try:
        network = models.build(recipe, 2, torch.device("cpu"), torch.float32)
    except UserError as error:
        raise UserError(f"--model {model}: {error}") from None
    side = getattr(network, "image_size", None)
    return side if isinstance(side, int) else None


def _published(model: str) -> str | None:
    """torchvision's newest weights for this network."""
    from torchvision import models

    if model not in models.list_models(module=models):
        return None
    best = models.get_model_weights(model).DEFAULT
    return f"torchvision:{best}"


def _problem(choice: Choice) -> str | None:
    """Why these weights cannot be loaded into the network; downloads them, so that training finds them in the cache."""
    import torch

    from worldsize.models import factory as models
    from worldsize.models import pretrained

    network = {"name": choice.model, "weights": choice.weights, "stem": choice.stem, "blurpool": choice.blurpool}
    recipe = Recipe.model_validate({"model": network})
    try:
        pretrained.load(models.build(recipe, 2, torch.device("cpu"), torch.float32), recipe)
    except WorldsizeError as error:
        return str(error)
    return None
