"""Rotary embedding of any position: computed, not looked up, so no context can outgrow it."""

import math

import torch
from torch import Tensor

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def check_scaling(scaling: dict | None) -> None:
    """Raise ValueError for a `rope_scaling` that `frequencies` cannot follow."""
    kind = scaling_type(scaling)
    if kind not in SCALINGS:
        raise ValueError(f"rope_scaling: wanted type {', '.join(SCALINGS)}, got {kind!r}")
    missing = [name for name in SCALINGS[kind] if name not in scaling]
    if missing:
        raise ValueError(f"rope_scaling: type {kind} needs {', '.join(missing)}")


def scaling_type(scaling: dict | None) -> str:
    return "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))


def frequencies(dim: int, theta: float, scaling: dict | None, device: torch.device) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [dim / 2].

    "linear" divides them all by the factor. "llama3" divides those whose wave is longer than
    original_max_position_embeddings / low_freq_factor, keeps those shorter than
    original_max_position_embeddings / high_freq_factor and blends in between (Llama 3.1).
    """
    half = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    frequency = theta ** (-half / dim)
    kind = scaling_type(scaling)
    if kind == "linear":
        return frequency / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        waves = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        kept = ((waves - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / scaling["factor"])
    return frequency


def angles(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, E] of positions [...]."""
    angle = (positions[..., None, None].float() * frequency).repeat(*[1] * positions.dim(), 1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, E] in the two-halves layout of Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
