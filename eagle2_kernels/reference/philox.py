"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def philox(seed: Tensor, position: Tensor, block: Tensor) -> Tensor:
    """Four random 32-bit words for each (seed, position, block), int64 [..., 4] in 0..2^32 - 1.

    Key: the two halves of the 64-bit seed. Counter: block (< 2^32), the two halves of position, 0.
    """
    key_low, key_high = seed & MASK, (seed >> 32) & MASK
    zero = torch.zeros_like(seed + position + block)
    c0, c1, c2, c3 = zero + block, zero + (position & MASK), zero + ((position >> 32) & MASK), zero
    for _ in range(10):
        # int64 products wrap, and their 64 bits are those of the unsigned product
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK) ^ c1 ^ key_low,
            product1 & MASK,
            ((product0 >> 32) & MASK) ^ c3 ^ key_high,
            product0 & MASK,
        )
        key_low, key_high = (key_low + 0x9E3779B9) & MASK, (key_high + 0xBB67AE85) & MASK
    return torch.stack((c0, c1, c2, c3), -1)
