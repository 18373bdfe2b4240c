"""The order rule: higher score first, then lower index. All selections go through here."""

import torch
from torch import Tensor


def order_key(scores: Tensor) -> Tensor:
    """Distinct int64 keys over the last dimension: a larger key comes earlier in the order.

    The high half is an order-preserving map of the float32 score (NaN as -inf, -0.0 as 0.0), the
    low half falls with the index. No two keys are equal, so any selection by key is exact.
    """
    scores = torch.where(scores.isnan(), -torch.inf, scores) + 0.0
    bits = scores.contiguous().view(torch.int32).to(torch.int64)
    monotone = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    index = torch.arange(scores.shape[-1], device=scores.device)
    return (monotone << 32) | (0xFFFFFFFF - index)


def best(scores: Tensor, k: int) -> Tensor:
    """Indices [..., k] int64 of the first k entries in the order, best first."""
    return order_key(scores).topk(k, dim=-1).indices
