"""Shapes of the published targets and of the heads for them, from the authors' configs."""

from typing import NamedTuple

from .head_config import Eagle3Config, HeadConfig


class TargetShape(NamedTuple):
    """A target; field names as in transformers' configs."""

    model_type: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rope_theta: float = 10000.0


TARGETS = {
    "vicuna-7b": TargetShape("llama", 32, 4096, 11008, 32, 32, 32000),
    "vicuna-13b": TargetShape("llama", 40, 5120, 13824, 40, 40, 32000),
    "vicuna-33b": TargetShape("llama", 60, 6656, 17920, 52, 52, 32000),
    "llama2-chat-7b": TargetShape("llama", 32, 4096, 11008, 32, 32, 32000),
    "llama2-chat-13b": TargetShape("llama", 40, 5120, 13824, 40, 40, 32000),
    "llama2-chat-70b": TargetShape("llama", 80, 8192, 28672, 64, 8, 32000),
    "llama3-instruct-8b": TargetShape("llama", 32, 4096, 14336, 32, 8, 128256, 5e5),
    "llama3-instruct-70b": TargetShape("llama", 80, 8192, 28672, 64, 8, 128256, 5e5),
    "llama3.1-8b": TargetShape("llama", 32, 4096, 14336, 32, 8, 128256, 5e5),
    "llama3.3-70b": TargetShape("llama", 80, 8192, 28672, 64, 8, 128256, 5e5),
    "deepseek-r1-distill-llama-8b": TargetShape("llama", 32, 4096, 14336, 32, 8, 128256, 5e5),
    "mixtral-8x7b": TargetShape("mixtral", 32, 4096, 14336, 32, 8, 32000, 1e6),
    "qwen2-7b": TargetShape("qwen2", 28, 3584, 18944, 28, 4, 152064, 1e6),
    "qwen3-8b": TargetShape("qwen3", 36, 4096, 12288, 32, 8, 151936, 1e6),
}
# key-value heads where a head has others than its target
KV_HEADS = {"vicuna-33b": 13, "mixtral-8x7b": 32}
NO_BIAS = {"llama3-instruct-8b", "llama3-instruct-70b"}
# draft vocabularies of the published EAGLE-3 heads
EAGLE3 = {
    "vicuna-13b": 32000,
    "llama3.1-8b": 32000,
    "llama3.3-70b": 32000,
    "deepseek-r1-distill-llama-8b": 32000,
    "qwen3-8b": 32000,
}


def head_shape(name: str, kind: str) -> HeadConfig:
    """Shape of the published head for a target; `kind` is "eagle2" or "eagle3".

    Raises:
        ValueError: nothing is published under that name.
    """
    if name not in TARGETS or (kind == "eagle3" and name not in EAGLE3):
        names = EAGLE3 if kind == "eagle3" else TARGETS
        raise ValueError(f"target: wanted one of {', '.join(names)}, got {name}")
    target = TARGETS[name]
    sizes = target._asdict() | {"num_key_value_heads": KV_HEADS.get(name, target[5])}
    del sizes["model_type"], sizes["num_hidden_layers"], sizes["rope_theta"]
    if kind == "eagle3":
        draft = EAGLE3[name]
        return Eagle3Config(**sizes, draft_vocab_size=draft if draft < target.vocab_size else None)
    theta = target.rope_theta if name.startswith("llama3-") else 10000.0
    return HeadConfig(**sizes, bias=name not in NO_BIAS, rope_theta=theta)


def fitting(config: HeadConfig) -> list[str]:
    """Published targets of a shape that a head fits."""
    return [
        name
        for name, shape in TARGETS.items()
        if not config.misfits(shape.hidden_size, shape.vocab_size, shape.num_hidden_layers)
    ]
