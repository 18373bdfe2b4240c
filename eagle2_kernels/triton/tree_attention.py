import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .visible import is_live, masked_slots, place_of, split_of, start_of_window

# finite, so that a row which has seen nothing yet subtracts to -inf and not to NaN
LOWEST = tl.constexpr(-3.4e38)
LOG2_E = 1.4426950408889634


@triton.jit
def dot_of(
    q, q_ptr, q_column, k_ptr, k_column, E: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr
):
    """Products of queries [R, E] and keys [E, T], CHUNK channels at a time."""
    if CHUNK == q.shape[1]:
        e = tl.arange(0, CHUNK)[:, None]
        k = tl.load(k_ptr + e * k_column, mask=e < E, other=0)
        return tl.dot(q, k.to(DOT), input_precision="ieee")
    else:
        scores = tl.full([q.shape[0], k_ptr.shape[1]], 0, tl.float32)
        for chunk in tl.static_range(q.shape[1] // CHUNK):
            e = chunk * CHUNK + tl.arange(0, CHUNK)
            q = tl.load(q_ptr + e[None, :] * q_column, mask=e[None, :] < E, other=0)
            k = tl.load(k_ptr + e[:, None] * k_column, mask=e[:, None] < E, other=0)
            scores = tl.dot(q, k, scores, input_precision="ieee")
        return scores


@triton.jit
def take(scores, v, seen, scale, mixed, peak, total, DOT: tl.constexpr):
    """Take slots, v [T, E], into the rows' running softmax; `seen` has all bits set or none."""
    if seen is not None:
        bits = (scores * scale).to(tl.int32, bitcast=True)
        scores, scale = (bits & seen | ~seen & -0x800000).to(tl.float32, bitcast=True), 1.0
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v.dtype).to(DOT)
    mixed = tl.dot(weights, v.to(DOT), mixed * decay[:, None], input_precision="ieee")
    return mixed, new_peak, total


