"""Kernels are launched on the current GPU, which need not be the one that the tensors are on."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def on_its_device(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, run with the GPU of its first argument as the current one.

    The argument has a `device`, or is a tuple whose first entry has one, or is not looked at.
    """

    @functools.wraps(function)
    def run(*args: P.args, **named: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(named.values()))
        device = getattr(first[0] if isinstance(first, tuple) else first, "device", None)
        if device is None or device.type != "cuda":
            return function(*args, **named)
        with torch.cuda.device(device):
            return function(*args, **named)

    return run
