"""Random targets and heads of the published shapes: files, loading, memory, time per stage.

    python bench/published.py write llama3.1-8b FOLDER --kind eagle3  # FOLDER/target, FOLDER/head
    python bench/published.py measure FOLDER --device cuda
    python bench/published.py layers llama3.1-8b --kind eagle3        # one layer, on any machine

Random networks accept next to nothing, which changes no time of a cycle.
"""

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import eagle2.decode as loop
import torch
import typer
from eagle2 import Eagle2Head, Eagle3Head, TreeConfig, load_head, save_head
from eagle2.cycle import Cycle
from eagle2.published import TARGETS, head_shape
from eagle2.stopwatch import Stopwatch
from eagle2.target import Target
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from eagle2_kernels import Candidates, Tree, rerank

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Name = Annotated[str, typer.Argument(help=f"One of {', '.join(TARGETS)}.")]
Kind = Annotated[str, typer.Option(help="eagle2 or eagle3.")]
Dtype = Annotated[str, typer.Option(help="float16, bfloat16 or float32.")]
HEADS = {"eagle2": Eagle2Head, "eagle3": Eagle3Head}
SHARD = 4 << 30
NOISE = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.02


def target_config(name: str, **changes):
    shape = TARGETS[name]._asdict() | changes
    rope = {"rope_type": "default", "rope_theta": shape.pop("rope_theta")}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(
        shape.pop("model_type"), **shape, **ids, rope_parameters=rope,
        max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip


def fill(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Small noise for a matrix, ones for a norm; one block over and over: 16 GB in seconds."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype)
    count = shape.numel()
    block = NOISE[:count].to(dtype)
    return block.repeat(-(-count // len(block)))[:count].view(shape)


def shards(weights: dict[str, torch.Size], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    held, size = {}, 0
    for name, shape in weights.items():
        held[name] = fill(shape, dtype)
        size += held[name].nbytes
        if size >= SHARD:
            yield held
            held, size = {}, 0
    if held:
        yield held


def random_head(name: str, kind: str, dtype: torch.dtype) -> nn.Module:
    with torch.device("meta"):
        head = HEADS[kind](head_shape(name, kind))
    head.load_state_dict(
        {
            key: torch.zeros(value.shape, dtype=value.dtype)
            if key == "d2t"
            else fill(value.shape, dtype)
            for key, value in head.state_dict().items()
        },
        assign=True,
    )
    return head.eval()


@app.command()
def write(name: Name, folder: Path, kind: Kind = "eagle2", dtype: Dtype = "bfloat16") -> None:
    """Write FOLDER/target and FOLDER/head, without ever holding the whole target."""
    wanted, config = getattr(torch, dtype), target_config(name)
    config.dtype = wanted
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = {key: value.shape for key, value in model.named_parameters()}
    target = folder / "target"
    model.config.save_pretrained(target)
    places, total = {}, 0
    for number, held in enumerate(shards(weights, wanted)):
        file = f"model-{number:05}.safetensors"
        save_file(held, target / file, {"format": "pt"})
        places |= dict.fromkeys(held, file)
        total += sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    save_head(random_head(name, kind, wanted), folder / "head", wanted)
    print(f"{target}: {total / 1e9:.2f} GB in {number + 1} file(s); {folder / 'head'}: {kind}")


@app.command()
@torch.inference_mode()
def measure(
    folder: Path,
    device: str = "cuda",
    dtype: Dtype = "bfloat16",
    tree: tuple[int, int, int] = (10, 6, 60),
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option(help="New tokens.")] = 64,
) -> None:
    """Load and decode: seconds, memory, milliseconds per cycle and stage."""
    wanted, figures = getattr(torch, dtype), {}

    def timed(name: str, run: Callable):
        begin = time.perf_counter()
        result = run()
        figures[f"{name}, s"] = time.perf_counter() - begin
        return result

    model = timed(
        "load target",
        lambda: AutoModelForCausalLM.from_pretrained(folder / "target", dtype=wanted).to(device),
    ).eval()
    head = timed("load head", lambda: load_head(folder / "head", wanted).to(device))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, prompt), generator=generator)
    options = {"max_new_tokens": new, "eos_token_id": [], "tree": TreeConfig(*tree)}
    loop.generate(model, head, ids, **options)  # compiles
    whole = loop.generate(model, head, ids, **options).statistics
    figures["tokens / s"] = whole.new_tokens / whole.seconds
    make_cycle, stopwatch = loop.make_cycle, loop.Stopwatch
    try:  # stage by stage: no graph, and every lap waits for the device
        loop.make_cycle, loop.Stopwatch = Cycle, Waiting
        stages = loop.generate(model, head, ids, **options).statistics
    finally:
        loop.make_cycle, loop.Stopwatch = make_cycle, stopwatch
    for stage, spent in stages.stage_seconds.items():
        count = 1 if stage == "prefill" else stages.cycles
        figures[f"{stage}, ms"] = spent / count * 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.device(device).type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    figures["peak memory, GB"] = peak / 1e9
    show(figures)


class Waiting(Stopwatch):
    def lap(self, stage: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        super().lap(stage)


@app.command()
@torch.inference_mode()
def layers(
    name: Name,
    kind: Kind = "eagle2",
    device: str = "cpu",
    dtype: Dtype = "float32",
    prefix: Annotated[int, typer.Option(help="Committed tokens.")] = 512,
    nodes: Annotated[int, typer.Option(help="Nodes verified.")] = 60,
    top_k: Annotated[int, typer.Option(help="Leaves of a level.")] = 10,
) -> None:
    """Time one layer of the target, times their number, and each part of the head."""
    wanted, count = getattr(torch, dtype), TARGETS[name].num_hidden_layers
    config = target_config(name, num_hidden_layers=1, vocab_size=8)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=wanted).eval()
    target, head = Target(model), random_head(name, kind, wanted).to(device)
    cache = target.new_cache(1, prefix + nodes)
    prefix_len = torch.tensor([prefix], dtype=torch.int32, device=device)
    size, vocab = target.hidden_size, TARGETS[name].vocab_size
    lm_head = nn.Linear(1, 1, bias=False, device="meta")
    lm_head.weight = nn.Parameter(fill(torch.Size((vocab, size)), wanted).to(device), False)
    to_logits = head.to_logits(lm_head)

    def noise(*shape: int) -> Tensor:
        return torch.randn(1, *shape, device=device).to(wanted)

    shape = head.config
    rows = noise(prefix, shape.num_key_value_heads, shape.head_dim)

    def attend(q, k, v):
        k, v = (torch.cat((rows, new), 1).transpose(1, 2) for new in (k, v))
        mixed = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True)
        return mixed.transpose(1, 2)

    places = torch.arange(top_k, device=device)
    hidden = noise(top_k, shape.hidden_size)
    features, last = noise(nodes, shape.feature_size), noise(nodes, size)
    figures = {}
    for tree in (chain(1, device), chain(nodes, device)):
        spent = clock(lambda tree=tree: target.tree_pass(tree, prefix_len, prefix, cache))
        width = tree.tokens.shape[1]
        figures[f"target layer, {width} row(s), ms"] = spent
        figures[f"target, {count} layers, {width} row(s), ms"] = spent * count
    figures[f"target lm_head, {nodes} rows, ms"] = clock(lambda: lm_head(last))
    figures["head features, 7 rows, ms"] = clock(lambda: head.features(features[:, :7]))
    figures[f"head layer, {top_k} rows, ms"] = clock(lambda: head(hidden, hidden, places, attend))
    figures[f"head lm_head, {top_k} rows, ms"] = clock(lambda: to_logits(hidden))
    figures["head, GB"] = sum(weight.nbytes for weight in head.parameters()) / 1e9
    layer = sum(weight.nbytes for weight in model.model.layers.parameters())
    figures["target, GB"] = (count * layer + 2 * lm_head.weight.nbytes) / 1e9
    show(figures)


def chain(nodes: int, device: str) -> Tree:
    """A tree of that many nodes, each the child of the one before."""
    steps = torch.arange(max(nodes - 1, 1), dtype=torch.int32)[None]
    candidates = Candidates(torch.zeros_like(steps, dtype=torch.int64), -steps.float(), steps - 1)
    tree = rerank(candidates, torch.zeros(1, dtype=torch.int64), nodes)
    return Tree(*(field.to(device) for field in tree))


def clock(run: Callable[[], object], times: int = 3) -> float:
    """Milliseconds of the fastest run after the first."""
    watch, best = Waiting(), float("inf")
    run()
    for _ in range(times):
        watch.seconds.clear()
        watch.lap("before")
        run()
        watch.lap("run")
        best = min(best, watch.seconds["run"])
    return best * 1e3


def show(figures: dict[str, float]) -> None:
    table = Table("figure", "value", box=None)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)


if __name__ == "__main__":
    app()
