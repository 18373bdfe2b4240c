import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from .search import choose
from .visible import depth_of, masked_slots, place_of

# finite, so that a row which has seen nothing yet subtracts to -inf and not to NaN
LOWEST = tl.constexpr(-3.4e38)
LOG2_E = 1.4426950408889634
STEP = tl.constexpr(16)  # slots taken at a time where a mask is needed, the fewest of a product


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
        for first in tl.range(0, E, CHUNK):
            e = first + tl.arange(0, CHUNK)
            part = tl.load(q_ptr + e[None, :] * q_column, mask=e[None, :] < E, other=0)
            k = tl.load(k_ptr + e[:, None] * k_column, mask=e[:, None] < E, other=0)
            scores = tl.dot(part.to(DOT), k.to(DOT), scores, input_precision="ieee")
        return scores


@triton.jit
def take(scores, v, mixed, peak, total, DOT: tl.constexpr):
    """Take slots, v [T, E], into the rows' running softmax to the base 2."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(v.dtype).to(DOT)
    mixed = tl.dot(weights, v.to(DOT), mixed * decay[:, None], input_precision="ieee")
    return mixed, new_peak, total


@triton.jit(
    do_not_specialize=["nodes", "groups", "group", "capacity", "window", "prefix_len_row",
                       "num_nodes_row", "words_row", "words_node", "words_column", "table_row",
                       "table_column"]
)  # fmt: skip
def tree_attention_kernel(
    q_ptr, k_ptr, v_ptr, prefix_len_ptr, num_nodes_ptr, words_ptr, table_ptr, part_ptr,
    nodes, groups, group, capacity, words, scale, window,
    q_row, q_node, q_head, q_column, k_block, k_slot, k_group, k_column,
    v_block, v_slot, v_group, v_column,
    prefix_len_row, num_nodes_row, words_row, words_node, words_column, table_row, table_column,
    PAGE: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One program: rows (node, head of the group) of a kv head, channels, one part of the slots.

    Part 0 is the slots which not every row sees; the others share the whole blocks of the prefix.
    """
    slices: tl.constexpr = BLOCK_E // BLOCK_V
    r = tl.program_id(0) // slices * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(0) % slices * BLOCK_V + tl.arange(0, BLOCK_V)
    kv_head, part = tl.program_id(1), tl.program_id(2)
    row, head = (kv_head // groups).to(tl.int64), (kv_head % groups).to(tl.int64)
    node = tl.minimum(r // group, nodes - 1).to(tl.int64)  # rows past the last are not stored
    words_ptr += row * words_row + node * words_node
    prefix = tl.minimum(tl.maximum(tl.load(prefix_len_ptr + row * prefix_len_row), 0), capacity)
    limit = tl.load(num_nodes_ptr + row * num_nodes_row)
    limit = tl.minimum(tl.minimum(limit, 64 * words), capacity)
    depth = depth_of(words_ptr, words_column, limit)
    deepest = tl.max(depth, 0)
    # slots first..clear of the prefix are in the window of some rows only
    first, clear = 0, 0
    if window is not None:
        first = tl.minimum(tl.maximum(prefix + 1 - window, 0), prefix)
        clear = (tl.maximum(prefix + deepest - window - first, 0) + BLOCK_T - 1) // BLOCK_T
    full = (prefix - first) // BLOCK_T
    clear = tl.minimum(clear, full)

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
    if part == 0:
        passed, spoiled = tl.full([BLOCK_R], 0, tl.int32), 0.0
        last = tl.minimum(prefix + limit, capacity) - 1
        edge, rest = clear * (BLOCK_T // STEP), first + full * BLOCK_T
        steps = edge + tl.cdiv(prefix - rest, STEP) + tl.cdiv(limit, STEP)
        for j in tl.range(tl.where(deepest > 0, steps, 0)):
            slot, seen, passed = masked_slots(
                j, words_ptr, words_column, prefix, limit, first, last, edge, rest, window, depth,
                passed, STEP,
            )  # fmt: skip
            k_row = place_of(slot, table_ptr, table_column, k_block, k_slot, PAGE)
            v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
            scores = dot_of(q, q_ptr, q_column, k_ptr + k_row[None, :], k_column, E, CHUNK, DOT)
            scores = tl.where(seen, scores * scale, float("-inf"))
            v = tl.load(v_ptr + v_row[:, None], mask=e[None, :] < E, other=0)
            zero = v.to(tl.float32) * 0
            spoiled += tl.sum(zero)
            v = tl.where(zero == 0, v, 0)
            mixed, peak, total = take(scores, v, mixed, peak, total, DOT)
        # 0 * NaN is NaN: what is not finite comes in last, for the rows that see it
        passed = tl.full([BLOCK_R], 0, tl.int32)
        for j in tl.range(tl.where(spoiled == 0, 0, steps), num_stages=1):
            slot, seen, passed = masked_slots(
                j, words_ptr, words_column, prefix, limit, first, last, edge, rest, window, depth,
                passed, STEP,
            )  # fmt: skip
            v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
            v = tl.load(v_ptr + v_row[:, None], mask=e[None, :] < E, other=0)
            bad = v.to(tl.float32) * 0 != 0
            hit = tl.dot(seen.to(DOT), bad.to(DOT), input_precision="ieee")
            mixed = tl.where(hit != 0, float("nan"), mixed)
    else:
        share = tl.cdiv(tl.where(deepest > 0, full - clear, 0), tl.num_programs(2) - 1)
        begin = clear + (part - 1) * share
        # counted from 0: from elsewhere, Triton no longer sees that loads are of whole rows
        for j in tl.range(tl.minimum(share, full - begin)):
            slot = first + (begin + j) * BLOCK_T + tl.arange(0, BLOCK_T)
            k_row = place_of(slot, table_ptr, table_column, k_block, k_slot, PAGE)
            v_row = place_of(slot, table_ptr, table_column, v_block, v_slot, PAGE)
            scores = dot_of(q, q_ptr, q_column, k_ptr + k_row[None, :], k_column, E, CHUNK, DOT)
            v = tl.load(v_ptr + v_row[:, None], mask=e[None, :] < E, other=0)
            mixed, peak, total = take(scores * scale, v, mixed, peak, total, DOT)

    inside = r < nodes * group
    # padding is told by its peak: a total of 0 may also be that of visible scores of -inf
    peak, total = tl.where(depth > 0, peak, float("-inf")), tl.where(depth > 0, total, 0)
    part_ptr += ((kv_head.to(tl.int64) * tl.num_programs(2) + part) * nodes * group + r) * (E + 2)
    tl.store(part_ptr + E, peak, mask=inside)
    tl.store(part_ptr + E + 1, total, mask=inside)
    inside &= total != 0
    tl.store(part_ptr[:, None] + e[None, :], mixed, mask=inside[:, None] & (e[None, :] < E))


@triton.jit(do_not_specialize=["nodes", "groups", "group", "parts"])
def tree_attention_merge_kernel(
    part_ptr, out_ptr, nodes, groups, group, parts,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the rows of a kv head, some channels, all parts."""
    kv_head = tl.program_id(1)
    row, head = (kv_head // groups).to(tl.int64), kv_head % groups
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    part, inside = tl.arange(0, BLOCK_S), r < nodes * group
    there = (part < parts)[:, None] & inside[None, :]
    first = (kv_head.to(tl.int64) * parts + part) * nodes * group
    part_ptr += (first[:, None] + r[None, :]) * (E + 2)
    totals = tl.load(part_ptr + E + 1, mask=there, other=0)
    peaks = tl.load(part_ptr + E, mask=there, other=float("-inf"))
    live = tl.max((peaks != float("-inf")).to(tl.int32), 0)
    factor = tl.exp2(peaks - tl.max(peaks, 0)[None, :])
    total = tl.sum(factor * totals, 0)
    mask = (there & (totals != 0))[:, :, None] & (e < E)[None, None, :]
    mixed = tl.load(part_ptr[:, :, None] + e[None, None, :], mask=mask, other=0)
    mixed = tl.sum(factor[:, :, None] * mixed, 0)
    out_ptr += ((row * nodes + r // group) * groups * group + head * group + r % group)[:, None] * E
    out = tl.where(live[:, None] != 0, mixed / total[:, None], 0)
    mask = inside[:, None] & (e < E)[None, :]
    tl.store(out_ptr + e[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@on_its_device
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = results.tree_attention(q) if out is None else out
    if not out.numel():
        return out
    (batch, nodes, heads, dim), groups = q.shape, k_cache.shape[2]
    size, table = k_cache.shape[1], (0, 0) if block_table is None else block_table.stride()
    # a length that is constant in the kernel only where blocks have it
    page, capacity = (1, size) if block_table is None else (size, size * block_table.shape[1])
    rows, kv_heads = nodes * (heads // groups), batch * groups
    padded = max(triton.next_power_of_2(dim), 32)
    window = None if window is None else min(window, 2**31 - 1)
    plain = q.dtype == torch.float32 or any(x.stride(3) != 1 for x in (q, k_cache, v_cache))

    def launch(tile: int, block: int, values: int, chunk: int, warps: int, waves: int) -> None:
        tiles = triton.cdiv(rows, tile) * (padded // values)
        places = processors(q.device) * (8 // warps) * waves
        parts = 1 + max(1, min(places // (tiles * kv_heads), capacity // 256, 127))
        part = q.new_empty((kv_heads * parts * rows, dim + 2), dtype=torch.float32)
        tree_attention_kernel[tiles, kv_heads, parts](
            q, k_cache, v_cache, prefix_len, num_nodes, ancestors, block_table, part,
            nodes, groups, heads // groups, capacity, ancestors.shape[2], scale * LOG2_E, window,
            *q.stride(), *k_cache.stride(), *v_cache.stride(),
            *prefix_len.stride(), *num_nodes.stride(), *ancestors.stride(), *table,
            page, dim, padded, values, chunk, tile, block, dot_type(q.dtype),
            num_warps=warps, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        stack = triton.next_power_of_2(parts)
        channels = min(triton.next_power_of_2(dim), values, max(4096 // stack, 32))
        tile = min(triton.next_power_of_2(rows), max(4096 // (stack * channels), 1))
        tree_attention_merge_kernel[triton.cdiv(rows, tile), kv_heads, triton.cdiv(dim, channels)](
            part, out, nodes, groups, heads // groups, parts, dim, channels, tile, stack,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip

    known = (q.device, q.dtype, plain, page, dim, rows, kv_heads, triton.next_power_of_2(capacity))
    kind = ("tree_attention", *known, window is None)
    launch(*choose(kind, configurations(plain, padded, rows), launch))
    return out


def configurations(plain: bool, padded: int, rows: int) -> list[tuple[int, ...]]:
    """Rows, slots and channels of a tile, channels at a time, warps, programs for each place.

    First the usual choice, whose tiles fit the registers, then others worth a trial. Tiles are
    small where products are `plain` multiplications of registers, or every number has an address
    of its own.
    """
    if plain:
        return [(16, 16, 32, 16, 4, waves) for waves in (1, 2)]
    largest, block = (128, 64) if padded <= 128 else (64, 32)
    tile, values = min(max(triton.next_power_of_2(rows), 16), largest), min(padded, 128)
    usual = tile, block, values, padded, 8, 1
    fewer_warps = min(tile, largest // 2), block, values, padded, 4, 1
    return [usual, (*usual[:-1], 2), fewer_warps, (tile, block // 2, values, padded, 8, 1)]


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
