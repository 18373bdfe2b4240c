"""The command line: `eagle2 generate | tree | inspect | convert | calibrate | data | ...`."""

import contextlib
import json
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.tree import Tree as RichTree
from safetensors import SafetensorError

from . import baseline, calibrate_cli, head_cli, train_cli, tune_cli
from .engine import Engine
from .env import describe
from .near_ties import part
from .options import Head, MaxNewTokens, Model, Seed, Threads
from .packed import packed
from .requests import Generation, Sampling
from .text import Stream, encode, read_prompts

app = typer.Typer(
    help="EAGLE-2 speculative decoding: the model's own text, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console(highlight=False)

Shape = Annotated[
    str | None,
    typer.Option(
        "--tree",
        help="TOP_K,DEPTH,NUM_NODES of the draft trees, e.g. 10,6,60; auto = sized by the profile "
        "of `eagle2 tune`, or that of FILE.json.",
    ),
]
Raw = Annotated[bool, typer.Option("--raw", help="Use the prompt as it is, no chat template.")]


@app.command(
    epilog="**Examples:** `eagle2 generate 'Why is the sky blue?' --compare`, "
    "`eagle2 generate --batch prompts.jsonl --json > answers.jsonl`, "
    "`echo Hello | eagle2 generate -`"
)
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    model: Model = None,
    head: Head = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1 = off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="0 = off.")] = 0,
    min_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="0 = off.")] = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    batch: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="JSON lines with a 'prompt', or 'turns' whose first is taken.",
        ),
    ] = None,
    tree: Shape = None,
    threads: Threads = None,
    raw: Raw = False,
    pack: Annotated[
        bool, typer.Option(help="Lay CPU weights out anew first: faster, twice the memory.")
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode plainly too; check the text, print speeds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per prompt.")] = False,
) -> None:
    """Answer a prompt, or a file of prompts; text appears as it is committed."""
    prompts = read_prompts(prompt, batch)
    engine = Engine(model, head, tree, threads)
    rows = [encode(engine.tokenizer, text, raw) for text in prompts]
    law: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    stream = Stream(engine.tokenizer, sys.stdout if len(rows) == 1 and not as_json else None)
    plain = None
    with packed(engine.model, engine.head) if pack else contextlib.nullcontext():
        answer = engine.generate(rows, max_new_tokens=max_new_tokens, on_commit=stream, **law)
        stream.close()
        if compare:
            plain = baseline.generate(engine.model, rows, max_new_tokens=max_new_tokens, **law)
    texts = [engine.tokenizer.decode(ids, skip_special_tokens=True) for ids in answer.tokens]
    if as_json:
        for line in reports(prompts, texts, answer, plain):
            print(json.dumps(line, ensure_ascii=False))
    elif len(rows) > 1:
        for text in texts:
            print(text, end="\n\n")
    if plain:
        shown = Console(stderr=True, highlight=False) if as_json else console
        sampling = Sampling.of(1, **law, device=engine.target.device)
        if not compare_texts(engine, rows, answer, plain, sampling, shown):
            raise typer.Exit(1)


def reports(prompts, texts, answer: Generation, plain: Generation | None):
    statistics = answer.statistics
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        line = {
            "prompt": prompt,
            "text": text,
            "tokens": answer.tokens[row],
            "finish_reason": answer.finish_reasons[row],
            "batch_tau": round(statistics.tau, 4),
            "batch_seconds": round(statistics.seconds, 4),
        }
        if plain:
            line["same_as_plain"] = answer.tokens[row] == plain.tokens[row]
            line["batch_plain_seconds"] = round(plain.statistics.seconds, 4)
        yield line


