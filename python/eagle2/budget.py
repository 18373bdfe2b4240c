"""Trees as large as pays: what the head expects against what passes cost (DESIGN.md, section 7)."""

import numpy as np
import torch
from torch import Tensor

from eagle2_kernels import Tree

from .growth import DynamicGrowth, Leaves
from .profile import Profile
from .target import Operators

PATIENCE = 20.0  # what the profile says weighs as much as so many tokens or nodes of this call


class Ratio:
    """Of two sums that grow; before they have, that of the profile."""

    def __init__(self, known: float | np.ndarray, weight: float):
        self.above, self.below = np.array(known * weight), np.full_like(known, weight)

    def see(self, above: float | np.ndarray, below: float | np.ndarray, place=...) -> None:
        self.above[place] += above
        self.below[place] += below

    @property
    def value(self) -> float | np.ndarray:
        return self.above / self.below


class CostedGrowth(DynamicGrowth):
    """EAGLE-2 trees whose levels, leaves and nodes are each kept while they pay.

    A second is worth the tokens that this call has made in one so far. A node is accepted with
    probability exp(path score), corrected level by level by how many were. In these terms the
    number of nodes is the best one; a level is drafted for those leaves whose children, and their
    best children, pay for the step if they are as likely as children were so far. Padding costs as
    nodes do, so the rows of a batch get equally many; no pass is larger than was measured. Reads
    scores back at each level.

    Args:
        profile: what passes cost, and what to expect at first.
        top_k, depth: most children, leaves and levels; at most those of the profile.
        ops, batch, device: as in `DynamicGrowth`.
    """

    def __init__(
        self,
        profile: Profile,
        top_k: int,
        depth: int,
        ops: Operators,
        batch: int,
        device: torch.device,
    ):
        super().__init__(top_k, depth, True, ops, batch, device)
        # of each candidate, from 0 up
        self.levels = np.repeat(np.arange(depth), [top_k] + [top_k**2] * (depth - 1))
        most = min(self.candidates.tokens.shape[1] + 1, profile.most_nodes(batch))
        nodes, leaves = np.arange(1, most + 1), np.arange(top_k + 1)
        self.target_seconds = profile.target(batch * nodes)
        self.draft_seconds = np.where(leaves > 0, profile.draft(batch * leaves), 0.0)
        pace = profile.fixed(batch)[2]
        self.pace = Ratio(pace, PATIENCE / pace)
        self.trust = Ratio(np.array(profile.trust[:depth]), PATIENCE)
        self.offspring = Ratio(np.array(profile.offspring)[:depth, :top_k], PATIENCE)

    def root(self, depth: int) -> Leaves:
        # what each level is judged by: the same for the whole tree, and numpy is slow to start
        pace, self.reality, family = self.pace.value, self.trust.value, self.offspring.value
        self.prices, self.step_prices = pace * self.target_seconds, pace * self.draft_seconds
        # a child leads to a child of its own
        self.families = self.reality[:, None] * family * (1 + family[:, :1])
        self.seconds = self.draft_seconds[1]
        return super().root(depth)

    def enter(
        self, level: int, tokens: Tensor, scores: Tensor, above: Leaves, num_nodes: Tensor
    ) -> Leaves:
        leaves = super().enter(level, tokens, scores, above, num_nodes)
        if level == 1:
            wanted = num_nodes.cpu().numpy()
            self.going, self.most = wanted > 1, int(wanted.max())
            self.parents, self.values = float(self.going.sum()), np.zeros((self.going.sum(), 0))
        children = probability(scores)[self.going]
        self.offspring.see(children.sum((0, 1)), self.parents, level - 1)
        drafted = best_first(children.reshape(len(children), scores[0].numel()), children.size)
        values = np.concatenate((self.values, self.reality[level - 1] * drafted), 1)
        self.values = best_first(values, self.most - 1)
        if level == self.last:
            return leaves
        hopes = drafted[:, : leaves.tokens.shape[1]]  # the leaves are the best children
        width = best_width(
            self.values,
            hopes[..., None] * self.families[level],
            self.prices[: self.most],
            self.step_prices[: hopes.shape[1] + 1],
        )
        self.seconds += self.draft_seconds[width]
        self.parents = hopes[:, :width].sum()
        return Leaves(*(field[:, :width] for field in leaves))

    def afford(self, num_nodes: Tensor, most: int) -> tuple[Tensor, int]:
        if most > 1 and self.end:
            # the rerank goes by the scores, whatever the levels are worth
            likely = probability(self.candidates.scores[:, : self.end])[self.going]
            order = np.argsort(-likely, 1, kind="stable")[:, : most - 1]
            values = np.take_along_axis(likely * self.reality[self.levels[: self.end]], order, 1)
            most = int(best_nodes(values, self.prices[:most])[0])
        self.seconds += self.target_seconds[most - 1]
        return num_nodes.clamp(max=most), most

    def learn(self, tree: Tree, accept_length: Tensor) -> None:
        # the root, padding and rows without a tree have depth 0 and accept nothing
        accepted, depths = accept_length.cpu().numpy(), tree.depths.cpu().numpy()
        rows = np.count_nonzero(tree.num_nodes.cpu().numpy())
        self.pace.see(rows + accepted.sum(), self.seconds)
        hopes = np.bincount(depths.ravel(), probability(tree.scores).ravel(), len(self.reality) + 1)
        levels = np.arange(1, len(hopes))
        self.trust.see((accepted[:, None] >= levels).sum(0), hopes[1:])


def probability(scores: Tensor) -> np.ndarray:
    return np.exp(scores.cpu().numpy().astype(float))


def best_first(values: np.ndarray, most: int) -> np.ndarray:
    """The `most` largest along the last axis, in descending order."""
    return np.sort(values, -1)[..., ::-1][..., :most]


def best_nodes(values: np.ndarray, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many nodes are worth a target pass, root included, and the tokens that leaves.

    Args:
        values: [..., B', C] tokens to expect of each candidate, best first.
        prices: [N] tokens that a pass over trees of 1, 2, ... nodes is worth.
    """
    tokens = values.sum(-2).cumsum(-1)[..., : len(prices) - 1]
    profits = np.zeros((*tokens.shape[:-1], tokens.shape[-1] + 1))
    profits[..., 1:] = tokens
    profits -= prices[: profits.shape[-1]]
    return 1 + profits.argmax(-1), profits.max(-1)


def best_width(
    values: np.ndarray, children: np.ndarray, prices: np.ndarray, step_prices: np.ndarray
) -> int:
    """For how many leaves the next draft step is worth its time; 0 = it is not.

    Args:
        values, prices: as in `best_nodes`.
        children: [B', L, K] tokens to expect of the children of each leaf.
        step_prices: [L + 1] tokens that a draft step for 0, 1, 2, ... leaves is worth.
    """
    rows, leaves, k = children.shape
    known = values.shape[1]
    nodes = np.empty((leaves + 1, rows, known + leaves * k))
    nodes[..., :known] = values
    drafted = np.tri(leaves + 1, leaves, -1)[:, None, :, None] * children  # of the first 0, 1, ...
    nodes[..., known:] = drafted.reshape(leaves + 1, rows, leaves * k)
    _, profits = best_nodes(best_first(nodes, len(prices) - 1), prices)
    return int((profits - step_prices).argmax())
