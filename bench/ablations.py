"""EAGLE-2 with a stage of its policy taken away: operators for `generate(..., ops=...)`.

The paper's ablation (arXiv 2406.16858, section 5.3), with the same head and the same budget:

- no value: the leaves of a level are its most confident children, not those of the likeliest paths;
- no rerank: the tree is what expansion chose as leaves, level by level until the budget is full.
"""

from types import SimpleNamespace

import torch
from torch import Tensor

import eagle2_kernels as ek


def without(*stages: str) -> SimpleNamespace:
    """The operators, less "value", "rerank" or both."""
    operators = {name: getattr(ek, name) for name in ek.ops.OPERATORS}
    measure = confidences if "value" in stages else path_scores
    enter = enter_leaves if "rerank" in stages else enter_all
    # the memory that the loop offers for the leaves is not taken
    operators["enter_level"] = lambda *level, out=None: enter(measure, *level)
    return SimpleNamespace(**operators)


def path_scores(candidates: ek.Candidates, scores: Tensor, parents: Tensor) -> Tensor:
    return scores


def confidences(candidates: ek.Candidates, scores: Tensor, parents: Tensor) -> Tensor:
    """Log-probability [B, L, K] of each child alone."""
    above = candidates.scores.gather(1, parents.clamp(min=0).long())
    return scores - torch.where(parents < 0, 0.0, above)[..., None]


def enter_all(measure, candidates, begin, tokens, scores, parents, words, slot, k, num_nodes):
    """`enter_level` with the best k by `measure` as leaves; all children stay candidates."""
    chosen = best(measure(candidates, scores, parents), scores, k, torch.full_like(num_nodes, k))
    leaves = ek.enter_level(candidates, begin, tokens, chosen, parents, words, slot, k, num_nodes)
    candidates.scores[:, begin : begin + scores[0].numel()] = scores.flatten(1)
    return leaves


def enter_leaves(measure, candidates, begin, tokens, scores, parents, words, slot, k, num_nodes):
    """As `enter_all`, but no other children are candidates, and no more than the tree will hold."""
    room = num_nodes - 1 - (candidates.scores[:, :begin] > -torch.inf).sum(1, dtype=torch.int32)
    chosen = best(measure(candidates, scores, parents), scores, k, room)
    *leaves, live = ek.enter_level(
        candidates, begin, tokens, chosen, parents, words, slot, k, num_nodes
    )
    return *leaves, torch.where(room > k, live, 0)  # a full tree needs no further level


def best(by: Tensor, scores: Tensor, k: int, room: Tensor) -> Tensor:
    """The scores [B, L, K] of each row's best k by another measure, at most `room`; else -inf."""
    index = ek.select_leaves(by.flatten(1).contiguous(), k).long()
    inside = torch.arange(k, device=room.device) < room[:, None]
    found = scores.flatten(1).gather(1, index).masked_fill(~inside, -torch.inf)
    flat = torch.full_like(scores.flatten(1), -torch.inf)
    return flat.scatter_(1, index, found).view_as(scores)
