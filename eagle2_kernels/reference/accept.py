import torch
from torch import Tensor

from ..tree import Tree
from .out import fills_out
from .sample import sample
from .verify import verify


@fills_out
def accept(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = sample(logits, temperature, top_k, top_p, min_p, seed, positions)
    return accepted(tree, tokens, depth)


def accepted(
    tree: Tree, target_tokens: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    path, accept_length, bonus_token = verify(tree, target_tokens, depth)
    # a child on the path carries what the target chose after its parent
    chosen = target_tokens.gather(1, path.clamp(min=0).long())
    return path, accept_length, bonus_token, torch.where(path < 0, -1, chosen)
