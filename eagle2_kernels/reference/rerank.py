import torch
from torch import Tensor

from ..tree import Candidates, Tree
from .order import order_key
from .out import fills_out
from .words import pack


@fills_out
def rerank(candidates: Candidates, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int) -> Tree:
    tokens, parents = candidates.tokens, candidates.parents.long()
    scores = capped_scores(candidates.scores, parents)
    wanted = num_nodes.clamp(0, max_nodes)[:, None]
    keep = (rank(scores) < wanted - 1) & (scores > -torch.inf)

    # node numbers: the root is 0, then the kept candidates by ascending index
    number = keep.cumsum(-1)
    slot = torch.where(keep, number, max_nodes)  # the extra column takes what is not kept
    within = parents.clamp(0, max(parents.shape[-1] - 1, 0))
    node_parents = torch.where(parents < 0, 0, number.gather(-1, within))

    def lay_out(root, values, filler):
        out = values.new_full((len(values), max_nodes + 1), filler)
        out.scatter_(-1, slot, values)
        out[:, 0] = torch.where(wanted[:, 0] > 0, root, filler)
        return out[:, :max_nodes]

    count = torch.where(wanted > 0, 1 + keep.sum(-1, keepdim=True), 0)
    tree_parents = lay_out(-1, node_parents, -1)
    visible = ancestor_matrix(tree_parents, count)
    return Tree(
        tokens=lay_out(root_tokens, tokens, -1),
        parents=tree_parents.to(torch.int32),
        depths=(visible.sum(-1) - 1).clamp(min=0).to(torch.int32),
        ancestors=pack(visible),
        scores=lay_out(0.0, scores, -torch.inf),
        num_nodes=count[:, 0].to(torch.int32),
    )


def rank(scores: Tensor) -> Tensor:
    order = order_key(scores).argsort(-1, descending=True)
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def capped_scores(scores: Tensor, parents: Tensor) -> Tensor:
    """No candidate above its parent, NaN and candidates without a valid parent at -inf.

    Follows every path to the root in doubling steps. What `expand` returns comes out unchanged.
    """
    index = torch.arange(scores.shape[-1], device=scores.device)
    dead = scores.isnan() | (parents < -1) | (parents >= index)
    scores = torch.where(dead, -torch.inf, scores) + 0.0
    parents = torch.where(dead, -1, parents)
    for _ in range(max(scores.shape[-1] - 1, 0).bit_length()):
        above = torch.where(parents < 0, torch.inf, scores.gather(-1, parents.clamp(min=0)))
        scores = torch.minimum(scores, above)
        parents = torch.where(parents < 0, -1, parents.gather(-1, parents.clamp(min=0)))
    return scores


def ancestor_matrix(parents: Tensor, count: Tensor) -> Tensor:
    """Booleans [B, N, N]: column j is an ancestor of row i, or i itself; padding rows are empty."""
    nodes = torch.arange(parents.shape[-1], device=parents.device)
    step = (parents[..., None] == nodes) | (nodes[:, None] == nodes)
    for _ in range(max(len(nodes) - 1, 0).bit_length()):
        step = (step.float() @ step.float()) > 0
    return step & (nodes < count)[..., None]
