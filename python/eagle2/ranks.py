"""Ranks of a tensor-parallel model: what the first one chooses is what all of them do.

Sums over ranks and gathered logits have the same bits everywhere, and so have the drafts, since
every rank runs the head whole. Should devices round apart all the same, the tree and the accepted
path are sent once a cycle, so that no rank waits for a pass that another does not make.
"""

from collections.abc import Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import eagle2_kernels
from eagle2_kernels import Tree

KEYS = ("k_proj.weight", "qkv_proj.weight")


def group_and_share(decoder: nn.Module) -> "tuple[dist.ProcessGroup | None, int]":
    """The ranks over which the attention heads are spread, and how many those are."""
    weights: Iterable[tuple[str, Any]] = decoder.named_parameters()
    for name, weight in weights:
        if name.endswith(KEYS) and hasattr(weight, "device_mesh"):
            mesh = weight.device_mesh
            group = mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group()
            return group, weight.numel() // weight.to_local().numel()
    return None, 1


def agree(fields: Sequence[Tensor], group: "dist.ProcessGroup | None") -> list[Tensor]:
    """The first rank's values of these tensors, in one broadcast; shapes and dtypes are equal."""
    if group is None:
        return list(fields)
    bits = [field.contiguous().view(torch.int32) if field.is_floating_point() else field
            for field in fields]  # fmt: skip
    sent = torch.cat([field.flatten().long() for field in bits])
    dist.broadcast(sent, dist.get_global_rank(group, 0), group)
    pieces = sent.split([field.numel() for field in fields])
    return [
        piece.to(kind.dtype).view(field.shape).view(field.dtype)
        for piece, kind, field in zip(pieces, bits, fields, strict=True)
    ]


def agreeing(ops: ModuleType | SimpleNamespace, group: "dist.ProcessGroup") -> SimpleNamespace:
    """The operators, with trees, draws and paths as the first rank has them."""
    found = {name: getattr(ops, name) for name in eagle2_kernels.ops.OPERATORS}

    def rerank(*args, **options) -> Tree:
        return Tree(*agree(found["rerank"](*args, **options), group))

    def sample(*args) -> Tensor:
        return agree((found["sample"](*args),), group)[0]

    def accept(*args) -> tuple[Tensor, ...]:
        return tuple(agree(found["accept"](*args), group))

    return SimpleNamespace(**{**found, "rerank": rerank, "sample": sample, "accept": accept})
