"""EAGLE-3 heads in the layout of the `speculators` package, version 0.9."""

import os
from pathlib import Path

import torch
from transformers import AutoConfig

from .checks import read_json
from .head_config import Eagle3Config

VERSION = "0.9.0"
# fields that the two layouts name alike
SHARED = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "draft_temperature",
)


def published_config(raw: dict) -> dict:
    """The fields of the authors' `config.json` from those of a `speculators` one.

    Its layer's config holds only what differs from the defaults of its model type.
    """
    if raw["speculators_model_type"] != "eagle3":
        raise ValueError(
            f"speculators_model_type: wanted eagle3, got {raw['speculators_model_type']}"
        )
    given = dict(raw.get("transformer_layer_config") or {})
    kind = given.pop("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"transformer_layer_config: wanted a llama or qwen3 layer, got {kind}")
    layer = AutoConfig.for_model(kind, **given).to_dict()
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError("transformer_layer_config: wanted full attention, got a sliding window")
    fields = {name: raw[name] for name in SHARED if raw.get(name) is not None}
    fields.setdefault("draft_vocab_size", 32000)
    return layer | fields | {"qk_norm": kind == "qwen3", "qkv_bias": layer["attention_bias"]}


def config_of(config: Eagle3Config, dtype: torch.dtype, target: str | os.PathLike) -> dict:
    """What `speculators` wants in the `config.json` of a head; `target` is a model's folder."""
    target_config = read_json(Path(target) / "config.json")
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5}
    return {
        "architectures": ["Eagle3DraftModel"],
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": target_config.get("architectures") or [],
                "name_or_path": str(target),
            },
        },
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "qwen3" if config.qk_norm else "llama",
            **{name: getattr(config, name) for name in names},
            "attention_bias": config.qkv_bias,
            "num_hidden_layers": 1,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        **{name: getattr(config, name) for name in SHARED},
        "draft_vocab_size": config.draft_size,
    }
