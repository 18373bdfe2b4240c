"""The commands that make a head: `data` writes training text, `train` learns from it."""

import enum
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import distributed

from . import embedded
from .answers import write_answers
from .features import write_features
from .held_out import read_prompts, write_held_out
from .options import Model, Threads
from .train import train as train_head
from .training_run import read_layers

Seed = Annotated[int, typer.Option(min=0, help="Of the conversations and their order.")]


class Kind(str, enum.Enum):
    eagle2 = "eagle2"
    eagle3 = "eagle3"


def data(
    prompts: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="Folder of JSON lines with 'turns'."),
    ],
    out: Annotated[
        Path, typer.Argument(dir_okay=False, help="Answers file; features go beside it.")
    ],
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=1, help="Answer tokens wanted in all.")] = 1_000_000,
    slots: Annotated[int, typer.Option(min=1, help="Conversations written at once.")] = 128,
    seed: Seed = 0,
    half: Annotated[bool, typer.Option("--half", help="Run the model in bfloat16.")] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Answer the held-out prompts, greedily, instead.")
    ] = False,
    threads: Threads = None,
) -> None:
    """Let the model answer prompts that it mostly writes itself; stop and start at will.

    Every fourth prompt of each file is held out: neither it nor anything like it is answered.
    """
    if threads:
        torch.set_num_threads(threads)
    training, kept = (read_prompts(prompts, held_out=side) for side in (False, True))
    target, tokenizer = embedded.load_target(model)
    if held_out:
        write_held_out(target.float(), tokenizer, prompts, out)
        return
    write_answers(
        target.to(torch.bfloat16) if half else target,
        tokenizer,
        training,
        out,
        tokens=tokens,
        held_out=[turn for group in kept for turn in group],
        slots=slots,
        seed=seed,
    )


def train(
    files: Annotated[
        list[Path],
        typer.Argument(exists=True, dir_okay=False, help="Answers files, as `data` writes them."),
    ],
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the head and its checkpoint.")
    ],
    model: Model = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Answers file to report agreement on, never trained on.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 6000,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 1024,
    draft_vocab_size: Annotated[int, typer.Option(min=1, help="Ids the head can draft.")] = 8192,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Where its cosine starts.")
    ] = 4e-4,
    seed: Seed = 0,
    threads: Threads = None,
    kind: Annotated[Kind, typer.Option(help="Of the head.")] = Kind.eagle2,
    resume: Annotated[
        bool, typer.Option(help="Go on from OUT's checkpoint; else refuse where there is one.")
    ] = True,
) -> None:
    """Train a head; a run that was stopped goes on from its last checkpoint.

    On a GPU where there is one; on several by `torchrun --nproc-per-node N -m eagle2 train ...`.
    """
    if threads:
        torch.set_num_threads(threads)
    if not resume and (out / "checkpoint.pt").exists():
        raise ValueError(f"--no-resume: {out} holds a checkpoint")
    path = embedded.model_path() if model is None else model
    device = join_processes()
    target = embedded.load_model(path, torch.float32).to(device)
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    layers = read_layers(target, kind.value)
    for file in [*files, *([held_out] if held_out else [])] if first else []:
        write_features(target, file)
        if layers:
            write_features(target, file, layers=layers)
    if distributed.is_initialized():
        distributed.barrier()
    result = train_head(
        target,
        files,
        out,
        held_out=held_out,
        steps=steps,
        batch_tokens=batch_tokens,
        draft_vocab_size=draft_vocab_size,
        learning_rate=learning_rate,
        seed=seed,
        kind=kind.value,
    )
    if first:
        print(", ".join(f"{name} {value}" for name, value in result.items()))


def join_processes() -> torch.device:
    """Join the other processes if torchrun started this one; the device of this one."""
    gpus = torch.cuda.device_count()
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # where barriers and objects go
    distributed.init_process_group("nccl" if gpus else "gloo")
    return torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if gpus else "cpu")
