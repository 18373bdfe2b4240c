"""Checks of arguments: every message names the argument, what was wanted and what came."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def wanted(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None = any size), dtype and device."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: wanted a tensor, got {type(tensor).__name__}")
    if tensor.shape != shape and not fits(tensor.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: wanted shape [{sizes}], got {[*tensor.shape]}")
    if dtypes is not None and tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: wanted {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: wanted it on {device}, got {tensor.device}")


def fits(got: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(got) != len(shape):
        return False
    for size, one in zip(shape, got, strict=True):  # a loop: this runs a hundred times per cycle
        if size is not None and size != one:
            return False
    return True


def own_memory(name: str, tensor: Tensor) -> None:
    """Raise ValueError where elements of a tensor that is written may share their memory."""
    if tensor.is_contiguous():
        return
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                f"{name}: wanted memory of its own for every element, since it is written, got "
                f"strides {[*tensor.stride()]} for shape {[*tensor.shape]}"
            )
        reach += (size - 1) * stride


def memory_for(out: Any, device: torch.device, allocate: Callable, *arguments) -> Any:
    """`out`, where it is what `allocate(*arguments)` makes on this device; for None, that.

    Raises:
        ValueError: another number of tensors, shape, dtype, device or layout.
    """
    if out is None:
        return allocate(*arguments)
    wish = allocate(*arguments, device="meta")
    if isinstance(wish, Tensor):
        pairs = [("out", out, wish)]
    elif isinstance(out, tuple) and len(out) == len(wish):
        pairs = [
            (f"out[{number}]", *pair) for number, pair in enumerate(zip(out, wish, strict=True))
        ]
    else:
        got = f"{len(out)} in one" if isinstance(out, tuple) else type(out).__name__
        raise ValueError(f"out: wanted a tuple of {len(wish)} tensors, got {got}")
    for name, memory, like in pairs:
        wanted(name, memory, like.shape, (like.dtype,), device)
        if not memory.is_contiguous():
            raise ValueError(f"{name}: wanted contiguous memory, got strides {[*memory.stride()]}")
    return out


def check_heads(q: Tensor, k_cache: Tensor) -> None:
    heads, dim, groups = q.shape[2], q.shape[3], k_cache.shape[2]
    if groups < 1 or heads % groups:
        raise ValueError(f"q: wanted heads H a multiple of the cache's G={groups}, got H={heads}")
    if dim % 8 or not 8 <= dim <= 256:
        raise ValueError(f"q: wanted head dim E a multiple of 8 up to 256, got E={dim}")
