"""How far a head's confidence can be trusted: its bins, its error, the draft temperature for it."""

import copy
import dataclasses
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import eagle2_kernels

from .cycle import Cycle
from .decode import decode
from .drafter import TreeConfig
from .networks import Head
from .prompts import end_tokens
from .requests import Requests, Sampling
from .target import Target

BINS = 20
TEMPERATURES = 2 ** (torch.arange(-24, 25) / 24)


class Bin(NamedTuple):
    """Children whose confidence lies between two bounds, the upper one included."""

    low: float
    high: float
    children: int
    confidence: float  # in the mean; NaN where there are no children
    acceptance: float  # share that the target took; NaN likewise


@dataclasses.dataclass
class Confidences:
    """What a head said of the children of the nodes that the target's text went through.

    A child's confidence is its probability under the head, given its parent. The children are
    those drafted, whether or not they became nodes of the tree.

    Attributes:
        logits: [K] float32 of each node's children, over the head's draft temperature; -inf where
            a node has fewer.
        log_sums: [T] of each node, log sum exp of all its logits over each of TEMPERATURES.
        taken: which child of each node was the target's token; K = none of them.
        tau: tokens committed per cycle meanwhile.
    """

    logits: list[Tensor] = dataclasses.field(default_factory=list)
    log_sums: list[Tensor] = dataclasses.field(default_factory=list)
    taken: list[int] = dataclasses.field(default_factory=list)
    tau: float = 0.0

    def probabilities(self, number: int) -> Tensor:
        """[nodes, K] of the children, at TEMPERATURES[number]."""
        log_sums = torch.stack(self.log_sums)[:, number, None]
        return (torch.stack(self.logits) / TEMPERATURES[number] - log_sums).exp()

    def fit(self) -> float:
        """The one of TEMPERATURES at which what the target took is likeliest.

        It takes one of the children or, with the probability that they leave over, none.
        """
        taken = torch.tensor(self.taken)[:, None]
        likelihood = []
        for number in range(len(TEMPERATURES)):
            children = self.probabilities(number)
            rest = (1 - children.sum(1, keepdim=True)).clamp(min=1e-6)
            likelihood.append(torch.cat((children, rest), 1).gather(1, taken).log().mean())
        return float(TEMPERATURES[torch.stack(likelihood).argmax()])

    def bins(self) -> list[Bin]:
        """All children by confidence, as EAGLE-2 shows them in section 3."""
        confidence = self.probabilities(len(TEMPERATURES) // 2)
        accepted = torch.arange(confidence.shape[1]) == torch.tensor(self.taken)[:, None]
        place = (confidence * BINS).ceil().long().clamp(1, BINS)
        found = []
        for number in range(1, BINS + 1):
            inside = (place == number) & (confidence > 0)
            means = (float(x[inside].double().mean()) for x in (confidence, accepted))
            found.append(Bin((number - 1) / BINS, number / BINS, int(inside.sum()), *means))
        return found

    def error(self) -> float:
        """Expected calibration error: |confidence - acceptance| of the bins, by their children."""
        bins = [each for each in self.bins() if each.children]
        off = sum(each.children * abs(each.confidence - each.acceptance) for each in bins)
        return off / sum(each.children for each in bins)


class Recorder:
    """Operators that note what `expand` is given until the text of the cycle is known; one row.

    Args:
        ops: the operators.
        top_k: most children that a node can have.
    """

    def __init__(self, ops: ModuleType, top_k: int):
        self.found, self.top_k = Confidences(), top_k
        self.levels: list[tuple[Tensor, ...]] = []  # logits, leaf_scores, tokens, scores
        self.committed: list[int] = []
        self.bare = {name: getattr(ops, name) for name in eagle2_kernels.ops.OPERATORS}
        self.ops = SimpleNamespace(**{**self.bare, "expand": self.expand})

    def expand(self, logits: Tensor, leaf_scores: Tensor, *rest) -> tuple[Tensor, Tensor]:
        children = self.bare["expand"](logits, leaf_scores, *rest)
        # the level after next overwrites the leaves
        self.levels.append(tuple(x[0] for x in (logits, leaf_scores.clone(), *children)))
        return children

    def on_commit(self, row: int, tokens: list[int]) -> None:
        self.committed = tokens

    def on_cycle(self, tree, path) -> None:
        """Follow the tokens of the cycle from the root as far as their nodes were expanded."""
        score = self.levels[0][1][0] if self.levels else None
        for (logits, leaf_scores, tokens, scores), token in zip(
            self.levels, self.committed, strict=False
        ):
            leaf = (leaf_scores == score).nonzero().flatten()
            if len(leaf) == 0:
                break
            score = self.note(*(x[leaf[0]] for x in (logits, leaf_scores, tokens, scores)), token)
        self.levels, self.committed = [], []

    def note(self, logits, leaf_score, tokens, scores, token: int) -> Tensor:
        """Add a node; the score of its child that is the target's token, NaN if none is."""
        logits = logits.float()
        log_sums = (logits / TEMPERATURES.to(logits.device)[:, None]).logsumexp(-1).cpu()
        self.found.log_sums.append(log_sums)
        children = torch.full((self.top_k,), -torch.inf)
        children[: len(scores)] = (scores - leaf_score).cpu() + log_sums[len(TEMPERATURES) // 2]
        self.found.logits.append(children)
        hits = (tokens == token).nonzero().flatten().tolist()
        self.found.taken.append(hits[0] if hits else self.top_k)
        return scores[hits[0]] if hits else scores.new_tensor(torch.nan)


def confidences(
    model: PreTrainedModel,
    head: Head,
    prompts: Sequence[Sequence[int]],
    *,
    tree: TreeConfig,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    ops: ModuleType = eagle2_kernels,
) -> Confidences:
    """Decode the prompts, lists of ids, one by one, and note what the head said on the way.

    Args:
        temperature, seed: of the target; prompt n draws with seed + n.
        others: as in `generate`.
    """
    recorder, total, cycles = Recorder(ops, tree.top_k), 0, 0
    target = Target(model, recorder.ops)
    for number, prompt in enumerate(tqdm(prompts, desc="calibrate", unit="prompt", disable=None)):
        requests = Requests(
            [list(prompt)],
            max_new_tokens,
            end_tokens(model, None),
            target.context_limit,
            recorder.on_commit,
        )
        sampling = Sampling.of(1, temperature, seed=seed + number, device=target.device)
        run = decode(target, head, requests, sampling, tree, recorder.on_cycle, Cycle).statistics
        total, cycles = total + run.cycle_tokens, cycles + run.cycles
    if not recorder.found.taken:
        raise ValueError("prompts: wanted some whose answers take a cycle, got none")
    recorder.found.tau = total / cycles
    return recorder.found


def with_draft_temperature(head: Head, temperature: float) -> Head:
    """The same head, weights shared, with another draft temperature."""
    other = copy.copy(head)
    other.config = dataclasses.replace(head.config, draft_temperature=temperature)
    return other
