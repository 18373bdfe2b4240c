"""Preallocated key/value rows of all layers, written in place."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the rows of one pass go; the same for every layer of a cache."""

    index: Tensor  # [B * T] int64 into the cache's rows [B * S]
    live: Tensor  # [B, T, 1, 1] bool; rows that are not live write nothing


class KVCache(NamedTuple):
    """Rows of a model's layers. Row b's committed slots come first; nothing tracks how many."""

    k: Tensor  # [layers, B, S, G, E]
    v: Tensor  # [layers, B, S, G, E]

    @classmethod
    def allocate(
        cls,
        layers: int,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "KVCache":
        shape = (layers, batch, capacity, kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def first_slots(self, width: int) -> Slots:
        """Slots 0 to width - 1 of every row; padding is overwritten before it is read."""
        batch, capacity = self.k.shape[1:3]
        row = torch.arange(batch, device=self.k.device)[:, None] * capacity
        index = row + torch.arange(width, device=self.k.device)
        return Slots(index.flatten(), torch.ones_like(index, dtype=torch.bool)[..., None, None])

    def slots(self, start: Tensor, count: Tensor, width: int) -> Slots:
        """Slots start[b] + t of row b for t < count[b], of `width` rows; start [B] is 1 or more."""
        batch, capacity = self.k.shape[1:3]
        t = torch.arange(width, device=start.device)
        live = t < count[:, None]
        # a row that is not live rewrites its own slot 0 with what it holds
        index = torch.where(live, start[:, None] + t, 0)
        if batch > 1:
            index = index + torch.arange(batch, device=start.device)[:, None] * capacity
        return Slots(index.flatten(), live[..., None, None])

    def write(self, layer: int, k: Tensor, v: Tensor, slots: Slots) -> None:
        """Put k, v [B, T, G, E] in their slots."""
        for cache, rows in ((self.k[layer], k), (self.v[layer], v)):
            flat = cache.flatten(0, 1)
            kept = torch.where(slots.live, rows, flat[slots.index].view_as(rows))
            flat.index_copy_(0, slots.index, kept.flatten(0, 1))
