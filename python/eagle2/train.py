"""Train an EAGLE-2 head on a target's own answers: seeded and resumable."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

from .agreement import agreement
from .corpus import Corpus
from .features import Conversation, load_conversations
from .first_weights import start_head, step_scales
from .heads import Eagle2Head, HeadConfig, save_head
from .objective import Batch, Objective, make_batch


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
) -> dict:
    """Train a head for `model` and write it to the folder `out` (config, weights, checkpoint).

    A run that was stopped goes on from its last checkpoint; the result is that of an unbroken run.
    Answers files may grow meanwhile: conversations added to them join at the next epoch. Under
    torchrun, with torch.distributed initialised, gradients are averaged over the processes; each
    has its own order of conversations and its own checkpoint (`out/process1`, ...).

    Args:
        model: the target, a Llama-family causal LM of transformers, in float32.
        answers: JSONL files as `write_answers` makes them, with their features beside them.
        held_out: such a file kept out of training, to report agreement on.
        steps: optimiser steps; the learning rate falls to zero along a cosine over them.
        batch_tokens, max_length, temperatures: see `Corpus`.
        self_fed_steps, chain_share, step_decay, feature_weight: see `Objective`.
        ema: decay of the running mean of the weights, which is what is written.
        autocast: bfloat16 products. Master weights are float32 either way.

    Returns:
        `step`, `loss` (a running mean) and, with held_out, `agreement`: a list by drafting step.
    """
    out = Path(out)
    if distributed.is_initialized() and distributed.get_rank():
        seed, out = seed + distributed.get_rank(), out / f"process{distributed.get_rank()}"
    corpus = Corpus(model.config.hidden_size, answers, batch_tokens, max_length, temperatures, seed)
    run = Run(model, corpus, out, draft_vocab_size)
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
    first = not distributed.is_initialized() or distributed.get_rank() == 0
    held = load_conversations(held_out, model.config.hidden_size) if held_out and first else []
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
                run.state.agreement = agreement(run.mean, objective, held)
                shown = " ".join(f"{share:.3f}" for share in run.state.agreement)
                bar.write(f"step {run.state.step} loss {run.state.loss:.4f} agreement {shown}")
            if last or run.state.step % checkpoint_every == 0:
                run.save(optimizer)
    return {"step": run.state.step, "loss": run.state.loss, "agreement": run.state.agreement}


def average_gradients(head: Eagle2Head) -> None:
    """Over the processes of a torch.distributed run; nothing to do in a run of one process."""
    if distributed.is_initialized():
        for parameter in head.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= distributed.get_world_size()


class ScaledAdamW(torch.optim.AdamW):
    """AdamW on weights seen through fixed linear maps (`step_scales`): with W = left A right, the
    steps are those AdamW would take on A."""

    def __init__(self, head: Eagle2Head, scales: dict[str, dict[str, Tensor]], **settings):
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


@dataclasses.dataclass
class State:
    """Where a run stands; saved with the weights."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # batches of this epoch already seen
    counts: list[int] | None = None  # conversations of each file in this epoch
    loss: float = 0.0
    agreement: list[float] | None = None


class Run:
    """Head, running mean, data order and checkpoint of one training run."""

    def __init__(self, model, corpus: Corpus, out: Path, draft_vocab_size: int | None):
        self.model, self.corpus, self.out = model, corpus, out
        self.state = State()
        self.batches: list[list[Conversation]] = []
        if self.checkpoint.exists():
            self.saved = torch.load(self.checkpoint, weights_only=True)
            self.head = Eagle2Head(HeadConfig(**self.saved["config"]))
            self.head.load_state_dict(self.saved["head"])
            self.state = State(**self.saved["state"])
        else:
            self.saved = None
            self.head = start_head(model, corpus.load()[0], draft_vocab_size)
        self.scale = self.saved["scales"] if self.saved else self.measure()
        if distributed.is_initialized():
            shared = [tensor for scale in self.scale.values() for tensor in scale.values()]
            for tensor in (*self.head.state_dict().values(), *shared):
                distributed.broadcast(tensor, 0)
        self.mean = Eagle2Head(self.head.config).requires_grad_(False)
        self.mean.load_state_dict(self.saved["mean"] if self.saved else self.head.state_dict())

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def measure(self) -> dict[str, dict[str, Tensor]]:
        batches = self.corpus.batches(0)[0][:8]
        batch = make_batch([conversation for batch in batches for conversation in batch])
        objective = self.objective()
        return step_scales(self.head, objective.embed, objective.weight, batch)

    def objective(self, **settings) -> Objective:
        ids = self.head.draft_to_target
        weight = self.model.lm_head.weight.detach()
        ids = torch.arange(len(weight)) if ids is None else ids
        draft_ids = torch.full((len(weight),), -1)
        draft_ids[ids] = torch.arange(len(ids))
        product = torch.bfloat16 if self.model.device.type == "cpu" else weight.dtype
        embed = self.model.get_input_embeddings()
        return Objective(embed, weight[ids].to(product), draft_ids, **settings)

    def next_batch(self) -> tuple[Batch, np.random.Generator]:
        """The batch of the current step, and the randomness that belongs to the step."""
        state = self.state
        if not self.batches:
            self.batches, state.counts = self.corpus.batches(state.epoch, state.counts)
        draw = np.random.default_rng((self.corpus.seed, 1, state.step))
        return make_batch(self.batches[state.batch]), draw

    def advance(self, loss: float, ema: float) -> None:
        state = self.state
        state.loss = loss if state.step == 0 else 0.99 * state.loss + 0.01 * loss
        state.step += 1
        state.batch += 1
        if state.batch == len(self.batches):
            state.epoch, state.batch, state.counts, self.batches = state.epoch + 1, 0, None, []
        decay = min(ema, (1 + state.step) / (10 + state.step))
        with torch.no_grad():
            for mean, value in zip(self.mean.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)

    def save(self, optimizer) -> None:
        """Write the checkpoint and the head of mean weights; each file is whole at any moment."""
        save_head(self.mean, self.out)
        fresh = self.checkpoint.with_suffix(".partial")
        torch.save(
            {
                "config": dataclasses.asdict(self.head.config),
                "head": self.head.state_dict(),
                "mean": self.mean.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": dataclasses.asdict(self.state),
                "scales": self.scale,
            },
            fresh,
        )
        os.replace(fresh, self.checkpoint)

    def resume(self, optimizer) -> None:
        if self.saved:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.saved = None
