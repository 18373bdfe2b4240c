import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tree import Tree


@triton.jit
def verify_kernel(
    tokens_ptr, parents_ptr, num_nodes_ptr, target_ptr,
    path_ptr, accept_length_ptr, bonus_ptr,
    tokens_row, tokens_column, parents_row, parents_column, num_nodes_stride,
    target_row, target_column,
    depth: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program walks one row's tree; all nodes are looked at in each step."""
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, BLOCK_N)
    num_nodes = tl.load(num_nodes_ptr + row * num_nodes_stride)
    live = nodes < num_nodes
    tokens = tl.load(tokens_ptr + row * tokens_row + nodes * tokens_column, mask=live, other=-1)
    parents = tl.load(parents_ptr + row * parents_row + nodes * parents_column, mask=live, other=-1)

    path_ptr += row * (depth + 1)
    found = num_nodes > 0
    node = tl.where(found, 0, -1)
    tl.store(path_ptr, node)
    bonus = tl.load(target_ptr + row * target_row, mask=found, other=-1)
    accept_length = 0
    for step in range(depth):
        child = live & (nodes > node) & (parents == node) & (tokens == bonus)
        lowest = tl.min(tl.where(child, nodes, BLOCK_N))
        found = found & (lowest < BLOCK_N)
        tl.store(path_ptr + step + 1, tl.where(found, lowest, -1))
        node = tl.where(found, lowest, node)
        accept_length += found.to(tl.int32)
        place = target_ptr + row * target_row + node.to(tl.int64) * target_column
        bonus = tl.load(place, mask=found, other=bonus)
    tl.store(accept_length_ptr + row, accept_length)
    tl.store(bonus_ptr + row, bonus)


def verify(tree: Tree, target_tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    batch, nodes = target_tokens.shape
    path = tree.parents.new_empty((batch, depth + 1))
    accept_length = tree.parents.new_empty(batch)
    bonus_token = target_tokens.new_empty(batch)
    if batch:
        verify_kernel[(batch,)](
            tree.tokens, tree.parents, tree.num_nodes, target_tokens,
            path, accept_length, bonus_token,
            *tree.tokens.stride(), *tree.parents.stride(), *tree.num_nodes.stride(),
            *target_tokens.stride(),
            depth, triton.next_power_of_2(max(nodes, 1)), num_warps=1,
        )  # fmt: skip
    return path, accept_length, bonus_token
