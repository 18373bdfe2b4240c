from torch import Tensor

from ..tree import Tree
from .sample import sample
from .verify import walk


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
    target_tokens = sample(logits, temperature, top_k, top_p, min_p, seed, positions)
    path_tokens = target_tokens.new_empty((len(target_tokens), depth + 1))
    return *walk(tree, target_tokens, depth, path_tokens), path_tokens
