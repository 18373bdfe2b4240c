"""What a draft head is trained on: its own next features, fed back to it as in drafting."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .features import Conversation
from .networks import Head


class Batch(NamedTuple):
    """Right-padded conversations. A chain starts at position p with the target's own features; its
    step s (0, 1, ...) stands at p + s and predicts the feature of p + s + 1."""

    ids: Tensor  # int64 [B, T]
    features: Tensor  # float32 [B, T, Hd], last hidden states
    lengths: Tensor  # int64 [B]
    prompt_lens: Tensor  # int64 [B]
    inputs: Tensor  # float32 [B, T, F], what the head is fed: features, or inputs of layers

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(field.to(device) for field in self))


def make_batch(conversations: list[Conversation]) -> Batch:
    longest = max(len(conversation.ids) for conversation in conversations)
    ids = np.zeros((len(conversations), longest), np.int64)
    for row, conversation in enumerate(conversations):
        ids[row, : len(conversation.ids)] = conversation.ids
    features = pad_rows([conversation.features for conversation in conversations], longest)
    inputs = features
    if conversations[0].inputs is not None:
        inputs = pad_rows([conversation.inputs for conversation in conversations], longest)
    lengths = [len(conversation.ids) for conversation in conversations]
    prompts = [conversation.prompt_len for conversation in conversations]
    return Batch(
        torch.from_numpy(ids), features, torch.tensor(lengths), torch.tensor(prompts), inputs
    )


def pad_rows(rows: list[np.ndarray], longest: int) -> Tensor:
    out = np.zeros((len(rows), longest, rows[0].shape[1]), np.float32)
    for padded, known in zip(out, rows, strict=True):
        padded[: len(known)] = known
    return torch.from_numpy(out)


def answer_starts(batch: Batch) -> Tensor:
    """bool [B, T]: positions whose first step predicts a recorded answer token (p + 2)."""
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    # the root of the first draft is answer token 0: what precedes it is never drafted
    return (positions >= batch.prompt_lens[:, None] - 1) & (positions < batch.lengths[:, None] - 2)


def pick_chains(starts: Tensor, share: float, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """A random share of each row's starts: positions int64 [B, M], and bool: which are real."""
    counts = (starts.sum(1).double() * share).ceil().long()
    width = int(counts.max())
    keys = torch.from_numpy(draw.random(tuple(starts.shape))).to(starts.device)
    order = keys.masked_fill(~starts, 2.0).argsort(1)[:, :width]
    return order, torch.arange(width, device=starts.device) < counts[:, None]


