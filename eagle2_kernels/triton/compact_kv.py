import torch
import triton
import triton.language as tl
from torch import Tensor

from ..device import on_its_device


@triton.jit(do_not_specialize=[
    "batch", "columns", "blocks", "block_rows", "capacity",
    "path_row", "accept_length_stride", "prefix_len_stride", "table_row",
])  # fmt: skip
def compact_kv_kernel(
    k_ptr, v_ptr, path_ptr, accept_length_ptr, prefix_len_ptr, table_ptr,
    batch, columns, blocks, block_rows, capacity, elements,
    k_layer, k_block, k_slot, k_head, k_dim, v_layer, v_block, v_slot, v_head, v_dim,
    path_row, path_column, accept_length_stride, prefix_len_stride, table_row, table_column,
    DIM: tl.constexpr, PAGED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program moves a slice of all accepted rows of one layer and batch row, BLOCK_T a time."""
    layer = (tl.program_id(0) // batch).to(tl.int64)
    row = (tl.program_id(0) % batch).to(tl.int64)
    path_ptr += row * path_row
    table_ptr = table_ptr + row * table_row if PAGED else table_ptr
    accepted = tl.load(accept_length_ptr + row * accept_length_stride)
    accepted = tl.minimum(accepted, columns - 1)
    prefix = tl.load(prefix_len_ptr + row * prefix_len_stride)

    element = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    head, dim = (element // DIM).to(tl.int64), (element % DIM).to(tl.int64)
    k_ptr += layer * k_layer + (head * k_head + dim * k_dim)[None, :]
    v_ptr += layer * v_layer + (head * v_head + dim * v_dim)[None, :]
    first = 1
    while first <= accepted:
        step = first + tl.arange(0, BLOCK_T)
        node = tl.load(path_ptr + step * path_column, mask=step <= accepted, other=-1)
        moved = (node >= 0) & (node != step)
        from_block, from_slot, there = find_slot(
            prefix + node, moved, row, table_ptr, table_column, blocks, block_rows, capacity, PAGED
        )
        to_block, to_slot, here = find_slot(
            prefix + step, there, row, table_ptr, table_column, blocks, block_rows, capacity, PAGED
        )
        mask = here[:, None] & (element < elements)[None, :]
        k = tl.load(k_ptr + (from_block * k_block + from_slot * k_slot)[:, None], mask=mask)
        v = tl.load(v_ptr + (from_block * v_block + from_slot * v_slot)[:, None], mask=mask)
        # a row may go where another thread reads: no store before all loads are done. Later
        # steps read further on, since a node's number is not below its step
        tl.debug_barrier()
        tl.store(k_ptr + (to_block * k_block + to_slot * k_slot)[:, None], k, mask=mask)
        tl.store(v_ptr + (to_block * v_block + to_slot * v_slot)[:, None], v, mask=mask)
        first += BLOCK_T


@triton.jit
def find_slot(
    slot, wanted, row, table_ptr, table_column, blocks, block_rows, capacity, PAGED: tl.constexpr
):
    """Where a slot of the row lies: block and slot in it, int64; whether it is in the cache."""
    found = wanted & (slot >= 0) & (slot < capacity)
    block = tl.zeros(slot.shape, tl.int64) + row
    if PAGED:
        place = table_ptr + slot // block_rows * table_column
        block = tl.load(place, mask=found, other=-1).to(tl.int64)
        found = found & (block >= 0) & (block < blocks)
        slot = slot % block_rows
    return block, slot.to(tl.int64), found


@on_its_device
def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    accept_length: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    if k_cache.is_complex():  # there are no integers of 16 bytes
        for part in (torch.real, torch.imag):
            compact_kv(part(k_cache), part(v_cache), path, accept_length, prefix_len, block_table)
        return
    layers, blocks, block_rows, heads, dim = k_cache.shape
    batch, columns = path.shape
    elements = heads * dim
    if columns < 2 or 0 in (layers, batch, elements):
        return
    block_t = min(triton.next_power_of_2(columns - 1), 16)
    tile = 512 * min(k_cache.element_size(), 2)  # more bytes, strided, take over 128 registers
    block_e = min(triton.next_power_of_2(elements), tile // block_t)
    bits = BITS[k_cache.element_size()]
    paged = block_table is not None
    compact_kv_kernel[(layers * batch, triton.cdiv(elements, block_e))](
        k_cache.view(bits), v_cache.view(bits), path, accept_length, prefix_len, block_table,
        batch, columns, blocks, block_rows,
        block_table.shape[1] * block_rows if paged else block_rows, elements,
        *k_cache.stride(), *v_cache.stride(),
        *path.stride(), *accept_length.stride(), *prefix_len.stride(),
        *(block_table.stride() if paged else (0, 0)),
        DIM=dim, PAGED=paged, BLOCK_T=block_t, BLOCK_E=block_e,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
