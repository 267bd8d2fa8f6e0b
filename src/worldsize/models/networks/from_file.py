"""The user's own networks: the code that the recipe has taken in, see `worldsize.config.recipe.own_network`."""

from __future__ import annotations

import linecache
import random
import sys
import traceback
from types import ModuleType

import numpy as np
from torch import nn
from torch.nn.parameter import is_lazy

from worldsize.config.recipe import Recipe, own_network
from worldsize.errors import UserError
from worldsize.models import trusted_code


def build(recipe: Recipe, classes: int) -> nn.Module:
    """What the function returns for this number of classes.

    Raises:
        UserError: the code is somebody else's, or fails, or returns something else; or the recipe has a setting that is for
            known networks.
    """
    settings = recipe.model
    if settings.stem != "imagenet":
        raise UserError(f"--model.stem {settings.stem} works with torchvision's ResNets, not with {settings.name}")
    for flag, value in (("drop-path", settings.drop_path), ("dropout", settings.dropout)):
        if value is not None:
            raise UserError(f"--model.{flag} works with known networks, not with {settings.name}: leave it out")
    trusted_code.check(recipe)
    seed(recipe.seed)
    try:
        network = getattr(_module(recipe), own_network.function(settings.name))(classes)
    except Exception as error:
        raise explained(error, settings.name) from None
    if not isinstance(network, nn.Module):
        raise UserError(f"--model.name {settings.name} returned {type(network).__name__}, not a torch.nn.Module")
    for name, layer in network.named_modules():
        if any(map(is_lazy, (*layer.parameters(recurse=False), *layer.buffers(recurse=False)))):
            raise UserError(
                f"--model.name {settings.name}: the sizes of {name or 'the network'} ({type(layer).__name__}) are unknown: "
                "use a layer that is not lazy, or call the network once before returning it"
            )
    return network.train()  # a `train` of its own may leave layers in evaluation mode


def seed(value: int) -> None:
    """Seed the generators of Python and NumPy, from which a network of the user's own may draw as well as from torch's."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def explained(error: Exception, name: str, doing: str = "") -> UserError:
    """The same error with the file and the line of the network ``name`` that it is from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    file = name.rpartition(":")[0]
    where = f"{file}, line {lines[-1]}" if lines else file
    return UserError(f"--model.name: {where}: {doing}{type(error).__name__}: {error}")


def _module(recipe: Recipe) -> ModuleType:
    """The code as a module of its own, executed once in a process."""
    source = recipe.model.source
    assert source is not None
    name = f"own_network_{own_network.digest(source)}"
    if name not in sys.modules:
        module = ModuleType(name)
        # For tracebacks and for compilers that look at the source of a function.
        linecache.cache[recipe.model.name] = (len(source), None, source.splitlines(keepends=True), recipe.model.name)
        sys.modules[name] = module
        try:
            exec(compile(source, recipe.model.name, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
