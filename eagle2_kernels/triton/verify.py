import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from ..tree import Tree

NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=[
    "depth", "tokens_row", "parents_row", "num_nodes_stride", "target_row",
])  # fmt: skip
def verify_kernel(
    tokens_ptr, parents_ptr, num_nodes_ptr, target_ptr,
    path_ptr, accept_length_ptr, bonus_ptr, path_tokens_ptr,
    depth,
    tokens_row, tokens_column, parents_row, parents_column, num_nodes_stride,
    target_row, target_column,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program walks one row's tree, from one block of nodes to the next.

    path_tokens_ptr may be None.
    """
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr += row * tokens_row
    parents_ptr += row * parents_row
    target_ptr += row * target_row
    path_ptr += row * (depth + 1)
    if path_tokens_ptr is not None:
        path_tokens_ptr += row * (depth + 1)
    num_nodes = tl.load(num_nodes_ptr + row * num_nodes_stride)
    node = tl.where(num_nodes > 0, 0, -1)
    tl.store(path_ptr, node)
    accept_length = 0
    begin = 0
    while begin < num_nodes:  # ascending: a child's number is above its parent's
        nodes = begin + tl.arange(0, BLOCK_N)
        live = nodes < num_nodes
        tokens = tl.load(tokens_ptr + nodes * tokens_column, mask=live, other=-1)
        parents = tl.load(parents_ptr + nodes * parents_column, mask=live, other=-1)
        child = (parents >= 0) & (parents < nodes)
        chosen = tl.load(target_ptr + parents.to(tl.int64) * target_column, mask=child, other=-1)
        # the parent after which the target itself chose this node's token, -1 = none did
        chosen_after = tl.where(child & (tokens == chosen), parents, -1)
        step = first_after(node, nodes, chosen_after)
        while (step < NONE) & (accept_length < depth):
            if path_tokens_ptr is not None:
                token = tl.load(target_ptr + node.to(tl.int64) * target_column)
                tl.store(path_tokens_ptr + accept_length, token)
            node = step
            accept_length += 1
            tl.store(path_ptr + accept_length, node)
            step = first_after(node, nodes, chosen_after)
        begin += BLOCK_N
    bonus = tl.load(target_ptr + node.to(tl.int64) * target_column, mask=node >= 0, other=-1)
    if path_tokens_ptr is not None:
        tl.store(path_tokens_ptr + accept_length, bonus)
    padding = accept_length + 1
    while padding <= depth:
        tl.store(path_ptr + padding, -1)
        if path_tokens_ptr is not None:
            tl.store(path_tokens_ptr + padding, -1)
        padding += 1
    tl.store(accept_length_ptr + row, accept_length)
    tl.store(bonus_ptr + row, bonus)


@triton.jit
def first_after(node, nodes, chosen_after):
    return tl.min(tl.where(chosen_after == node, nodes, NONE))


@on_its_device
def verify(
    tree: Tree,
    target_tokens: Tensor,
    depth: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    out = out or results.verify(target_tokens, depth)
    walk(tree, target_tokens, depth, *out, None)
    return out


def walk(
    tree: Tree,
    target_tokens: Tensor,
    depth: int,
    path: Tensor,
    accept_length: Tensor,
    bonus_token: Tensor,
    path_tokens: Tensor | None,
) -> None:
    batch, nodes = target_tokens.shape
    if batch:
        verify_kernel[(batch,)](
            tree.tokens, tree.parents, tree.num_nodes, target_tokens,
            path, accept_length, bonus_token, path_tokens,
            depth,
            *tree.tokens.stride(), *tree.parents.stride(), *tree.num_nodes.stride(),
            *target_tokens.stride(),
            BLOCK_N=min(max(triton.next_power_of_2(nodes), 32), 256),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
