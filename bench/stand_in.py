"""The loop on networks of a published shape with random weights: time per stage, share of trees.

    python bench/stand_in.py --device cuda --json FILE      # 8B-shaped Llama, bfloat16
    python bench/stand_in.py --shape tiny --dtype float32 --device cpu

Random networks accept next to nothing, which changes no time of a cycle. On a GPU a cycle is one
graph: its kernels are timed by the profiler and told apart by name.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated

import eagle2.decode as loop
import torch
import typer
from eagle2.baseline import generate as plain
from eagle2.cycle import StaticCycle, cuda_graph
from eagle2.drafter import TreeConfig
from eagle2.heads import Eagle2Head, HeadConfig
from eagle2.published import TARGETS
from published import target_config
from rich.console import Console
from rich.table import Table
from timing import context
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle2_kernels import ops

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = [name for name in TINY if name != "num_hidden_layers"]
MANAGEMENT = {*ops.OPERATORS}


def networks(shape: str, device: str, dtype: torch.dtype) -> tuple[PreTrainedModel, Eagle2Head]:
    """A target and a head of random weights, made on the device."""
    config = target_config("llama3.1-8b", **TINY) if shape == "tiny" else target_config(shape)
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        head = Eagle2Head(HeadConfig(**{name: getattr(config, name) for name in SIZES})).to(dtype)
    model, head = (net.to_empty(device=device).eval() for net in (model, head))
    for weight in (*model.parameters(), *head.parameters()):
        weight.data.normal_(std=0.02) if weight.dim() > 1 else weight.data.fill_(1)
    # what its constructor computes, and to_empty does not keep
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model, head


def kernel_times(run) -> dict[str, float]:
    """Device microseconds of each kernel name in one call of `run`."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return {event.key: event.device_time_total for event in trace.key_averages()}


def is_management(kernel: str) -> bool:
    """Whether a kernel is one of ours but for attention, which belongs to the networks."""
    name = kernel.removesuffix("_kernel")
    return "attention" not in name and any(name.startswith(op) for op in MANAGEMENT)


@torch.inference_mode()
def main(
    shape: Annotated[str, typer.Option(help=f"Of {', '.join(TARGETS)}, tiny.")] = "llama3.1-8b",
    device: str = "cuda",
    dtype: str = "bfloat16",
    batch: int = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 512,
    new: Annotated[int, typer.Option(help="New tokens of each row.")] = 64,
    top_k: int = 10,
    depth: int = 6,
    nodes: int = 60,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    model, head = networks(shape, device, getattr(torch, dtype))
    prompts = torch.randint(model.config.vocab_size, (batch, prompt), device=device)
    settings = {"max_new_tokens": new, "eos_token_id": []}
    config = TreeConfig(top_k, depth, nodes)
    runs = {
        "plain": lambda: plain(model, prompts, **settings),
        "tree": lambda: loop.generate(model, head, prompts, tree=config, **settings),
    }
    texts, seconds, results = {}, {}, {}
    for name, run in runs.items():
        run()  # compiles
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            results[name] = run()
            taken.append(time.perf_counter() - started)
        seconds[name], texts[name] = statistics.median(taken), results[name].tokens
    rows = {
        "shape": shape,
        "batch": batch,
        "prompt": prompt,
        "same_text": texts["plain"] == texts["tree"],
        "plain_ms_per_token": seconds["plain"] / new * 1e3,
        "tau": results["tree"].statistics.tau,
        "stages_s": results["tree"].statistics.stage_seconds,
    }
    if torch.device(device).type == "cuda":
        rows |= time_cycle(model, head, prompts, config)
    table = Table("figure", "value", box=None)
    for name, value in rows.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps({"context": context(), **rows}, indent=1) + "\n")


def time_cycle(model, head, prompts, config: TreeConfig) -> dict:
    """One captured cycle: its time by replay, and which part of its kernels manages trees."""
    made = []

    class Kept(StaticCycle):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    make_cycle = loop.make_cycle
    loop.make_cycle = lambda *arguments: Kept(*arguments, cuda_graph)
    try:
        loop.generate(model, head, prompts, max_new_tokens=8, eos_token_id=[], tree=config)
    finally:
        loop.make_cycle = make_cycle
    (cycle,) = made

    def start_again():
        cycle.state.prefix_len.fill_(prompts.shape[1])
        cycle.num_nodes.fill_(config.num_nodes)  # the last cycle of a text has fewer

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(20):
        start_again()
        begin.record()
        cycle.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    start_again()
    kernels = kernel_times(cycle.replay)
    ours = sum(spent for name, spent in kernels.items() if is_management(name))
    top = sorted(kernels.items(), key=lambda item: -item[1])[:40]
    return {
        "cycle_us": statistics.median(times),
        "kernels_us": sum(kernels.values()),
        "management_us": ours,
        "management_share": ours / max(sum(kernels.values()), 1e-9),
        "kernels": dict(top),
    }


if __name__ == "__main__":
    typer.run(main)
