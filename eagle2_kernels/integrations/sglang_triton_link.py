"""Links and masks of SGLang's trees on CUDA and ROCm tensors; their meaning: `sglang_cpu.py`."""

import triton
import triton.language as tl
from torch import Tensor

from .sglang_cpu import item_size


@triton.jit
def parent_of(flat, list_ptr, list_column, width, topk):
    """Flat number of the parent: -1 = the root, -2 = none."""
    block = flat // topk
    listed = (flat >= 0) & (block > 0) & (block < width)
    above = tl.load(list_ptr + block * list_column, mask=listed, other=-2)
    above = tl.where(above < 0, -2, above)
    return tl.where((flat >= 0) & (block == 0), -1, above)


@triton.jit
def flat_of(nodes, selected_ptr, selected_column, num_nodes):
    chosen = (nodes >= 1) & (nodes < num_nodes)
    return tl.load(selected_ptr + (nodes - 1) * selected_column, mask=chosen, other=-3)


@triton.jit
def node_of(flat, selected_ptr, selected_column, num_nodes, BLOCK: tl.constexpr):
    """The first node with this flat number, -1 where there is none."""
    found = tl.full([BLOCK], 2147483647, tl.int32)
    start = 0
    while start < num_nodes:
        nodes = start + tl.arange(0, BLOCK)
        match = flat[:, None] == flat_of(nodes, selected_ptr, selected_column, num_nodes)[None, :]
        found = tl.minimum(found, tl.min(tl.where(match, nodes[None, :], 2147483647), 1))
        start += BLOCK
    return tl.where(found == 2147483647, -1, found)


@triton.jit(do_not_specialize=["num_nodes", "width", "topk", "depth"])
def link_tree_kernel(
    list_ptr, selected_ptr, seq_lens_ptr, mask_ptr, positions_ptr,
    index_ptr, next_token_ptr, next_sibling_ptr,
    list_row, list_column, selected_row, selected_column, seq_lens_stride,
    num_nodes, width, topk, depth,
    MODE: tl.constexpr, ITEM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK nodes of a row, and BLOCK columns of their part of the mask."""
    row = tl.program_id(0).to(tl.int64)
    nodes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first_column = tl.program_id(2) * BLOCK
    live = nodes < num_nodes
    list_ptr += row * list_row
    selected_ptr += row * selected_row
    seq_len = tl.load(seq_lens_ptr + row * seq_lens_stride).to(tl.int64)

    flat = flat_of(nodes, selected_ptr, selected_column, num_nodes)
    parent = parent_of(flat, list_ptr, list_column, width, topk)
    found = node_of(parent, selected_ptr, selected_column, num_nodes, BLOCK)
    known = (parent == -1) | ((parent >= 0) & (found > 0))
    bits = tl.where(nodes // BLOCK == first_column // BLOCK, 1 << (nodes % BLOCK), 0)
    bits = tl.where(first_column == 0, bits | 1, bits)
    depths = tl.zeros([BLOCK], tl.int32)
    climbing = (live & (nodes > 0)).to(tl.int32)
    above = parent
    step = 0
    while step < depth:
        depths += climbing
        at = node_of(above, selected_ptr, selected_column, num_nodes, BLOCK)
        climbing = climbing * ((above >= 0) & (at > 0)).to(tl.int32)
        here = (climbing > 0) & (at // BLOCK == first_column // BLOCK)
        bits = tl.where(here, bits | (1 << (at % BLOCK)), bits)
        above = parent_of(tl.where(climbing > 0, above, -2), list_ptr, list_column, width, topk)
        step += 1

    place = row * num_nodes + nodes
    if MODE == 2:
        for byte in tl.static_range(ITEM):
            value = ((bits >> (8 * byte)) & 255).to(tl.uint8)
            tl.store(mask_ptr + place * ITEM + byte, value, mask=live)
    else:
        line = place * num_nodes
        if MODE == 0:
            before = tl.zeros([], tl.int64)
            other = row * 0
            while other < row:  # the prefixes of the rows above
                rows = other + tl.arange(0, BLOCK)
                lengths = tl.load(seq_lens_ptr + rows * seq_lens_stride, mask=rows < row, other=0)
                before += tl.sum(lengths.to(tl.int64))
                other += BLOCK
            line += num_nodes * before + (nodes + 1) * seq_len
        columns = first_column + tl.arange(0, BLOCK)
        cells = ((bits[:, None] >> tl.arange(0, BLOCK)[None, :]) & 1).to(tl.uint8)
        inside = live[:, None] & (columns < num_nodes)[None, :]
        tl.store(mask_ptr + line[:, None] + columns[None, :], cells, mask=inside)

    if first_column == 0:
        tl.store(positions_ptr + place, seq_len + depths, mask=live)
        tl.store(index_ptr + place, place, mask=live)
        own = tl.where(nodes == 0, -1, tl.where(live, flat, -4))
        kin = tl.where(known, parent, -4)
        child = tl.full([BLOCK], 2147483647, tl.int32)
        sibling = tl.full([BLOCK], 2147483647, tl.int32)
        start = 0
        while start < num_nodes:
            others = start + tl.arange(0, BLOCK)
            theirs = flat_of(others, selected_ptr, selected_column, num_nodes)
            theirs = parent_of(theirs, list_ptr, list_column, width, topk)
            match = theirs[None, :] == own[:, None]
            child = tl.minimum(child, tl.min(tl.where(match, others[None, :], 2147483647), 1))
            match = (theirs[None, :] == kin[:, None]) & (others[None, :] > nodes[:, None])
            sibling = tl.minimum(sibling, tl.min(tl.where(match, others[None, :], 2147483647), 1))
            start += BLOCK
        child = tl.where(child == 2147483647, -1, child).to(tl.int64)
        sibling = tl.where(sibling == 2147483647, -1, sibling).to(tl.int64)
        tl.store(next_token_ptr + place, child, mask=live)
        tl.store(next_sibling_ptr + place, sibling, mask=live)


def link_tree(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    mask_mode: int,
) -> None:
    batch, nodes = retrieve_index.shape
    blocks = triton.cdiv(nodes, 32)
    if batch:
        link_tree_kernel[(batch, blocks, blocks)](
            parent_list, selected, seq_lens, tree_mask, positions,
            retrieve_index, next_token, next_sibling,
            *parent_list.stride(), *selected.stride(), seq_lens.stride(0),
            nodes, parent_list.shape[1], topk, depth,
            mask_mode, item_size(nodes), 32, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
