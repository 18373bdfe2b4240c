"""Train a head on a target's own answers: seeded and resumable."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

from .agreement import agreement
from .checks import whole_number
from .corpus import Corpus
from .features import load_conversations
from .networks import Head
from .training_run import Run, read_layers


def train(
    model,
    answers: Sequence[str | os.PathLike],
    out: str | os.PathLike,
    *,
    held_out: str | os.PathLike | None = None,
    steps: int = 6000,
    batch_tokens: int = 1024,
    draft_vocab_size: int | None = 8192,
    self_fed_steps: int = 3,
    chain_share: float = 0.5,
    step_decay: float = 1.0,
    feature_weight: float = 10.0,
    temperatures: Sequence[float] | None = None,
    learning_rate: float = 4e-4,
    warmup: int = 100,
    ema: float = 0.998,
    max_length: int = 2048,
    autocast: bool = True,
    evaluate_every: int = 500,
    checkpoint_every: int = 100,
    seed: int = 0,
    kind: str = "eagle2",
) -> dict:
    """Train a head for `model` and write it to the folder `out` (config, weights, checkpoint).

    A run that was stopped goes on from its last checkpoint; the result is that of an unbroken run.
    Answers files may grow meanwhile: conversations added to them join at the next epoch. Under
    torchrun, with torch.distributed initialised, the processes take turns along one order of
    batches, gradients are averaged over them, and all go on from one checkpoint, which the first
    one writes and all must be able to read.

    Args:
        model: the target, a Llama-family causal LM of transformers, in float32.
        answers: JSONL files as `write_answers` makes them, with their features beside them.
        held_out: such a file kept out of training, to report agreement on.
        steps: optimiser steps; the learning rate falls to zero along a cosine over them.
        batch_tokens, max_length, temperatures: see `Corpus`.
        self_fed_steps, chain_share, step_decay, feature_weight: see `Objective`.
        ema: decay of the running mean of the weights, which is what is written.
        autocast: bfloat16 products. Master weights are float32 either way.
        kind: "eagle2", or "eagle3", whose layers' inputs must be there (`write_features`).

    Returns:
        `step`, `loss` (a running mean) and, with held_out, `agreement`, a list by drafting step,
        and `tau`, of a chain: see `Agreement`.
    """
    whole_number("seed", seed, 0)
    out = Path(out)
    size = model.config.hidden_size
    sizes = size, size * len(read_layers(model, kind))
    corpus = Corpus(sizes[0], answers, batch_tokens, max_length, temperatures, seed, sizes[1])
    run = Run(model, corpus, out, draft_vocab_size, kind)
    objective = run.objective(
        steps=self_fed_steps,
        share=chain_share,
        step_decay=step_decay,
        feature_weight=feature_weight,
    )
    optimizer = ScaledAdamW(
        run.head, run.scale, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    run.resume(optimizer)
    held = load_conversations(held_out, *sizes) if held_out and run.rank == 0 else []
    if held_out and run.rank == 0 and not held:
        raise ValueError("held_out: wanted one conversation or more, got none")
    out.mkdir(parents=True, exist_ok=True)
    precision = contextlib.nullcontext
    if autocast:
        precision = lambda: torch.autocast(model.device.type, torch.bfloat16)  # noqa: E731
    bar = tqdm(total=steps, initial=run.state.step, desc="train", unit="step", disable=None)
    with bar:
        while run.state.step < steps:
            batch, draw = run.next_batch()
            optimizer.param_groups[0]["lr"] = learning_rate * schedule(
                run.state.step, steps, warmup
            )
            with precision():
                loss = objective.loss(run.head, batch, draw)
            optimizer.zero_grad()
            loss.backward()
            average_gradients(run.head)
            nn.utils.clip_grad_norm_(run.head.parameters(), 1.0)
            optimizer.step()
            run.advance(float(loss.detach()), ema)
            bar.update()
            bar.set_postfix(loss=f"{run.state.loss:.3f}", epoch=run.state.epoch)
            last = run.state.step == steps
            if held and (last or run.state.step % evaluate_every == 0):
                state = run.state
                state.agreement, state.tau = agreement(run.mean, objective, held)
                shown = " ".join(f"{share:.3f}" for share in state.agreement)
                bar.write(
                    f"step {state.step} loss {state.loss:.4f} agreement {shown} "
                    f"chain tau {state.tau:.2f}"
                )
            if last or run.state.step % checkpoint_every == 0:
                run.save(optimizer)
    shown = ("step", "loss", "agreement", "tau")
    return {name: getattr(run.state, name) for name in shown}


def average_gradients(head: Head) -> None:
    """Over the processes of a torch.distributed run; nothing to do in a run of one process."""
    if distributed.is_initialized():
        for parameter in head.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()


class ScaledAdamW(torch.optim.AdamW):
    """AdamW on weights seen through fixed linear maps (`step_scales`): with W = left A right, the
    steps are those AdamW would take on A."""

    def __init__(self, head: Head, scales: dict[str, dict[str, Tensor]], **settings):
        super().__init__(head.parameters(), **settings)
        self.scaled = [(p, scales[name]) for name, p in head.named_parameters() if name in scales]

    @torch.no_grad()
    def step(self) -> None:
        before = [p.clone() for p, _ in self.scaled]
        for p, scale in self.scaled:
            p.grad = self.through(p.grad, **scale)
        super().step()
        for (p, scale), old in zip(self.scaled, before, strict=True):
            p.copy_(old + self.through(p - old, **scale))

    @staticmethod
    def through(x: Tensor, left: Tensor | None = None, right: Tensor | None = None) -> Tensor:
        x = x if left is None else left @ x
        return x if right is None else x * right


def schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * float(np.cos(np.pi * (step - warmup) / max(1, steps - warmup)))
