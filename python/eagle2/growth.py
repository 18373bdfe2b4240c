"""How a draft tree grows: which children are entered, and which of them the next step expands."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from eagle2_kernels import Candidates, Tree, results
from eagle2_kernels.reference.words import pack

from .static_tree import Path
from .target import Operators


class Leaves(NamedTuple):
    """The leaves of one level, as the next draft step and the level below need them."""

    tokens: Tensor  # [B, L] int64
    scores: Tensor  # [B, L] float32, path scores
    indices: Tensor  # [B, L] int32, their own candidate index; -1 = the root
    ranks: Tensor  # [B, L] int64, which leaf of the level before each descends from
    words: Tensor  # [B, L, W] int64, drafted slots on the path, the own one included


class Growth(abc.ABC):
    """What the drafter asks of trees of one kind, for one batch.

    Attributes:
        slots: cache rows that the leaves of all levels take.
        candidates, end: of the tree under way, and how many there are of them so far.
    """

    slots: int
    candidates: Candidates
    end: int

    @abc.abstractmethod
    def children(self, level: int) -> int:
        """How many children each leaf above this level gets."""

    @abc.abstractmethod
    def slot(self, level: int) -> int:
        """The drafted cache row of the level's first leaf; where rows end, of the last level."""

    @abc.abstractmethod
    def root(self, depth: int) -> Leaves:
        """Start a tree of at most `depth` levels; the root is its first leaf."""

    @abc.abstractmethod
    def enter(
        self, level: int, tokens: Tensor, scores: Tensor, above: Leaves, num_nodes: Tensor
    ) -> Leaves:
        """Take a level into the candidates.

        Args:
            level: 1 for the root's children.
            tokens, scores: [B, L, K] as `expand` gave them for the leaves above.
            above: the L leaves.
            num_nodes: [B] int32, nodes to be verified.

        Returns:
            the leaves to expand next, none where the tree is complete.
        """

    def afford(self, num_nodes: Tensor, most: int) -> tuple[Tensor, int]:
        """Nodes to verify of each row, of those asked for [B] int32, and the most of a row."""
        return num_nodes, most

    def learn(self, tree: Tree, accept_length: Tensor) -> None:
        """Take note of what the target made of a tree; most have no use for it."""
        return


class DynamicGrowth(Growth):
    """EAGLE-2: the best children of every leaf, the best of each level as leaves (section 4.1).

    Args:
        top_k, depth, early_stop: as in `TreeConfig`.
        ops: where the operators come from.
        batch, device: of the candidates.
    """

    def __init__(
        self,
        top_k: int,
        depth: int,
        early_stop: bool,
        ops: Operators,
        batch: int,
        device: torch.device,
    ):
        self.top_k, self.early_stop, self.ops = top_k, early_stop, ops
        self.slots = (depth - 1) * top_k
        self.candidates = allocate(batch, top_k + (depth - 1) * top_k**2, device)
        self.top = root(self.candidates, self.slots)
        # memory for the leaves of two levels: each level is made from the one above
        self.memory = [results.enter_level(self.top.words, top_k) for _ in range(2)]

    def children(self, level: int) -> int:
        return self.top_k

    def slot(self, level: int) -> int:
        return (level - 1) * self.top_k

    def root(self, depth: int) -> Leaves:
        self.last, self.end = depth, 0
        self.candidates.scores.fill_(-torch.inf)
        return self.top

    def enter(
        self, level: int, tokens: Tensor, scores: Tensor, above: Leaves, num_nodes: Tensor
    ) -> Leaves:
        k = self.top_k
        begin = 0 if level == 1 else k + (level - 2) * k * k
        self.end = begin + tokens.shape[1] * k
        # the leaves of the last level are not run: they need no slots
        slot = self.slot(level) if level < self.last else 0
        *leaves, live = self.ops.enter_level(
            *(self.candidates, begin, tokens, scores, above.indices, above.words, slot, k),
            num_nodes,
            out=self.memory[level % 2],
        )
        if self.early_stop and level < self.last:
            # what is below the others cannot reach the tree (DESIGN: early stop)
            worth = max(live.tolist(), default=0)
            if worth < k:
                leaves = [field[:, :worth] for field in leaves]
        return Leaves(*leaves)


