import torch
from torch import Tensor

from ..tree import Tree
from .out import fills_out


@fills_out
def verify(tree: Tree, target_tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    nodes = torch.arange(tree.tokens.shape[1], device=target_tokens.device)
    live = nodes < tree.num_nodes[:, None]
    node = torch.where(live[:, :1], 0, -1)  # [B, 1]; -1 = a row without a tree
    steps, bonus = [node], target_or_none(target_tokens, node)
    for _ in range(depth):
        child = live & (nodes > node) & (tree.parents == node) & (tree.tokens == bonus)
        step = child.to(torch.int8).argmax(-1, keepdim=True)  # the lowest node number
        found = child.any(-1, keepdim=True) & (steps[-1] >= 0)
        steps.append(torch.where(found, step, -1))
        node = torch.where(found, step, node)
        bonus = target_or_none(target_tokens, node)
    path = torch.cat(steps, -1).to(torch.int32)
    return path, (path[:, 1:] >= 0).sum(-1).to(torch.int32), bonus[:, 0]


def target_or_none(target_tokens: Tensor, node: Tensor) -> Tensor:
    return torch.where(node < 0, -1, target_tokens.gather(-1, node.clamp(min=0)))
