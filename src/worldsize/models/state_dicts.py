"""State dicts as people have them: in wrappers, with key names of older versions, with heads that we do not build (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

State = dict[str, torch.Tensor]

# torch.compile, FSDP and activation checkpointing put these into the names of the parameters inside them.
_INSIDE = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Old key names of torchvision's DenseNets (its published files have them) and vision transformers.
_DENSENET = re.compile(r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)")
_TRANSFORMER = re.compile(r"(.*\.mlp)\.linear_([12])\.(weight|bias)")
# Auxiliary heads of GoogLeNet and Inception v3: torchvision, too, drops them unless they are asked for.
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")
# Where training scripts put the state dict in what they save: Lightning and timm, others, torchvision and DeiT, Composer.
_PLACES = (("state_dict",), ("model_state_dict",), ("model",), ("state", "model"))
# What ffcv-imagenet and Composer add to the tensors of a convolution that they let blur its input, which then is inside
# another module, `conv`; Composer also to a maximum pooling. Their kernel.
_BLURRED = ".blur_filter"
_KERNEL = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16
_COUNTER = ".num_batches_tracked"  # of BatchNorm; files of before 2018 have none


def found_in(content: Any) -> tuple[State | None, str]:
    """The state dict in what a file contains: its content, or an entry of it. Returns it, or None, and the entry's name."""
    if _is_state(content):
        return content, ""
    found = ((_entry(content, path), ".".join(path)) for path in _PLACES)
    return next(((state, place) for state, place in found if _is_state(state)), (None, ""))


def _entry(content: Any, path: Iterable[str]) -> Any:
    """What is at this path of nested dictionaries; None: nothing."""
    for name in path:
        content = content.get(name) if isinstance(content, dict) else None
    return content


def _is_state(content: Any) -> bool:
    items = content.items() if isinstance(content, dict) else ()
    return bool(items) and all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in items)


def adapted(state: State, own: Iterable[str]) -> State:
    """The tensors under the key names of the network, as its library would load them.

    Args:
        own: the keys of the network's state dict.
    """
    names = set(own)
    state = _unwrapped(state, names)
    layers = _blurred(state, names)
    state = {_without_blur(key, layers): t for key, t in state.items() if key.removesuffix(_BLURRED) not in layers}
    return {_current(key, names): tensor for key, tensor in state.items() if not _is_auxiliary(key, names)}


def blurred(state: State, own: Iterable[str]) -> set[str]:
    """The layers that blur their input (a pooling: its output) in the network that the state dict comes from."""
    names = set(own)
    return _blurred(_unwrapped(state, names), names)


def auxiliary(state: State, own: Iterable[str]) -> bool:
    """Whether the state dict has auxiliary heads that the network has not."""
    names = set(own)
    return any(_is_auxiliary(key, names) for key in _unwrapped(state, names))


def missing(state: State, own: Iterable[str]) -> set[str]:
    """The network's keys that the state dict lacks, without counters, which then keep their values."""
    return {key for key in own if key not in state and not key.endswith(_COUNTER)}


def prefix(state: Iterable[str], own: Iterable[str]) -> str:
    """The prefix that most of the network's keys have in a state dict with other tensors besides; empty: none."""
    keys, names = set(state), set(own)
    first = min(names)
    candidates = {key.removesuffix(first) for key in keys if key.endswith(f".{first}")}
    fitting = {one: sum(one + name in keys for name in names) for one in sorted(candidates)}
    best = max(fitting, key=lambda one: fitting[one], default="")
    return best if fitting.get(best, 0) > len(names) / 2 else ""


def _unwrapped(state: State, own: set[str]) -> State:
    """Without the prefixes of modules around the network: DataParallel's ``module.``, Lightning's ``model.`` and others."""
    state = {key if key in own else _INSIDE.sub("", key): tensor for key, tensor in state.items()}
    if "n_averaged" not in own:
        state.pop("n_averaged", None)  # of torch's AveragedModel
    while state and not own & state.keys():
        roots = {key.partition(".")[0] for key in state}
        if len(roots) > 1 or any("." not in key for key in state):
            break
        state = {key.partition(".")[2]: tensor for key, tensor in state.items()}
    return state


def _blurred(state: State, own: set[str]) -> set[str]:
    """As `blurred`, of an unwrapped state dict: only layers with the kernel of our own networks (`model.blurpool`)."""
    kernels = {key.removesuffix(_BLURRED): t for key, t in state.items() if key.endswith(_BLURRED) and key not in own}
    return {
        layer for layer, kernel in kernels.items() if kernel.shape[-2:] == _KERNEL.shape and bool((kernel == _KERNEL).all())
    }


def _without_blur(key: str, layers: set[str]) -> str:
    """The key without the module that blurs, if it is of the convolution in one of these."""
    layer, _, name = key.rpartition(".conv.")
    return f"{layer}.{name}" if layer in layers else key


def _current(key: str, own: set[str]) -> str:
    """The current name of an old key."""
    if key in own:
        return key
    if old := _DENSENET.fullmatch(key):
        return old[1] + old[2]
    if old := _TRANSFORMER.fullmatch(key):
        return f"{old[1]}.{3 * (int(old[2]) - 1)}.{old[3]}"
    return key


def _is_auxiliary(key: str, own: set[str]) -> bool:
    return key not in own and key.startswith(_AUXILIARY)
