"""Rows of batched matrices by number."""

import torch
from torch import Tensor


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows x[b, index[b, l]] of x [B, M, F], index [B, L] int64 -> [B, L, F]."""
    batch, rows, size = x.shape
    if batch > 1:
        index = index + rows * torch.arange(batch, device=index.device)[:, None]
    # index_select copies whole rows; gather with an expanded index copies element by element
    return x.reshape(-1, size).index_select(0, index.reshape(-1)).view(*index.shape, size)
