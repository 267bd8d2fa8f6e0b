"""Whether the network is compiled (torch.compile), and how."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from worldsize import parallel
from worldsize.config.recipe import Recipe
from worldsize.data.images import crops
from worldsize.distributed.batch_plan import BatchPlan
from worldsize.distributed.world import World
from worldsize.errors import UserError, first_line
from worldsize.launch import garbage
from worldsize.models import training_pass
from worldsize.track import console
from worldsize.training.lost_gradients import LostGradients
from worldsize.training.objective import Objective

log = logging.getLogger(__name__)

_OLDEST = (7, 0)  # compute capability that Triton supports: Volta
_LEAST_BUCKET = 1  # MiB: torch's first bucket, which others must not be smaller than (DDPOptimizer)
_SPARE = 8  # forms of a compiled function beyond those of the image sizes; torch's own limit for all of them


def wanted(recipe: Recipe, plan: BatchPlan, world: World) -> bool:
    """Whether to compile the network, the same on all ranks; each of them must call it.

    ``auto`` compiles on GPUs, see `_by_default`, unless no compiler works there, of which it warns.

    Raises:
        UserError: the recipe asks for it, and what it needs is missing.
    """
    setting = recipe.model.compile
    if not setting or (setting == "auto" and not _by_default(recipe, plan, world.device)):
        return False
    if recipe.parallel.bucket_mb < _LEAST_BUCKET:
        raise UserError(
            f"--model.compile works with --parallel.bucket-mb of {_LEAST_BUCKET} or more: raise it, or leave one out"
        )
    found = next((reason for reason in world.gather(missing(world.device)) if reason), None)
    if found is None:
        return True
    if setting != "auto":
        raise UserError(f"--model.compile: {found}; or leave it out")
    if world.is_main:
        log.warning("the network is not compiled, so its steps take longer: %s; or pass --model.no-compile", found)
    return False


def _by_default(recipe: Recipe, plan: BatchPlan, device: torch.device) -> bool:
    """Not where bits are promised, which would depend on what compiler there is.

    Nor with several GPUs in a process or asynchronous steps, where each replica would compile for itself, nor with torch's
    SyncBatchNorm, which sends inside of the network, nor with buckets that the compiler refuses.
    """
    settings = recipe.parallel
    strategy = parallel.strategy_class(settings)
    exact = recipe.deterministic or strategy.same_bits
    apart = plan.devices > 1 or strategy.asynchronous or settings.sync_batchnorm or settings.bucket_mb < _LEAST_BUCKET
    return device.type == "cuda" and not exact and not apart


def missing(device: torch.device) -> str | None:
    """What a compiler of networks lacks on this machine, and the remedy; None if nothing. Starts no program.

    On GPUs it is Triton, which builds the C code that launches its kernels; on CPUs all of it is C++.
    """
    gpu = device.type == "cuda"
    if gpu and torch.cuda.get_device_capability(device) < _OLDEST:
        return "it needs a GPU of compute capability 7.0 (Volta) or later"
    if gpu and importlib.util.find_spec("triton") is None:
        return "it needs Triton: pip install triton"
    variable, names = ("CC", ("gcc", "clang")) if gpu else ("CXX", ("g++",) if sys.platform != "darwin" else ("clang++",))
    asked = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((asked,) if asked else names)):
        which = f"{variable}={asked} is no program" if asked else f"no {' or '.join(names)} is installed"
        return f"it needs a C{'' if gpu else '++'} compiler, and {which}: apt-get install {names[0]}, or set {variable}"
    header = _headers() / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"it needs Python's headers, and there is no {header}: apt-get install python{version}-dev"
    return None


def _headers() -> Path:
    """Where Triton looks for them: Debian's own scheme has another folder, which is empty."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


class Compiler:
    """Compiles the network in its first passes. Where ``auto`` does not succeed, they are computed without.

    Args:
        speaks: whether this process prints.
    """

    def __init__(self, recipe: Recipe, speaks: bool) -> None:
        self._auto = recipe.model.compile == "auto"
        self._speaks = speaks
        self._gave_up = False

    def first_passes(self, passes: Callable[[], None], size: int) -> None:
        """Call ``passes``, which runs the network on images of ``size`` pixels for the first time.

        Raises:
            UserError: the compiler fails or loses gradients, and the recipe asks for it.
        """
        begin, before = time.monotonic(), _parts()
        try:
            passes()
        except LostGradients as lost:
            self._give_up(lost)
            passes()
        except TorchDynamoException as error:
            reason = first_line(getattr(error, "inner_exception", error))
            raise UserError(f"--model.compile: the compiler failed: {reason}; repair it, or leave it out") from error
        garbage.spare_existing()  # a compiler leaves hundreds of thousands of objects
        if not self._speaks or self._gave_up:
            return
        if _parts() > before:
            console.say(f"compiled the network for images of {size} pixels in {time.monotonic() - begin:.0f} s")
        else:
            log.warning(
                "the compiler failed, so steps with images of %d pixels take longer; or pass --model.no-compile", size
            )

    def _give_up(self, lost: LostGradients) -> None:
        fault = f"the compiler of torch {torch.__version__} loses the gradient of {lost}"
        if not self._auto:
            raise UserError(f"--model.compile: {fault}: leave it out, or install another version of torch") from None
        self._gave_up = True
        torch.compiler.set_stance("force_eager")
        if self._speaks:
            log.warning("the network is not compiled, so its steps take longer: %s; another version may not", fault)


def _parts() -> int:
    """The parts of networks that torch has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(objective: Objective, recipe: Recipe) -> nn.Module:
    """A compiled form, which computes the same up to rounding."""
    # The compiler's own random numbers would be others than torch's.
    options = {"fallback_random": True} if training_pass.draws(objective.network, recipe) else None
    # By default, what the compiler cannot do is computed as it is. Who asks for it gets the error.
    torch._dynamo.config.suppress_errors = recipe.model.compile == "auto"
    # One form for each image size; beyond this limit, torch would compute the others uncompiled, without a word.
    torch._dynamo.config.cache_size_limit = _SPARE + len(crops.crop_sizes(recipe.data, recipe.epochs))
    # --precision decides about TF32; the compiler would suggest it in each run.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    # Forward passes of training with images of one size all have one shape.
    module: nn.Module = torch.compile(objective, dynamic=False, options=options)  # type: ignore[assignment, arg-type]
    return module
