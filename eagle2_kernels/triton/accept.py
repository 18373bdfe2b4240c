from torch import Tensor

from ..tree import Tree
from .sample import sample
from .verify import verify


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
) -> tuple[Tensor, Tensor, Tensor]:
    return verify(tree, sample(logits, temperature, top_k, top_p, min_p, seed, positions), depth)
