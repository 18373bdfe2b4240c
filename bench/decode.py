"""Speculative against plain decoding on real prompts: tau, speed-up, shapes of the trees.

    python bench/decode.py                                   # the prompts beside this file
    python bench/decode.py --prompts FOLDER --every 4 --threads 2 --tree 10,6,60 --tree 3,4,6

Every answer is checked against plain decoding before a figure is printed. Runs are interleaved:
plain, each tree, and transformers' own generate take turns on every prompt.
"""

import contextlib
import json
import platform
import statistics
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from eagle2 import TreeConfig, baseline, embedded, generate, load_head, packed
from eagle2.near_ties import part
from eagle2.requests import Sampling
from eagle2.target import Target
from eagle2.text import encode
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_tasks(path: Path, every: int, limit: int | None) -> dict[str, list[str]]:
    """Prompts by task: one file per task in a folder, or one file with categories."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    tasks = defaultdict(list)
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        for row in rows[every - 1 :: every]:
            tasks[file.stem if path.is_dir() else row["category"]].append(row["turns"][0])
    return {task: prompts[:limit] for task, prompts in tasks.items()}


class Measured:
    """What one way of decoding did on one task."""

    def __init__(self):
        self.seconds: list[float] = []
        self.tokens = self.cycles = self.cycle_tokens = self.near_ties = self.different = 0
        self.shapes: list[tuple[int, int]] = []  # depth and largest level of every tree
        self.stages = defaultdict(float)

    def add(self, run, seconds: float) -> None:
        self.seconds.append(seconds)
        self.tokens += run.statistics.new_tokens
        self.cycles += run.statistics.cycles
        self.cycle_tokens += run.statistics.cycle_tokens
        for stage, spent in run.statistics.stage_seconds.items():
            self.stages[stage] += spent

    @property
    def tau(self) -> float:
        return self.cycle_tokens / max(self.cycles, 1)


def shape_of(tree) -> tuple[int, int]:
    depths = tree.depths[0, : int(tree.num_nodes[0])]
    return int(depths.max()), int(depths.bincount().max())


def measure(model, head, tokenizer, tasks, trees, length, law, with_transformers):
    target = Target(model)
    found = {task: defaultdict(Measured) for task in tasks}
    work = [(task, text) for task, prompts in tasks.items() for text in prompts]
    for task, text in tqdm(work, desc="prompts", disable=None):
        row, rows = encode(tokenizer, text), found[task]
        started = time.perf_counter()
        plain = baseline.generate(model, [row], max_new_tokens=length, **law)
        rows["plain"].add(plain, time.perf_counter() - started)
        for name, config in trees.items():
            shapes = rows[name].shapes
            started = time.perf_counter()
            run = generate(
                model,
                head,
                [row],
                max_new_tokens=length,
                tree=config,
                on_cycle=lambda tree, path, shapes=shapes: shapes.append(shape_of(tree)),
                **law,
            )
            rows[name].add(run, time.perf_counter() - started)
            parting = part(target, row, plain.tokens[0], run.tokens[0], Sampling.of(1, **law))
            if parting:
                near = parting.near_tie
                rows[name].near_ties += near
                rows[name].different += not near
        if with_transformers:
            ids = torch.tensor([row])
            started = time.perf_counter()
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False
            )
            rows["transformers"].seconds.append(time.perf_counter() - started)
    return found


def spread(values: list[int]) -> str:
    if len(values) < 2:
        return ""
    low, _, middle, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{low:.0f}-{high:.0f}"


def report(found, names, console: Console) -> list[dict]:
    """Print the table; return its rows. A row with a text that differs has no speed-up."""
    table = Table()
    for column in ("task", "tree", "tau", "speed-up", "tokens/s", "depth", "width", "near-ties"):
        table.add_column(column)
    lines = []
    for task, rows in found.items():
        for name in names:
            if name not in rows:
                continue
            row, plain = rows[name], rows["plain"].seconds
            ratios = [a / b for a, b in zip(plain, row.seconds, strict=True)]
            ratio = sum(plain) / sum(row.seconds) if not row.different else float("nan")
            line = {
                "task": task,
                "tree": name,
                "prompts": len(plain),
                "tau": round(row.tau, 3),
                "speed_up": round(ratio, 3),
                "speed_up_median": round(statistics.median(ratios), 3),
                "seconds": round(sum(row.seconds), 2),
                "depth": spread([depth for depth, _ in row.shapes]),
                "width": spread([width for _, width in row.shapes]),
                "near_ties": row.near_ties,
                "different": row.different,
                "stage_seconds": {stage: round(s, 3) for stage, s in row.stages.items()},
            }
            lines.append(line)
            speed = f"{row.tokens / sum(row.seconds):.1f}" if row.tokens else ""
            table.add_row(
                task,
                name,
                f"{row.tau:.2f}" if row.cycles else "",
                f"{ratio:.2f}",
                speed,
                line["depth"],
                line["width"],
                str(row.near_ties) + (f", {row.different} DIFFER" if row.different else ""),
            )
    console.print(table)
    for name in names:
        chosen = [line for line in lines if line["tree"] == name]
        if chosen:
            tau = statistics.mean(line["tau"] for line in chosen)
            ratio = statistics.mean(line["speed_up"] for line in chosen)
            console.print(f"mean over tasks, {name}: tau {tau:.2f}, speed-up {ratio:.2f}")
    return lines


def commit() -> str:
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines, or a folder of them.")] = PROMPTS,
    every: Annotated[int, typer.Option(help="Take every n-th prompt: 4 = those held out.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Most prompts per task.")] = None,
    tree: Annotated[list[str], typer.Option(help="TOP_K,DEPTH,NUM_NODES; repeatable.")] = [  # noqa: B006
        "10,6,60",
        "3,4,6",
    ],
    model: Annotated[Path | None, typer.Option(help="Default: the embedded model.")] = None,
    head: Annotated[Path, typer.Option(help="Default: its head.")] = embedded.HEAD,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    threads: int = 2,
    with_transformers: Annotated[bool, typer.Option(help="Time generate() too.")] = False,
    pack: Annotated[bool, typer.Option(help="Lay weights out for oneDNN first.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write rows here.")] = None,
) -> None:
    torch.set_num_threads(threads)
    console, revision = Console(), commit()
    target, tokenizer = embedded.load_target(model)
    trees = {text: TreeConfig(*map(int, text.split(","))) for text in tree}
    law = {"temperature": temperature, "seed": seed}
    tasks = read_tasks(prompts, every, limit)
    draft = load_head(head, target.dtype)
    warm = encode(tokenizer, "Hello")
    with packed(target, draft) if pack else contextlib.nullcontext():
        generate(target, draft, [warm], max_new_tokens=8, tree=trees[tree[0]])
        found = measure(
            target, draft, tokenizer, tasks, trees, max_new_tokens, law, with_transformers
        )
    lines = report(found, ["plain", *trees, "transformers"], console)
    context = {
        "commit": revision,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "packed": pack,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
    }
    console.print(context)
    if json_file:
        json_file.write_text(json.dumps({"context": context, "rows": lines}, indent=1) + "\n")
    if any(line["different"] for line in lines):
        raise SystemExit("some text differs from plain decoding by more than rounding")


if __name__ == "__main__":
    typer.run(main)
