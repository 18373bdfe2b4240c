"""Ancestor words: 64 columns of a boolean matrix in one int64, least significant bit first."""

import torch
from torch import Tensor


def pack(visible: Tensor) -> Tensor:
    """Booleans [..., M] to words [..., ceil(M / 64)] int64."""
    words = -(-visible.shape[-1] // 64)
    bits = torch.nn.functional.pad(visible.to(torch.int64), (0, words * 64 - visible.shape[-1]))
    place = torch.arange(64, device=visible.device)
    return (bits.unflatten(-1, (words, 64)) << place).sum(-1)


def unpack(words: Tensor, columns: int) -> Tensor:
    """Words [..., W] to booleans [..., columns]."""
    place = torch.arange(64, device=words.device)
    return ((words[..., None] >> place) & 1).flatten(-2)[..., :columns].bool()
