"""Rotary embedding of any position: computed, not looked up, so no context can outgrow it."""

import functools

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from .checks import one_of

SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
BY_LENGTH = ("dynamic", "longrope")


def check_scaling(scaling: dict | None) -> None:
    """Raise ValueError for a `rope_scaling` that `frequencies` cannot follow."""
    if scaling is not None:
        one_of("rope_scaling", scaling, dict, "its type and factors by name")
    kind = scaling_type(scaling)
    if kind in BY_LENGTH:
        raise ValueError(
            f"rope_scaling: type {kind} changes its frequencies with the length of the text, while "
            "keys in the cache keep those of the length they were written at; wanted type "
            f"{', '.join(SCALINGS)}, whose frequencies are the same at every length"
        )
    if kind not in SCALINGS:
        raise ValueError(f"rope_scaling: wanted type {', '.join(SCALINGS)}, got {kind!r}")
    missing = [name for name in SCALINGS[kind] if (scaling or {}).get(name) is None]
    if missing:
        raise ValueError(f"rope_scaling: type {kind} needs {', '.join(missing)}")


def scaling_type(scaling: dict | None) -> str:
    return "default" if not scaling else scaling.get("rope_type", scaling.get("type", "default"))


@functools.lru_cache
def frequencies(shape, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position of each pair of dimensions, and a factor of cosines and sines.

    Those of transformers' Llama, for the rope_theta, rope_scaling and head_dim of a HeadConfig.

    Returns:
        float32 [E / 2] on the device, and the factor, which is 1 but for type "yarn".
    """
    scaling = {**(shape.rope_scaling or {}), "rope_theta": shape.rope_theta}
    length = scaling.get("factor", 1) * scaling.get("original_max_position_embeddings", 1)
    config = LlamaConfig(
        hidden_size=shape.num_attention_heads * shape.head_dim,
        num_attention_heads=shape.num_attention_heads,
        max_position_embeddings=int(length),  # what these types stretch the original to
        rope_parameters={**scaling, "rope_type": scaling_type(scaling)},
    )
    with device:
        rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


def angles(
    positions: Tensor, frequency: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, E] of positions [...], times the factor."""
    angle = (positions[..., None, None].float() * frequency).repeat(*[1] * positions.dim(), 1, 2)
    return (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, E] in the two-halves layout of Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
