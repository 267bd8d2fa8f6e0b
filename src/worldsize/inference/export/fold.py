"""BatchNorm folding: a convolution and the BatchNorm after it become one convolution."""

from __future__ import annotations

import copy
from collections import Counter

from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from worldsize.errors import UserError
from worldsize.models.freezing import FrozenBatchNorm2d

# Not subclasses that do more, such as timm's BatchNorm with an activation.
_NORMS = (nn.BatchNorm2d, FrozenBatchNorm2d)


class _Tracer(fx.Tracer):
    """Convolutions and norms stay single nodes, subclasses too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, nn.BatchNorm2d)) or super().is_leaf_module(m, module_qualified_name)


def folded(network: nn.Module, name: str) -> tuple[nn.Module, int]:
    """A copy of a network in evaluation mode with the same answers up to rounding, and how many BatchNorm layers are gone.

    Args:
        name: of the network, for messages.

    Raises:
        UserError: it cannot be traced, or has no BatchNorm directly after a convolution that is used once.
    """
    network = copy.deepcopy(network)
    try:
        graph = _Tracer().trace(network)
    except Exception as error:  # networks fail to trace in many ways
        raise UserError(f"--fold: {name} cannot be traced ({type(error).__name__}); leave out --fold") from None
    modules, uses = dict(network.named_modules()), _uses(graph)
    count = 0
    for node in list(graph.nodes):
        pair = _pair(node, modules)
        if pair is None or uses[str(pair[2].target)] > 1:
            continue
        convolution, norm, before = pair
        module = fuse_conv_bn_eval(convolution, norm)
        modules[str(before.target)] = module
        _replace(network, str(before.target), module)
        node.replace_all_uses_with(before)
        graph.erase_node(node)
        count += 1
    if count == 0:
        raise UserError(f"--fold: {name} has no BatchNorm directly after a convolution; leave out --fold")
    return fx.GraphModule(network, graph).eval(), count


def _uses(graph: fx.Graph) -> Counter[str]:
    """How often a forward pass uses each module: calls it, or takes one of its parameters."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_module"]
    return Counter([*called, *(str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr")])


def _pair(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[nn.Conv2d, nn.BatchNorm2d, fx.Node] | None:
    """The convolution and the norm, if ``node`` is a norm that alone uses the result of a convolution."""
    if node.op != "call_module" or type(modules[str(node.target)]) not in _NORMS:
        return None
    before = node.args[0] if node.args else None
    if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) > 1:
        return None
    convolution, norm = modules[str(before.target)], modules[str(node.target)]
    if not isinstance(convolution, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d) or norm.running_var is None:
        return None
    return convolution, norm, before


def _replace(network: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(network.get_submodule(parent), own, module)