@triton.jit(
    do_not_specialize=["nodes", "groups", "group", "capacity", "splits", "window", "prefix_len_row",
                       "num_nodes_row", "words_row", "words_node", "words_column", "table_row",
                       "table_column"]
)  # fmt: skip
def tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, prefix_len_ptr, num_nodes_ptr, words_ptr, table_ptr, part_ptr,
    nodes, groups, group, capacity, splits, scale, window,
    q_row, q_node, q_head, q_column, k_block, k_slot, k_group, k_column,
    v_block, v_slot, v_group, v_column,
    prefix_len_row, num_nodes_row, words_row, words_node, words_column, table_row, table_column,
    WORDS: tl.constexpr, PAGE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    STEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: rows (node, head of the group) of a kv head, channels, one split's slots."""
    parts: tl.constexpr = BLOCK_E // BLOCK_V
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    split, kv_head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, head = kv_head // groups, kv_head % groups
    prefix, limit, first, clear, full, prefix_blocks, blocks, share = split_of(
        prefix_len_ptr + row * prefix_len_row, num_nodes_ptr + row * num_nodes_row,
        capacity, splits, window, WORDS, BLOCK_T,
    )  # fmt: skip
    begin, end = split * share, tl.minimum((split + 1) * share, blocks)
    if begin >= end:
        return
    r, e = tile * BLOCK_R + tl.arange(0, BLOCK_R), part * BLOCK_V + tl.arange(0, BLOCK_V)
    node = tl.minimum(r // group, nodes - 1).to(tl.int64)  # rows past the last are not stored
    words_ptr += row * words_row + node * words_node
    if tl.max(is_live(words_ptr, words_column, limit, WORDS).to(tl.int32), 0) == 0:
        return
    start = None
    if window is not None:
        start = start_of_window(words_ptr, words_column, prefix, limit, window, WORDS)

    q_ptr += row * q_row + node[:, None] * q_node + (head * group + r % group)[:, None] * q_head
    all_e = tl.arange(0, BLOCK_E)[None, :]
    q = tl.load(q_ptr + all_e * q_column, mask=all_e < E, other=0).to(DOT)
    k_ptr += head * k_group
    v_ptr += head * v_group + e[None, :] * v_column
    if table_ptr is None:
        k_ptr += row * k_block
        v_ptr += row * v_block
    else:
        table_ptr += row * table_row
    mixed = tl.full([BLOCK_R, BLOCK_V], 0, tl.float32)
    peak, total = tl.full([BLOCK_R], LOWEST, tl.float32), tl.full([BLOCK_R], 0, tl.float32)
    edge, rest = tl.maximum(tl.minimum(end, clear) - begin, 0), tl.maximum(begin, full)
    t = tl.arange(0, STEP)
    spoiled = 0.0
    for j in tl.range((edge + tl.maximum(end - rest, 0)) * (BLOCK_T // STEP), num_stages=1):
        word, slot, count = masked_slots(
            j, words_ptr, words_column, start, prefix, limit, first, prefix_blocks,
            begin, edge, rest, BLOCK_T, STEP,
        )  # fmt: skip
        seen = word[:, None] << (31 - t)[None, :] >> 31  # all bits or none
        slot = tl.minimum(slot + t, capacity - 1)
        k_row = place_of(slot, table_ptr, table_column, k_block, k_slot, PAGE)
        v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
        scores = dot_of(q, q_ptr, q_column, k_ptr + k_row[None, :], k_column, E, CHUNK, DOT)
        mask = (t < count)[:, None] & (e[None, :] < E)
        v = tl.load(v_ptr + v_row[:, None], mask=mask, other=0)
        # 0 * NaN is NaN: what is not finite is left to the merge, which looks at who sees it
        zero = v.to(tl.float32) * 0
        spoiled += tl.sum(zero)
        v = tl.where(zero == 0, v, 0)
        mixed, peak, total = take(scores, v, seen, scale, mixed, peak, total, DOT)

    t = tl.arange(0, BLOCK_T)
    for block in tl.range(tl.maximum(begin, clear), tl.minimum(end, full)):
        slot = first + block * BLOCK_T + t
        k_row = place_of(slot, table_ptr, table_column, k_block, k_slot, PAGE)
        v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
        scores = dot_of(q, q_ptr, q_column, k_ptr + k_row[None, :], k_column, E, CHUNK, DOT)
        v = tl.load(v_ptr + v_row[:, None], mask=e[None, :] < E, other=0)
        mixed, peak, total = take(scores, v, None, scale, mixed, peak, total, DOT)

    inside = r < nodes * group
    part_ptr += ((kv_head * splits + split) * nodes * group + r) * (E + 4)
    tl.store(part_ptr + E, peak, mask=inside)
    tl.store(part_ptr + E + 1, total, mask=inside)
    tl.store(part_ptr + E + 2 + part, spoiled, mask=inside)
    tl.store(part_ptr[:, None] + e[None, :], mixed, mask=inside[:, None] & (e[None, :] < E))


@triton.jit(
    do_not_specialize=["nodes", "groups", "group", "capacity", "splits", "window", "prefix_len_row",
                       "num_nodes_row", "words_row", "words_node", "words_column", "table_row",
                       "table_column"]
)  # fmt: skip
def tree_attention_merge_kernel(
    v_ptr, prefix_len_ptr, num_nodes_ptr, words_ptr, table_ptr, part_ptr, out_ptr,
    nodes, groups, group, capacity, splits, window, v_block, v_slot, v_group, v_column,
    prefix_len_row, num_nodes_row, words_row, words_node, words_column, table_row, table_column,
    WORDS: tl.constexpr, PAGE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of a kv head, some channels, all splits."""
    kv_head = tl.program_id(2).to(tl.int64)
    row, head = kv_head // groups, kv_head % groups
    prefix, limit, first, clear, full, prefix_blocks, blocks, share = split_of(
        prefix_len_ptr + row * prefix_len_row, num_nodes_ptr + row * num_nodes_row,
        capacity, splits, window, WORDS, BLOCK_T,
    )  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside, node = r < nodes * group, tl.minimum(r // group, nodes - 1).to(tl.int64)
    words_ptr += row * words_row + node * words_node
    live = inside & is_live(words_ptr, words_column, limit, WORDS)

    v_ptr += head * v_group + e * v_column
    if table_ptr is None:
        v_ptr += row * v_block
    else:
        table_ptr += row * table_row
    split = tl.arange(0, BLOCK_S)
    there = (split * share < blocks)[:, None] & live[None, :]
    part_ptr += ((kv_head * splits + split)[:, None] * nodes * group + r[None, :]) * (E + 4)
    peaks = tl.load(part_ptr + E, mask=there, other=LOWEST)
    factor = tl.exp2(peaks - tl.max(peaks, 0)[None, :])
    total = tl.sum(factor * tl.load(part_ptr + E + 1, mask=there, other=0), 0)
    mask = there[:, :, None] & (e < E)[None, None, :]
    mixed = tl.load(part_ptr[:, :, None] + e[None, None, :], mask=mask, other=0)
    mixed = tl.sum(factor[:, :, None] * mixed, 0)
    spoiled = part_ptr + E + 2 + tl.program_id(1) * BLOCK_E // BLOCK_V
    if tl.sum(tl.load(spoiled, mask=there, other=0)) != 0:
        start = None
        if window is not None:
            start = start_of_window(words_ptr, words_column, prefix, limit, window, WORDS)
        for j in tl.range((clear + blocks - full) * BLOCK_T, num_stages=1):
            word, slot, _ = masked_slots(
                j, words_ptr, words_column, start, prefix, limit, first, prefix_blocks,
                0, clear, full, BLOCK_T, 1,
            )  # fmt: skip
            slot = tl.minimum(slot, capacity - 1)
            v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
            v = tl.load(v_ptr + v_row, mask=e < E, other=0)
            seen = (word & 1 != 0)[:, None]
            mixed += tl.where(seen, (v.to(tl.float32) * 0)[None, :], 0)

    out_ptr += ((row * nodes + node) * groups * group + head * group + r % group)[:, None] * E
    out = tl.where(live[:, None], mixed / total[:, None], 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + e[None, :], out, mask=inside[:, None] & (e < E)[None, :])


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    block_table: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if not out.numel():
        return out
    (batch, nodes, heads, dim), (_, size, groups, _) = q.shape, k_cache.shape
    table = () if block_table is None else block_table.stride()
    capacity = size if block_table is None else size * block_table.shape[1]
    rows, kv_heads = nodes * (heads // groups), batch * groups
    padded = max(triton.next_power_of_2(dim), 64)
    values = min(padded, 128)
    tile, block, step, chunk, warps = configuration(q.dtype, padded, rows)
    tiles = triton.cdiv(rows, tile) * (padded // values)
    slots = processors(q.device) * (1 if tile == 128 else 2)
    splits = max(1, min(slots // (tiles * kv_heads), capacity // 256, 128))
    parts = q.new_empty((kv_heads * splits * rows, dim + 4), dtype=torch.float32)
    window = None if window is None else min(window, 2**31 - 1)
    strides = (*prefix_len.stride(), *num_nodes.stride(), *ancestors.stride(), *(table or (0, 0)))
    sizes = (nodes, groups, heads // groups, capacity, splits)
    fixed = (ancestors.shape[2], size, dim)
    tree_attention_kernel[tiles, splits, kv_heads](
        q, k_cache, v_cache, prefix_len, num_nodes, ancestors, block_table, parts,
        *sizes, scale * LOG2_E, window, *q.stride(), *k_cache.stride(), *v_cache.stride(), *strides,
        *fixed, padded, values, chunk, tile, block, step, dot_type(q.dtype),
        num_warps=warps, num_stages=2,
    )  # fmt: skip
    stack = triton.next_power_of_2(splits)
    channels = min(triton.next_power_of_2(dim), values, max(4096 // stack, 32))
    tile = min(triton.next_power_of_2(rows), max(4096 // (stack * channels), 1))
    grid = (triton.cdiv(rows, tile), triton.cdiv(dim, channels), kv_heads)
    tree_attention_merge_kernel[grid](
        v_cache, prefix_len, num_nodes, ancestors, block_table, parts, out,
        *sizes, window, *v_cache.stride(), *strides, *fixed, channels, values, tile, stack, block,
        num_warps=4,
    )  # fmt: skip
    return out


def configuration(dtype: torch.dtype, padded: int, rows: int) -> tuple[int, int, int, int, int]:
    """Rows and slots of a tile, masked slots, channels at a time, warps: measured to fit."""
    if dtype == torch.float32:
        # a product in full precision is made of plain multiplications, all in registers
        return 16, 32, 16, padded, 4
    tile = min(max(triton.next_power_of_2(rows), 16), 128)
    return tile, 64, 32, padded, 8 if tile == 128 else 4


@functools.cache
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """What products are taken in: Triton's interpreter multiplies the bits of bfloat16."""
    widened = dtype == torch.float32 or triton.knobs.runtime.interpret
    return (
        tl.float32 if widened else {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    )
