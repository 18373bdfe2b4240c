"""What travels between the operators. Letters as in the README: B, C, N, W = ceil(N / 64)."""

from typing import NamedTuple

from torch import Tensor


class Candidates(NamedTuple):
    """All drafted nodes of a cycle, level by level, before the rerank (EAGLE-2, section 4.1).

    Level 1 is 0..K-1; child c of leaf rank r at level l >= 2 is K + (l-2)K² + rK + c, so a parent
    comes before its children. A slot that was not drafted has score -inf.
    """

    tokens: Tensor  # [B, C] int64, target ids
    scores: Tensor  # [B, C] float32, sum of draft log-probabilities on the path
    parents: Tensor  # [B, C] int32, candidate index; -1 = child of the root


class Tree(NamedTuple):
    """The nodes kept for verification, root first, parents before children.

    Bit b of word w of `ancestors` is set iff node 64w + b is an ancestor of the row's node or the
    node itself, least significant bit first; bit 63 is the sign bit. So depth = popcount - 1, the
    parent is the highest set bit below the own one, and row(child) = row(parent) plus one bit.
    Columns from num_nodes on are padding: token -1, parent -1, depth 0, no bits, score -inf.
    """

    tokens: Tensor  # [B, N] int64, target ids
    parents: Tensor  # [B, N] int32, node number; -1 for the root
    depths: Tensor  # [B, N] int32, levels below the root
    ancestors: Tensor  # [B, N, W] int64
    scores: Tensor  # [B, N] float32, path scores; 0 for the root
    num_nodes: Tensor  # [B] int32, nodes in use, root included; 0 = a row without a tree