def run_first(head: Head, embed: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The pass over the target's own features.

    Returns:
        Predicted features [B, T, Hd] (row p: the feature of p + 1; the last row has no partner and
        is left out of every loss), and the keys and values [B, T, G, E] that later steps attend to.
    """
    kept = []

    def attend(q, k, v):
        kept.append((k, v))
        mixed = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    embeddings = embed(batch.ids.roll(-1, 1))
    positions = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    return head(embeddings, head.features(batch.inputs), positions, attend), *kept[0]


class Chains:
    """Chains fed with the head's own outputs. Step s of a chain from p sees the first pass up to p
    and the chain's own steps 1..s, as a drafted node sees the prefix and its ancestors."""

    def __init__(self, head, embed, batch: Batch, starts: Tensor, keys: Tensor, values: Tensor):
        self.head, self.embed, self.batch, self.starts = head, embed, batch, starts
        self.keys, self.values = keys, values
        seen = torch.arange(keys.shape[1], device=keys.device) <= starts[..., None]
        self.seen = seen  # [B, M, T]
        self.own_keys: list[Tensor] = []
        self.own_values: list[Tensor] = []

    def step(self, features: Tensor) -> Tensor:
        """Features [B, M, Hd] that the step before predicted -> those of the position after."""
        positions = self.starts + len(self.own_keys) + 1
        nxt = (positions + 1).clamp(max=self.batch.ids.shape[1] - 1)
        return self.head(
            self.embed(self.batch.ids.gather(1, nxt)), features, positions, self.attend
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.own_keys.append(k)
        self.own_values.append(v)
        own_keys, own_values = torch.stack(self.own_keys, 3), torch.stack(self.own_values, 3)
        # q [B, M, G, R, E]: the R query heads of a group side by side
        q = q.unflatten(2, (k.shape[2], -1)) * q.shape[-1] ** -0.5
        first = torch.einsum("bmgre,btge->bmgrt", q, self.keys).float()
        first = first.masked_fill(~self.seen[:, :, None, None], float("-inf"))
        own = torch.einsum("bmgre,bmgse->bmgrs", q, own_keys).float()
        weight = torch.cat((first, own), -1).softmax(-1).to(q.dtype)
        first, own = weight.split((first.shape[-1], own.shape[-1]), -1)
        mixed = torch.einsum("bmgrt,btge->bmgre", first, self.values)
        return (mixed + torch.einsum("bmgrs,bmgse->bmgre", own, own_values)).flatten(2, 3)


class CrossEntropy(torch.autograd.Function):
    """Sum over rows of the cross-entropy between target laws and the head's, in one sweep.

    The gradient is formed with the loss, 128 rows at a time, so no [rows, Vd] array is ever kept.
    """

    @staticmethod
    def forward(ctx, predicted: Tensor, weight: Tensor, laws: Tensor, rows: Tensor) -> Tensor:
        """Predicted features [n, Hd], lm_head rows [Vd, Hd], laws [N, Vd], their row for each n."""
        gradient, total = torch.empty_like(predicted), 0.0
        for part, row, out in zip(
            predicted.split(128), rows.split(128), gradient.split(128), strict=True
        ):
            logits = part.to(weight.dtype) @ weight.T
            log_law = logits.log_softmax(-1, dtype=torch.float32)
            law = laws[row]
            total -= torch.dot(log_law.flatten(), law.float().flatten())
            out.copy_((log_law.exp_() - law).to(weight.dtype) @ weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


class Objective:
    """Loss of a head on a batch: smooth-L1 on features plus cross-entropy to the target's law.

    Args:
        embed: the target's embedding.
        weight: the target's lm_head rows of the draft vocabulary, [Vd, Hd].
        draft_ids: int64 [V], target id -> draft id, -1 where the head cannot draft it.
        steps: steps after the first that the head is fed its own outputs for.
        share: share of the answer positions from which such a chain starts.
        step_decay: weight of each step's loss against that of the step before.
        feature_weight: of smooth-L1 (mean over Hd) against cross-entropy in nats.
    """

    def __init__(
        self, embed, weight, draft_ids, *, steps=3, share=0.5, step_decay=1.0, feature_weight=10.0
    ):
        self.embed, self.weight, self.draft_ids = embed, weight, draft_ids
        self.steps, self.share, self.step_decay = steps, share, step_decay
        self.feature_weight = feature_weight

    def loss(self, head: Head, batch: Batch, draw: np.random.Generator) -> Tensor:
        starts = answer_starts(batch)
        index, laws = self.laws(batch, starts)
        everything, real = pick_chains(starts, 1.0, draw)
        predicted, keys, values = run_first(head, self.embed, batch)
        rest = batch, index, laws
        total = self.step_loss(head, take(predicted, everything), everything, real, *rest)
        if self.steps:
            chosen, real = pick_chains(starts, self.share, draw)
            features = take(predicted, chosen)
            chains = Chains(head, self.embed, batch, chosen, keys, values)
            for step in range(1, self.steps + 1):
                features = chains.step(features)
                loss = self.step_loss(head, features, chosen + step, real, *rest)
                total = total + self.step_decay**step * loss
        return total / sum(self.step_decay**step for step in range(self.steps + 1))

    @torch.no_grad()
    def laws(self, batch: Batch, starts: Tensor) -> tuple[Tensor, Tensor]:
        """The target's laws within the draft vocabulary [N, Vd], and the row of each start [B, T].

        A start whose recorded token the head cannot draft has row -1: it teaches features only.
        """
        usable = starts & (self.draft_ids[batch.ids.roll(-2, 1)] >= 0)
        index = (usable.flatten().cumsum(0) - 1).view_as(usable).masked_fill(~usable, -1)
        features = batch.features.roll(-1, 1)[usable].to(self.weight.dtype)
        parts = [(part @ self.weight.T).float().softmax(-1) for part in features.split(128)]
        return index, torch.cat(parts).to(self.weight.dtype)

    def step_loss(self, head, predicted, positions, real, batch: Batch, index, laws) -> Tensor:
        """Mean loss over the real rows of predicted [B, M, Hd], which stand at positions [B, M]."""
        real = real & (positions < batch.lengths[:, None] - 2)
        positions = positions.clamp(max=batch.ids.shape[1] - 2)
        predicted = predicted[real].float()
        rows = index.gather(1, positions)[real]
        known = rows >= 0
        surprise = self.surprise(head, predicted[known], laws, rows[known])
        wanted = take(batch.features, positions + 1)[real]
        return self.distance(predicted, wanted) + surprise / max(1, int(known.sum()))

    def surprise(self, head, predicted: Tensor, laws: Tensor, rows: Tensor) -> Tensor:
        """Summed cross-entropy of predicted [n, Hd] to the laws' rows [n]."""
        return CrossEntropy.apply(predicted, self.weight, laws, rows)

    def distance(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return self.feature_weight * nn.functional.smooth_l1_loss(predicted, wanted)

    def logits(self, head, predicted: Tensor) -> Tensor:
        """Draft logits of predicted [B, M, Hd]."""
        return predicted.to(self.weight.dtype) @ self.weight.T


class Eagle3Objective(Objective):
    """Cross-entropy alone, through the head's own norm and lm_head: its states are its own."""

    def surprise(self, head, predicted: Tensor, laws: Tensor, rows: Tensor) -> Tensor:
        total = predicted.new_zeros(())
        for part, row in zip(predicted.split(512), rows.split(512), strict=True):
            log_law = self.logits(head, part).log_softmax(-1, dtype=torch.float32)
            total = total - (laws[row].float() * log_law).sum()
        return total

    def distance(self, predicted: Tensor, wanted: Tensor) -> float:
        return 0.0

    def logits(self, head, predicted: Tensor) -> Tensor:
        return head.to_logits(None)(predicted)


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x [B, T, Hd] at positions [B, M] -> [B, M, Hd]."""
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))
