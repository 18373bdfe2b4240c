"""Files of draft heads: `config.json` and weights, as EAGLE's authors or `speculators` lay them."""

import dataclasses
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from . import speculators
from .checks import naming, one_of, read_json
from .head_config import Eagle3Config, HeadConfig
from .networks import Attend, Eagle2Head, Eagle3Head, Head
from .rope import scaling_type
from .weights import read_weights
from .whole_file import whole

__all__ = [
    "Attend",
    "Eagle2Head",
    "Eagle3Config",
    "Eagle3Head",
    "Head",
    "HeadConfig",
    "load_head",
    "save_head",
]
LAYOUTS = ("published", "speculators")


def load_head(path: str | os.PathLike, dtype: torch.dtype = torch.float32) -> Head:
    """Load an EAGLE-1/2 or EAGLE-3 head; which of them it is, its tensors tell.

    Reads `config.json` with `model.safetensors` or `pytorch_model.bin`, also sharded, in the
    layout of EAGLE's authors or of `speculators`. Without an embedding in the file the head uses
    its target's.

    Raises:
        FileNotFoundError: there is no such folder, no config or no weights in it.
        ValueError: a tensor is missing, unknown or of the wrong shape; `d2t` leaves the vocabulary
            or disagrees with `t2d`; the config asks for what no head here has.
    """
    one_of("path", path, (str, os.PathLike), "the folder of a head")
    check_dtype(dtype)
    path = Path(path)
    raw = read_json(path / "config.json")
    weights = read_weights(path)
    if "speculators_model_type" in raw:
        with naming(path / "config.json"):
            raw = speculators.published_config(raw)
        eagle3 = True
    else:
        eagle3 = any("midlayer." in name or "hidden_norm" in name for name in weights)
    if eagle3:
        weights = rename(weights, "layers.0.", "midlayer.")
    network: type[Head] = Eagle3Head if eagle3 else Eagle2Head
    layer = "midlayer." if eagle3 else "layers.0."
    with naming(path / "config.json"):
        config = make_config(network, raw, weights, layer)
    with torch.device("meta"):
        head = network(config, "embed_tokens.weight" in weights)
    with naming(f"weights in {path}"):
        used = weights.pop("t2d", None)
        check_shapes(head, weights)
        check_mapping(config, weights.get("d2t"), used)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    head.load_state_dict(weights, assign=True)
    return head.eval()


def check_dtype(dtype: torch.dtype) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: wanted torch.float32, float16 or bfloat16, got {dtype!r}")


