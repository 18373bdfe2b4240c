"""The commands about head files: `inspect` says what a head is, `convert` writes it anew."""

import enum
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn
from transformers import AutoConfig

from .checks import naming, read_json
from .heads import Head, load_head, save_head
from .options import Target
from .published import fitting
from .rope import scaling_type
from .weights import read_tensor

Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a head.")]


class Layout(str, enum.Enum):
    published = "published"
    speculators = "speculators"


class Dtype(str, enum.Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


def inspect(
    folder: Folder,
    model: Target = None,
) -> None:
    """Say what a head is and which targets it fits; exit code 1 if not the one given."""
    raw = read_json(folder / "config.json")
    head = load_head(folder)
    for name, value in facts(head, "speculators_model_type" in raw).items():
        print(f"{name}: {value}")
    if model is None:
        return
    wrong = misfits(head, model)
    print(f"{model}: {'; '.join(wrong) if wrong else 'fits'}")
    if wrong:
        raise typer.Exit(1)


def facts(head: Head, speculators: bool) -> dict[str, str]:
    shape = head.config
    layers = shape.feature_layers(0) and (
        ", ".join(map(str, getattr(shape, "eagle_aux_hidden_state_layer_ids", None) or ()))
        or "2, n // 2, n - 3"
    )
    reads = f"the inputs of layers {layers}" if layers else "the last hidden state"
    scaling = scaling_type(shape.rope_scaling)
    count = sum(weight.numel() for weight in head.parameters())
    return {
        "head": f"{shape.kind}, in the layout of {'speculators' if speculators else 'its authors'}",
        "parameters": f"{count:,}",
        "hidden_size": f"{shape.hidden_size}, {shape.num_attention_heads} heads and "
        f"{shape.num_key_value_heads} key-value heads of {shape.head_dim}, "
        f"intermediate_size {shape.intermediate_size}",
        "vocabulary": f"drafts {shape.draft_size:,} of {shape.vocab_size:,} ids",
        "reads": f"{reads} of the target, {shape.feature_size} wide",
        "rope": f"theta {shape.rope_theta:g}, scaling {scaling}",
        "draft temperature": f"{shape.draft_temperature:g}",
        "embedding": "the target's" if head.embed_tokens is None else "its own",
        "fits": f"targets with hidden_size {shape.target_size}, vocab_size {shape.vocab_size}"
        + (", 7 layers or more" if layers == "2, n // 2, n - 3" else "")
        + "; of the published shapes: "
        + (", ".join(fitting(shape)) or "none"),
    }


def misfits(head: Head, model: Path) -> list[str]:
    with naming(f"--model {model}"):
        config = AutoConfig.from_pretrained(model)
    return head.config.misfits(config.hidden_size, config.vocab_size, config.num_hidden_layers)


def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="Where to write it.")],
    layout: Annotated[Layout, typer.Option(help="Whose layout.")] = Layout.published,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.float16,
    model: Target = None,
    embedding: Annotated[
        bool, typer.Option("--embedding", help="Give it a copy of the target's embedding.")
    ] = False,
) -> None:
    """Write a head anew: safetensors, in the layout of EAGLE's authors or of speculators 0.9."""
    if out.is_file() or out.is_dir() and any(out.iterdir()):
        raise ValueError(f"OUT: wanted a new or an empty folder, got {out}")
    if embedding and model is None:
        raise ValueError("--embedding: wanted --model to take it from")
    head = load_head(folder)
    wrong = misfits(head, model) if model else []
    if wrong:
        raise ValueError(f"--model {model}: {'; '.join(wrong)}")
    if embedding and model is not None and head.embed_tokens is None:
        head.embed_tokens = nn.Embedding.from_pretrained(target_embedding(model).float())
    fresh = out.with_name(out.name + ".partial")
    try:
        save_head(head, fresh, getattr(torch, dtype.value), layout.value, model)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    print(f"{out}: {head.config.kind}, {layout.value} layout, {dtype.value}")


def target_embedding(model: Path) -> torch.Tensor:
    return read_tensor(model, "model.embed_tokens.weight", "embed_tokens.weight")
