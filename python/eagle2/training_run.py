"""One training run: its head, the running mean, the order of the data, the checkpoint."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed

from .corpus import Corpus
from .features import Conversation
from .first_weights import read_scales, start_eagle3_head, start_head, step_scales
from .heads import Eagle2Head, Eagle3Config, Eagle3Head, Head, HeadConfig, save_head
from .objective import Batch, Eagle3Objective, Objective, make_batch
from .weights import load
from .whole_file import whole


def read_layers(model, kind: str) -> tuple[int, ...]:
    """Layers whose inputs a new head of this kind reads; none where it reads the last states."""
    count = model.config.num_hidden_layers
    if kind == "eagle3":
        if count < 7:
            raise ValueError(f"model: EAGLE-3 wants a target of 7 layers or more, got {count}")
        return 2, count // 2, count - 3
    return ()


@dataclasses.dataclass
class State:
    """Where a run stands; saved with the weights."""

    step: int = 0
    epoch: int = 0
    batch: int = 0  # batches of this epoch already seen by each process
    counts: list[int] | None = None  # conversations of each file in this epoch
    loss: float = 0.0
    agreement: list[float] | None = None
    tau: float | None = None


class Kind(NamedTuple):
    """What differs between the kinds of head."""

    network: type[Head]
    config: type[HeadConfig]
    start: Callable[..., Head]
    objective: type[Objective]
    scales: Callable[..., dict]


KINDS = {
    "eagle2": Kind(Eagle2Head, HeadConfig, start_head, Objective, step_scales),
    "eagle3": Kind(Eagle3Head, Eagle3Config, start_eagle3_head, Eagle3Objective, read_scales),
}


def write_checkpoint(checkpoint: dict, path: Path) -> None:
    """Write it whole or not at all.

    Raises:
        OSError: there is no room, or no right to write.
    """
    with whole(path) as fresh:
        try:
            torch.save(checkpoint, fresh)
        except RuntimeError as error:  # what torch makes of a disk that is full
            raise OSError(f"{path}: cannot be written: {error}") from None


def read_checkpoint(path: Path, device: torch.device) -> dict:
    found = load(path, device)
    missing = {"config", "head", "mean", "optimizer", "state", "scales"} - found.keys()
    if missing:
        raise ValueError(f"{path}: wanted a checkpoint of training, got one without {missing}")
    return found


class Run:
    """Head, running mean, data order and checkpoint of one training run."""

    def __init__(
        self, model, corpus: Corpus, out: Path, draft_vocab_size: int | None, kind: str = "eagle2"
    ):
        self.model, self.corpus, self.out = model, corpus, out
        self.name, self.kind = kind, KINDS[kind]
        together = distributed.is_initialized()
        self.rank = distributed.get_rank() if together else 0
        self.ranks = distributed.get_world_size() if together else 1
        self.state = State()
        self.batches: list[list[Conversation]] = []
        if self.checkpoint.exists():
            self.saved: dict | None = read_checkpoint(self.checkpoint, model.device)
            if self.saved.get("kind", "eagle2") != kind:
                raise ValueError(f"kind: {self.checkpoint} is of an {self.saved['kind']} head")
            self.head = self.kind.network(self.kind.config(**self.saved["config"]))
            self.head.load_state_dict(self.saved["head"])
            self.state = State(**self.saved["state"])
        else:
            self.saved = None
            self.head = self.kind.start(model, corpus.load()[0], draft_vocab_size)
        self.head.to(model.device)
        self.scale = self.saved["scales"] if self.saved else self.measure()
        if self.ranks > 1:
            shared = [tensor for scale in self.scale.values() for tensor in scale.values()]
            for tensor in (*self.head.state_dict().values(), *shared):
                distributed.broadcast(tensor, 0)
        self.mean = self.kind.network(self.head.config).requires_grad_(False).to(model.device)
        self.mean.load_state_dict(self.saved["mean"] if self.saved else self.head.state_dict())

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def measure(self) -> dict[str, dict[str, Tensor]]:
        batches = self.corpus.batches(0)[0][:8]
        batch = make_batch([conversation for batch in batches for conversation in batch])
        batch = batch.to(self.model.device)
        objective = self.objective()
        return self.kind.scales(self.head, objective.embed, objective.weight, batch)

    def objective(self, **settings) -> Objective:
        ids = self.head.draft_to_target
        weight = self.model.lm_head.weight.detach()
        ids = torch.arange(len(weight), device=weight.device) if ids is None else ids
        draft_ids = torch.full((len(weight),), -1, device=weight.device)
        draft_ids[ids] = torch.arange(len(ids), device=weight.device)
        product = torch.bfloat16 if self.model.device.type == "cpu" else weight.dtype
        embed = self.model.get_input_embeddings()
        return self.kind.objective(embed, weight[ids].to(product), draft_ids, **settings)

    def next_batch(self) -> tuple[Batch, np.random.Generator]:
        """This process's batch of the current step, and the randomness that belongs to it."""
        state = self.state
        if not self.batches:
            self.batches, state.counts = self.corpus.batches(state.epoch, self.agreed_counts())
        # turns along one order; at its end, where they do not come out even, from the start again
        place = (state.batch * self.ranks + self.rank) % len(self.batches)
        draw = np.random.default_rng((self.corpus.seed, 1, state.step + (self.rank << 32)))
        return make_batch(self.batches[place]).to(self.model.device), draw

    def agreed_counts(self) -> list[int] | None:
        """Conversations of each file in this epoch, as the first process has them."""
        if self.ranks == 1:
            return self.state.counts
        counts = [self.state.counts or self.corpus.load()[1]]
        distributed.broadcast_object_list(counts, src=0, device=self.model.device)
        return counts[0]

    def advance(self, loss: float, ema: float) -> None:
        state = self.state
        state.loss = loss if state.step == 0 else 0.99 * state.loss + 0.01 * loss
        state.step += 1
        state.batch += 1
        if state.batch * self.ranks >= len(self.batches):
            state.epoch, state.batch, state.counts, self.batches = state.epoch + 1, 0, None, []
        decay = min(ema, (1 + state.step) / (10 + state.step))
        with torch.no_grad():
            for mean, value in zip(self.mean.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(value, 1 - decay)

    def save(self, optimizer) -> None:
        """Write the checkpoint and the head of mean weights; each file is whole at any moment.

        All processes have the same: the first one writes, and all go on from that.
        """
        if self.rank:
            return
        save_head(self.mean, self.out)
        checkpoint = {
            "kind": self.name,
            "config": dataclasses.asdict(self.head.config),
            "head": self.head.state_dict(),
            "mean": self.mean.state_dict(),
            "optimizer": optimizer.state_dict(),
            "state": dataclasses.asdict(self.state),
            "scales": self.scale,
        }
        write_checkpoint(checkpoint, self.checkpoint)

    def resume(self, optimizer) -> None:
        if self.saved:
            optimizer.load_state_dict(self.saved["optimizer"])
            self.saved = None
