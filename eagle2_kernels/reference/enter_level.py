import torch
from torch import Tensor

from ..tree import Candidates
from .order import best, order_key
from .out import fills_out


@fills_out
def enter_level(
    candidates: Candidates,
    begin: int,
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    words: Tensor,
    first_slot: int,
    k: int,
    num_nodes: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    children = tokens.shape[2]
    end = begin + parents.shape[1] * children
    candidates.tokens[:, begin:end] = tokens.flatten(1)
    candidates.scores[:, begin:end] = scores.flatten(1)
    candidates.parents[:, begin:end] = parents.repeat_interleave(children, 1)

    index = best(scores.flatten(1), k)
    rank = index // children
    place = first_slot + torch.arange(k, device=index.device)
    own_bit = torch.where(
        place[:, None] // 64 == torch.arange(words.shape[2], device=index.device),
        torch.ones_like(place)[:, None] << (place % 64)[:, None],
        0,
    )
    keys = order_key(candidates.scores[:, :end])
    ahead = (keys[:, None] > keys.gather(1, begin + index)[..., None]).sum(-1)
    leaf_scores = scores.flatten(1).gather(1, index)
    live = (ahead < num_nodes[:, None] - 1) & (leaf_scores > -torch.inf)
    return (
        tokens.flatten(1).gather(1, index),
        leaf_scores,
        (begin + index).to(torch.int32),
        rank,
        words.gather(1, rank[..., None].expand(-1, -1, words.shape[2])) | own_bit,
        live.sum(1, dtype=torch.int32),
    )
