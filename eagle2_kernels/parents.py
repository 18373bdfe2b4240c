"""A Tree from lists on the host."""

from collections.abc import Sequence

import torch

from .reference.rerank import ancestor_matrix
from .reference.words import pack
from .tree import Tree


def from_parents(
    parents: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]] | None = None,
    device: torch.device | str = "cpu",
) -> Tree:
    """A Tree from lists on the host: one drawn by hand, or made elsewhere.

    Args:
        parents: a list for each row, of any length: -1 for node 0, the root; for every other node
            the number of a node before it. An empty list is a row without a tree.
        tokens: lists of the same lengths.
        scores: lists of the same lengths, path scores; None = 0 throughout.

    Raises:
        ValueError: a list that is no tree (another root, a parent that is absent, that comes later
            or is the node itself), or lists of different lengths.
    """
    scores = [[0.0] * len(row) for row in parents] if scores is None else scores
    for name, lists in (("tokens", tokens), ("scores", scores)):
        if [*map(len, lists)] != [*map(len, parents)]:
            raise ValueError(f"{name}: wanted {[*map(len, parents)]} entries, as parents has, "
                             f"got {[*map(len, lists)]}")  # fmt: skip
    for row, line in enumerate(parents):
        _check(row, line)

    columns = max([1, *map(len, parents)])

    def table(lists, filler, dtype):
        rows = [[*line, *[filler] * (columns - len(line))] for line in lists]
        return torch.tensor(rows, dtype=dtype, device=device).reshape(-1, columns)

    num_nodes = torch.tensor([*map(len, parents)], dtype=torch.int32, device=device)
    numbers = table(parents, -1, torch.int32)
    visible = ancestor_matrix(numbers, num_nodes[:, None])
    return Tree(
        tokens=table(tokens, -1, torch.int64),
        parents=numbers,
        depths=(visible.sum(-1) - 1).clamp(min=0).to(torch.int32),
        ancestors=pack(visible),
        scores=table(scores, -torch.inf, torch.float32),
        num_nodes=num_nodes,
    )


def _check(row: int, parents: Sequence[int]) -> None:
    for node, parent in enumerate(parents):
        if parent not in (range(node) if node else (-1,)):
            nodes = f"0..{node - 1}" if node else "-1"
            raise ValueError(f"parents: wanted {nodes} for node {node} of row {row}, got {parent}")
