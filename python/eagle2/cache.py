"""Preallocated key/value rows of all layers, written in place."""

from typing import NamedTuple

import torch
from torch import Tensor


class Slots(NamedTuple):
    """Where the rows of one pass go; the same for every layer of a cache."""

    index: Tensor  # [B * T] int64 into the cache's rows [B * S]
    live: Tensor  # [B, T] bool; rows that are not live go to the spare slot


class KVCache(NamedTuple):
    """Rows of a model's layers. Row b's committed slots come first; nothing tracks how many.

    The last slot of every row is spare: it takes what must not be kept, and nothing reads it.
    """

    k: Tensor  # [layers, B, S + 1, G, E]
    v: Tensor  # [layers, B, S + 1, G, E]

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
        shape = (layers, batch, capacity + 1, kv_heads, head_dim)
        return cls(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))

    def first_slots(self, width: int) -> Slots:
        """Slots 0 to width - 1 of every row; padding is overwritten before it is read."""
        start = torch.zeros(self.k.shape[1], dtype=torch.int32, device=self.k.device)
        return self.slots(start, torch.full_like(start, width), width)

    def slots(self, start: Tensor, count: Tensor, width: int) -> Slots:
        """Slots start[b] + t of row b for t < count[b], of `width` rows."""
        batch, size = self.k.shape[1:3]
        t = torch.arange(width, device=start.device)
        live = t < count[:, None]
        index = torch.where(live, start[:, None] + t, size - 1)
        if batch > 1:
            index = index + torch.arange(batch, device=start.device)[:, None] * size
        return Slots(index.flatten(), live)

    def write(self, layer: int, k: Tensor, v: Tensor, index: Tensor) -> None:
        """Put k, v [B, T, G, E] in their slots, as `slots` found them."""
        self.k[layer].flatten(0, 1).index_copy_(0, index, k.flatten(0, 1))
        self.v[layer].flatten(0, 1).index_copy_(0, index, v.flatten(0, 1))