def rename(weights: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    twice = [name for name in weights if name.startswith(old) and new + name[len(old) :] in weights]
    if twice:
        raise ValueError(f"weights: {twice[0]} is there as {new + twice[0][len(old) :]} too")
    return {
        new + name[len(old) :] if name.startswith(old) else name: tensor
        for name, tensor in weights.items()
    }


def make_config(network, raw: dict, weights: dict[str, Tensor], layer: str) -> HeadConfig:
    """The shape that a `config.json` and, where it is silent or copied, the tensors tell."""
    raw = {name: value for name, value in raw.items() if value is not None}
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act: wanted silu, got {raw['hidden_act']}")
    raw |= rope_fields(raw)
    raw.setdefault("num_key_value_heads", raw.get("num_attention_heads"))
    raw |= raw.get("eagle_config", {})
    q_proj = weights.get(f"{layer}self_attn.q_proj.weight")
    if q_proj is not None and len(q_proj) == raw.get("hidden_size"):
        raw.pop("head_dim", None)  # copied from the target; the authors' code never reads it
    if "d2t" not in weights and raw.get("draft_vocab_size") == raw.get("vocab_size"):
        raw.pop("draft_vocab_size", None)
    config = Eagle3Config if network is Eagle3Head else HeadConfig
    fields = dataclasses.fields(config)
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    return config(**{field.name: raw[field.name] for field in fields if field.name in raw})


def rope_fields(raw: dict) -> dict:
    """`rope_theta` and `rope_scaling` where the config has transformers 5's `rope_parameters`."""
    found = raw.get("rope_parameters")
    if not found:
        return {}
    scaled = scaling_type(found) != "default"
    fields = {"rope_scaling": found if scaled else None}
    return fields | ({"rope_theta": found["rope_theta"]} if "rope_theta" in found else {})


def check_shapes(head: Head, weights: dict[str, Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [
        f"{name} is not part of an {head.config.kind} head" for name in found.keys() - wanted.keys()
    ]
    wrong += [
        f"{name} has shape {found[name]}, wanted {wanted[name]}"
        for name in wanted.keys() & found.keys()
        if found[name] != wanted[name]
    ]
    if wrong:
        raise ValueError("; ".join(sorted(wrong)))


def check_mapping(config: HeadConfig, offsets: Tensor | None, used: Tensor | None) -> None:
    """`d2t` [Vd] must name target ids, each once, and the boolean `t2d` [V] the same ones."""
    size = config.vocab_size
    if used is not None and tuple(used.shape) != (size,):
        raise ValueError(f"t2d has shape {tuple(used.shape)}, wanted ({size},)")
    ids = torch.arange(size) if offsets is None else offsets + torch.arange(len(offsets))
    if not (0 <= int(ids.min()) and int(ids.max()) < size):
        raise ValueError(
            f"d2t: wanted target ids in 0..{size - 1}, got {int(ids.min())}..{int(ids.max())}"
        )
    count = torch.bincount(ids, minlength=size)
    if int(count.max()) > 1:
        raise ValueError(f"d2t: target id {int(count.argmax())} has {int(count.max())} draft ids")
    if used is not None and not torch.equal(used.bool(), count.bool()):
        odd = int((used.bool() != count.bool()).nonzero()[0])
        raise ValueError(
            f"t2d and d2t disagree on target id {odd}: t2d says {bool(used[odd])}, "
            f"d2t {bool(count[odd])}"
        )


def save_head(
    head: Head,
    path: str | os.PathLike,
    dtype: torch.dtype = torch.float16,
    layout: str = "published",
    target: str | os.PathLike | None = None,
) -> None:
    """Write a head; each file is whole at any moment, the old one or the new.

    Args:
        dtype: of the weights in the file.
        layout: "published", that of EAGLE's authors, or "speculators" (EAGLE-3 only).
        target: for "speculators", the folder of the target, which the config names.

    Raises:
        ValueError: another layout, or one that has no place for such a head or wants a target.
    """
    one_of("head", head, Head, "an Eagle2Head or Eagle3Head")
    one_of("path", path, (str, os.PathLike), "a folder")
    check_dtype(dtype)
    if layout not in LAYOUTS:
        raise ValueError(f"layout: wanted {' or '.join(LAYOUTS)}, got {layout!r}")
    path = Path(path)
    weights = {
        name: tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    ids = head.draft_to_target
    if isinstance(head, Eagle3Head) and ids is not None:
        used = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        used[ids.cpu()] = True
        weights["t2d"] = used
    if layout == "speculators":
        if not isinstance(head, Eagle3Head):
            raise ValueError("layout: speculators 0.9 has no place for an EAGLE-1/2 head")
        if head.config.qkv_bias:
            raise ValueError("layout: speculators 0.9 has no q, k and v biases without one of o")
        if not isinstance(target, str | os.PathLike):
            raise ValueError(
                "target: wanted its folder, since speculators reads a head with it, got "
                f"{type(target).__name__}"
            )
        config = speculators.config_of(head.config, dtype, target)
        weights = rename(weights, "midlayer.", "layers.0.")
    else:
        config = published_config(head)
    path.mkdir(parents=True, exist_ok=True)
    with whole(path / "model.safetensors") as fresh, whole(path / "config.json") as fresh_config:
        save_file(weights, fresh, {"format": "pt"})
        fresh_config.write_text(json.dumps(config, indent=2) + "\n")


def published_config(head: Head) -> dict:
    values = {"model_type": "llama", **dataclasses.asdict(head.config)}
    if isinstance(head, Eagle3Head):
        values = {"architectures": ["LlamaForCausalLMEagle3"], **values}
        values["draft_vocab_size"] = head.config.draft_size
        del values["bias"]
    return {name: value for name, value in values.items() if value is not None}
