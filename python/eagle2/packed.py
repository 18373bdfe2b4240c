"""Linear layers with weights laid out once for oneDNN: a pass over few rows costs a third less.

Plain float32 products on a CPU copy each weight anew for passes of more than one row. Packed, the
weights take their size again in memory, and numbers differ in the last bits.
"""

import contextlib
from collections.abc import Iterator
from typing import TypeGuard

import torch
from torch import Tensor, nn

from .checks import one_of


@contextlib.contextmanager
def packed(*modules: nn.Module) -> Iterator[None]:
    """Run the float32 linear layers of these modules on packed weights while the context lasts.

    Args:
        modules: e.g. a target and its head. Left as found at the end. Layers on other devices or
            of other dtypes stay as they are, as do all where torch was built without oneDNN.
    """
    for module in modules:
        one_of("modules", module, nn.Module, "networks such as a target and its head")
    layers = [layer for module in modules for layer in module.modules() if packable(layer)]
    try:
        for layer in layers:
            pack(layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def packable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    return (
        type(layer) is nn.Linear
        and layer.weight.dtype == torch.float32
        and layer.weight.device.type == "cpu"
        and "forward" not in layer.__dict__
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack(layer: nn.Linear) -> None:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
    bias = layer.bias

    def forward(x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    layer.__dict__["forward"] = forward


def pack_like(source: nn.Module, layer: nn.Linear) -> nn.Linear:
    """Pack `layer` if `source` is packed; returns `layer`."""
    if "forward" in source.__dict__ and packable(layer):
        pack(layer)
    return layer
