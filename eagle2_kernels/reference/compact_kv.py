import torch
from torch import Tensor

from .tree_attention import cache_rows


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    accept_length: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    steps = torch.arange(path.shape[1], device=path.device)
    moved = (steps > 0) & (steps <= accept_length[:, None]) & (path >= 0)
    # rows that stay are sent onto themselves: the row at the path's place, or the first of the row
    source = prefix_len[:, None] + path.clamp(min=0)
    target = prefix_len[:, None] + steps
    for cache in (k_cache, v_cache):
        blocks, rows = cache_rows(torch.where(moved, source, 0), cache.shape[2], block_table)
        values = cache[:, blocks, rows]
        blocks, rows = cache_rows(torch.where(moved, target, 0), cache.shape[2], block_table)
        cache[:, blocks, rows] = values