def compare_texts(engine: Engine, rows, answer, plain, sampling: Sampling, out: Console) -> bool:
    """Print speeds and whether the texts are one; False where they differ beyond rounding."""
    partings = [
        part(engine.target, *texts, sampling)
        for texts in zip(rows, plain.tokens, answer.tokens, strict=True)
    ]
    table = Table(title=f"{len(rows)} prompt(s), {torch.get_num_threads()} thread(s)")
    for column in ("", "new tokens", "seconds", "tokens/s", "tau"):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in (("plain", plain), (engine.head.config.kind, answer)):
        statistics = run.statistics
        speed = statistics.new_tokens / statistics.seconds
        table.add_row(
            name,
            str(statistics.new_tokens),
            f"{statistics.seconds:.2f}",
            f"{speed:.1f}",
            f"{statistics.tau:.2f}",
        )
    out.print(table)
    ratio = plain.statistics.seconds / answer.statistics.seconds
    ratio *= answer.statistics.new_tokens / plain.statistics.new_tokens
    out.print(f"speed-up {ratio:.2f}x")
    for row, parting in enumerate(partings):
        if parting:
            verdict = "a near-tie within rounding" if parting.near_tie else "MORE THAN ROUNDING"
            out.print(
                f"prompt {row}: texts part at new token {parting.index}: gap {parting.gap:.2g}, "
                f"rounding {parting.rounding:.2g}: {verdict}",
                soft_wrap=True,
            )
    if not any(partings):
        out.print("same text: yes")
    return all(parting is None or parting.near_tie for parting in partings)


@app.command(epilog="**Example:** `eagle2 tree 'Name three colours.' --cycle 3`")
def tree(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: Model = None,
    head: Head = None,
    cycle: Annotated[int, typer.Option(min=1, help="Which cycle to show.")] = 1,
    shape: Shape = None,
    raw: Raw = False,
) -> None:
    """Draw the draft tree of one cycle: token, path probability, * where it was accepted."""
    engine = Engine(model, head, shape, None)
    row = encode(engine.tokenizer, read_prompts(prompt, None)[0], raw)
    seen = []
    longest = 2 + cycle * (engine.tree.depth + 1) + engine.tree.depth
    engine.generate(
        [row], max_new_tokens=longest, on_cycle=lambda tree, path: seen.append((tree, path))
    )
    if len(seen) < cycle:
        raise ValueError(f"--cycle: the answer took {len(seen)} cycle(s), wanted number {cycle}")
    drafted, path = seen[cycle - 1]
    accepted = set(path[0].tolist())
    branches: list[RichTree] = []
    for node in range(int(drafted.num_nodes[0])):
        token = engine.tokenizer.decode([int(drafted.tokens[0, node])])
        probability = math.exp(float(drafted.scores[0, node]))
        mark = " *" if node in accepted else ""
        label = f"{token!r} {probability:.3f}{mark}"
        parent = int(drafted.parents[0, node])
        branch = RichTree(label) if parent < 0 else branches[parent].add(label)
        branches.append(branch)
    console.print(branches[0], markup=False)


@app.command(epilog="**Example:** `eagle2 env`, or `python -m eagle2.env`")
def env() -> None:
    """Show versions, devices, and which forms of the operators are there, or why not."""
    for name, value in describe().items():
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)


app.command(epilog="**Example:** `eagle2 inspect head/ --model llama-3.1-8b/`")(head_cli.inspect)
app.command(epilog="**Example:** `eagle2 convert head/ out/ --layout speculators --model llama/`")(
    head_cli.convert
)
app.command(epilog="**Example:** `eagle2 calibrate prompts.jsonl --tree 10,6,60 --plot head.png`")(
    calibrate_cli.calibrate
)
app.command(epilog="**Example:** `eagle2 tune && eagle2 generate 'Why?' --tree auto`")(
    tune_cli.tune
)
app.command("answers", hidden=True)(train_cli.data)  # what `data` was called
app.command(epilog="**Example:** `eagle2 data prompts/ answers.jsonl --tokens 1000000 --half`")(
    train_cli.data
)
app.command(epilog="**Example:** `eagle2 train answers.jsonl --out head/ --held-out held.jsonl`")(
    train_cli.train
)


def main() -> None:
    """Entry point: errors of the user's make one line and exit code 1, Ctrl-C 130, SIGTERM 143."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clean-up runs
    try:
        app()
    except (ValueError, ImportError, OSError, SafetensorError) as error:
        print(f"eagle2: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