class StaticGrowth(Growth):
    """EAGLE-1 and Medusa: the same tree in every context; only its tokens and scores differ.

    Candidates are the paths of the tree in level order, so all but dead ones become nodes.
    Nothing is read back.

    Args:
        choices: paths of child ranks, as `checked_choices` returns them.
        batch, device: of the candidates.
    """

    def __init__(self, choices: Sequence[Path], batch: int, device: torch.device):
        self.candidates = allocate(batch, len(choices), device)
        place = {path: index for index, path in enumerate(choices)}
        parents = [place.get(path[:-1], -1) for path in choices]
        self.candidates.parents.copy_(torch.tensor(parents))
        expanded = [path for path in choices if place[path] in parents]
        self.slots = len(expanded)
        self.top = root(self.candidates, self.slots)
        slot = {path: number for number, path in enumerate(expanded)}
        above: list[Path] = [()]
        self.levels: list[Level] = []
        for depth in range(1, 1 + max(map(len, choices))):
            level = [path for path in choices if len(path) == depth]
            leaves = [path for path in level if path in slot]
            self.levels.append(Level.of(level, leaves, above, place, slot, batch, device))
            above = leaves

    def children(self, level: int) -> int:
        return self.levels[level - 1].children

    def slot(self, level: int) -> int:
        return self.levels[level - 1].slot

    def root(self, depth: int) -> Leaves:
        self.end = 0
        return self.top

    def enter(
        self, level: int, tokens: Tensor, scores: Tensor, above: Leaves, num_nodes: Tensor
    ) -> Leaves:
        fixed, begin = self.levels[level - 1], self.end
        self.end = begin + len(fixed.kept)
        self.candidates.tokens[:, begin : self.end] = tokens.flatten(1)[:, fixed.kept]
        self.candidates.scores[:, begin : self.end] = scores.flatten(1)[:, fixed.kept]
        leaves = fixed.indices.long()
        return Leaves(
            self.candidates.tokens.gather(1, leaves),
            self.candidates.scores.gather(1, leaves),
            fixed.indices,
            fixed.ranks,
            fixed.words,
        )


class Level(NamedTuple):
    """What is the same in every cycle about one level of a static tree."""

    children: int
    slot: int
    kept: Tensor  # [n] int64, where in the children of all leaves above its n nodes are
    indices: Tensor  # [B, L] int32; this and the next two as in `Leaves`
    ranks: Tensor  # [B, L] int64
    words: Tensor  # [B, L, W] int64

    @classmethod
    def of(cls, level, leaves, above, place, slot, batch, device) -> "Level":
        """From the paths of a level, its leaves, those above, and their numbers in the tree."""
        children = 1 + max(path[-1] for path in level)
        ranks = {path: rank for rank, path in enumerate(above)}
        on_path = torch.zeros(len(leaves), max(len(slot), 1), dtype=torch.bool)
        for row, path in enumerate(leaves):
            on_path[row, [slot[path[:end]] for end in range(1, len(path) + 1)]] = True
        fixed = (
            torch.tensor([place[path] for path in leaves], dtype=torch.int32),
            torch.tensor([ranks[path[:-1]] for path in leaves], dtype=torch.int64),
            pack(on_path),
        )
        return cls(
            children,
            slot[leaves[0]] if leaves else len(slot),
            torch.tensor([ranks[p[:-1]] * children + p[-1] for p in level], device=device),
            *(x.to(device).expand(batch, *x.shape).contiguous() for x in fixed),
        )


def allocate(batch: int, count: int, device: torch.device) -> Candidates:
    return Candidates(
        torch.zeros((batch, count), dtype=torch.int64, device=device),
        torch.zeros((batch, count), dtype=torch.float32, device=device),
        torch.zeros((batch, count), dtype=torch.int32, device=device),
    )


def root(candidates: Candidates, slots: int) -> Leaves:
    """The root as the only leaf: path score 0, no drafted slot on its path."""
    tokens, scores, parents = candidates
    batch = len(tokens)
    return Leaves(
        tokens.new_zeros(batch, 1),  # not looked at
        scores.new_zeros(batch, 1),
        parents.new_full((batch, 1), -1),
        tokens.new_zeros(batch, 1),
        tokens.new_zeros(batch, 1, -(-max(slots, 1) // 64)),
    )
