"""The command `tune`: measures what passes cost here, for `--tree auto`."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from tqdm import tqdm

from .engine import Engine
from .options import Head, Model, Threads
from .packed import packed
from .profile import Profile, place
from .text import encode, read_prompts
from .tune import WIDEST
from .tune import tune as measure

PROMPTS = [
    "Explain in a few sentences why the sea is salty.",
    "Anna has 3 boxes with 12 pencils each and gives 8 pencils away. How many are left?",
    "Write a Python function that counts the words of a text.",
    "What is the capital of Australia, and what is it known for?",
    "Rewrite this more politely: send me the report today, you are late again.",
    "Give three tips for learning to cook.",
]

Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="JSON lines with 'prompt' or 'turns', like those to come."
    ),
]


def tune(
    model: Model = None,
    head: Head = None,
    prompts: Prompts = None,
    rows: Annotated[
        int, typer.Option(min=1, max=2**16, help="Most rows timed: nodes times rows of a batch.")
    ] = WIDEST,
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File; default: one in the cache folder."),
    ] = None,
    threads: Threads = None,
    device: Annotated[str, typer.Option(help="Where model and head go, e.g. cuda.")] = "cpu",
    pack: Annotated[
        bool, typer.Option(help="Lay CPU weights out anew first, as `generate` does.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what draft steps and target passes cost here; `--tree auto` goes by it.

    Takes seconds with a small model. Nothing else should run meanwhile.
    """
    check_device(device)
    engine = Engine(model, head, None, threads)
    target, draft = engine.model.to(device), engine.head.to(device)
    texts = read_prompts(None, prompts) if prompts else PROMPTS
    ids = [encode(engine.tokenizer, text) for text in texts]
    with packed(target, draft) if pack else contextlib.nullcontext(), Bars() as bars:
        profile = measure(target, draft, ids, rows=rows, progress=bars)
    out = out or place(profile.setting)
    profile.write(out)
    if as_json:
        print(json.dumps({"file": str(out), **dataclasses.asdict(profile)}))
    else:
        show(profile, out)


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:  # the latter from builds without CUDA
        raise ValueError(f"--device: wanted one that works here, got {device!r}: {error}") from None


class Bars:
    """A progress bar for each stage, where a terminal is looking."""

    def __init__(self):
        self.stage, self.bar = None, None

    def __enter__(self):
        return self

    def __call__(self, stage: str, done: int, of: int) -> None:
        if stage != self.stage:
            self.__exit__()
            self.stage, self.bar = stage, tqdm(desc=stage, total=of, disable=None)
        self.bar.update(done - self.bar.n)

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.close()


def show(profile: Profile, out: Path) -> None:
    console = Console(highlight=False)
    for name, value in profile.setting.items():
        console.print(f"{name}: {value}", markup=False)
    plain = profile.target_seconds[0]
    console.print(f"plain pass: {plain * 1e3:.2f} ms; others in such passes:")
    costs = zip(profile.rows, profile.target_seconds, profile.draft_seconds, strict=True)
    for rows, target, draft in costs:
        console.print(f"{rows:5} rows: target {target / plain:.2f}, draft {draft / plain:.3f}")
    depth, nodes, pace = profile.fixed(1)
    console.print(
        f"best trees of one size: {profile.top_k},{depth},{nodes}, {pace * plain:.2f} tokens per "
        "plain pass to expect"
    )
    console.print(str(out), markup=False, soft_wrap=True)
