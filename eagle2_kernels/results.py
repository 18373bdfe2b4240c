"""Memory for what the operators return, one function for each: names as in `ops`, shapes, dtypes.

Each takes those of its operator's arguments that sizes come from, and a device; None = theirs.
"""

import torch
from torch import Tensor

from .tree import Candidates, Tree

Where = torch.device | str | None


def expand(
    logits: Tensor, leaf_scores: Tensor, k: int, device: Where = None
) -> tuple[Tensor, Tensor]:
    tokens = leaf_scores.new_empty((*logits.shape[:2], k), dtype=torch.int64, device=device)
    return tokens, leaf_scores.new_empty(tokens.shape, device=device)


def select_leaves(scores: Tensor, k: int, device: Where = None) -> Tensor:
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32, device=device)


def enter_level(
    words: Tensor, k: int, device: Where = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, _, size = words.shape
    return (
        words.new_empty((batch, k), device=device),
        words.new_empty((batch, k), dtype=torch.float32, device=device),
        words.new_empty((batch, k), dtype=torch.int32, device=device),
        words.new_empty((batch, k), device=device),
        words.new_empty((batch, k, size), device=device),
        words.new_empty(batch, dtype=torch.int32, device=device),
    )


def rerank(candidates: Candidates, max_nodes: int, device: Where = None) -> Tree:
    tokens, scores, parents = candidates
    shape = (tokens.shape[0], max_nodes)
    return Tree(
        tokens=tokens.new_empty(shape, device=device),
        parents=parents.new_empty(shape, device=device),
        depths=parents.new_empty(shape, device=device),
        ancestors=tokens.new_empty((*shape, -(-max_nodes // 64)), device=device),
        scores=scores.new_empty(shape, device=device),
        num_nodes=parents.new_empty(shape[0], device=device),
    )


def tree_attention(q: Tensor, device: Where = None) -> Tensor:
    return q.new_empty(q.shape, device=device)


def sample(positions: Tensor, device: Where = None) -> Tensor:
    return positions.new_empty(positions.shape, device=device)


def verify(
    target_tokens: Tensor, depth: int, device: Where = None
) -> tuple[Tensor, Tensor, Tensor]:
    batch = target_tokens.shape[0]
    return (
        target_tokens.new_empty((batch, depth + 1), dtype=torch.int32, device=device),
        target_tokens.new_empty(batch, dtype=torch.int32, device=device),
        target_tokens.new_empty(batch, device=device),
    )


def accept(
    positions: Tensor, depth: int, device: Where = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    path, accept_length, bonus_token = verify(positions, depth, device)
    return path, accept_length, bonus_token, positions.new_empty(path.shape, device=device)
