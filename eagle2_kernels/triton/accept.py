from torch import Tensor

from .. import results
from ..device import on_its_device
from ..tree import Tree
from .sample import sample
from .verify import walk


@on_its_device
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
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = out or results.accept(positions, depth)
    target_tokens = sample(logits, temperature, top_k, top_p, min_p, seed, positions)
    walk(tree, target_tokens, depth, *out)
    return out
