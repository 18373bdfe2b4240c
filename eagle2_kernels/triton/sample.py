import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from .expand import HIGHEST, finite
from .filters import (
    GROUP,
    NO_ID,
    blocks_of,
    bound_by_groups,
    choose_groups,
    kept_of,
    load_blocks,
    scaled,
    total_of,
)
from .order import order_bits
from .philox import MOST_NOISE, gumbel, most_gumbel, philox

MOST_SPLITS = 256
PROGRAMS = 1024  # a few for every processor of a large GPU


@triton.jit
def load_law(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_row, top_k_row, top_p_row,
    min_p_row, batch, vocab,
):  # fmt: skip
    """Temperature, 1 where none is drawn by; whether noise is added; filters; whether any is on."""
    temperature = tl.load(temperature_ptr + batch * temperature_row)
    top_k = tl.load(top_k_ptr + batch * top_k_row)
    top_p = tl.load(top_p_ptr + batch * top_p_row)
    min_p = tl.load(min_p_ptr + batch * min_p_row)
    noisy = temperature > 0
    top_k = tl.where(top_k < vocab, top_k, 0)
    filtered = noisy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    return tl.where(noisy, temperature, 1.0), noisy, top_k, top_p, min_p, filtered


@triton.jit
def noise_of(seed, position, id):
    word0, word1, word2, word3 = philox(seed, position, id // 4)
    word = tl.where(
        id % 4 < 2, tl.where(id % 2 == 0, word0, word1), tl.where(id % 2 == 0, word2, word3)
    )
    return gumbel(word)


@triton.jit
def draw(
    source, tile, tiles, temperature, noisy, seed, position, low, high, last_id,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id in some tiles with the largest (logit - peak) / temperature + noise.

    The lowest of equals; with its logit, its noise and the peak of the tiles. Noise is computed
    only where its bound says that it may decide.
    """
    logits_ptr, logits_token = source[0], source[1]
    rate = tl.minimum(1 / temperature, HIGHEST)
    peak = tl.full([], float("-inf"), tl.float32)
    best_logit, best_noise, best_id = peak, tl.zeros([], tl.float32), tl.full([], NO_ID, tl.int32)
    while tile < tiles:
        block = blocks_of(source, tile, BLOCK)
        ids, x, _ = load_blocks(source, block)
        if FILTERED:
            order = order_bits(x)
            x = tl.where((order >= high) | ((order >= low) & (ids <= last_id)), x, float("-inf"))
        highest = tl.max(tl.max(x, 1), 0)
        peak = tl.maximum(peak, highest)
        zero = tl.maximum(peak, -HIGHEST)
        score = scaled(best_logit, zero, temperature) + best_noise
        bound = (x - zero) * rate
        top = (highest - zero) * rate + MOST_NOISE
        if (top >= score) & (top > float("-inf")):
            if noisy:
                word0, word1, word2, word3 = philox(seed, position, block)
                pairs = tl.join(tl.join(word0, word2), tl.join(word1, word3))
                bound += most_gumbel(tl.reshape(pairs, [BLOCK // 4, 4]))
            top = tl.max(tl.max(bound, 1), 0)
        while (top >= score) & (top > float("-inf")):
            id = tl.min(tl.min(tl.where(bound == top, ids, NO_ID), 1), 0)
            logit = finite(tl.load(logits_ptr + id.to(tl.int64) * logits_token))
            noise = tl.where(noisy, noise_of(seed, position, id), 0.0)
            value = scaled(logit, zero, temperature) + noise
            if (value > score) | ((value == score) & (id < best_id)):
                score, best_logit, best_noise, best_id = value, logit, noise, id
            spent = (ids == id) | ((bound == score) & (ids >= best_id))
            bound = tl.where(spent, float("-inf"), bound)
            top = tl.max(tl.max(bound, 1), 0)
        tile += 1
    return best_logit, best_noise, best_id, peak


@triton.jit
def draw_filtered(
    source, peaks_ptr, total, peak, temperature, rate, top_k, top_p, min_p, seed, position,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The id drawn; `source` names no groups yet, only where to put them and how many there are."""
    logits_ptr, logits_token, vocab, groups_ptr, groups = source
    peaks = (peaks_ptr, 1, groups, None, tl.cdiv(groups, GROUP))
    low = bound_by_groups(
        peaks, vocab, total, peak, temperature, rate, top_k, top_p, min_p, BLOCK
    )  # fmt: skip
    count = choose_groups(peaks_ptr, groups_ptr, groups, low, BLOCK)
    source = (logits_ptr, logits_token, vocab, groups_ptr, count)
    low, high, last_id = kept_of(
        source, low, total, peak, temperature, rate, top_k, top_p, min_p, BLOCK
    )  # fmt: skip
    _, _, token, _ = draw(
        source, tl.zeros([], tl.int32), tl.cdiv(count * GROUP, BLOCK), temperature, True,
        seed, position, low, high, last_id, True, BLOCK,
    )  # fmt: skip
    return token


@triton.jit
def survey(source, peaks_ptr, tile, tiles, temperature, BLOCK: tl.constexpr):
    """The peak of some tiles and their sum of exp(x) under it; writes the peaks of their groups."""
    rate = tl.minimum(1 / temperature, HIGHEST)
    peak, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    while tile < tiles:
        _, x, _ = load_blocks(source, blocks_of(source, tile, BLOCK))
        group = tile * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        peaks = tl.max(tl.reshape(tl.max(x, 1), [BLOCK // GROUP, GROUP // 4]), 1)
        tl.store(peaks_ptr + group, peaks, mask=group < source[4])
        highest = tl.maximum(peak, tl.max(peaks, 0))
        zero = tl.maximum(highest, -HIGHEST)
        total = total * tl.exp((peak - zero) * rate) + total_of(tl.exp((x - zero) * rate))
        peak = highest
        tile += 1
    return total, peak


@triton.jit(
    do_not_specialize=["nodes", "share", "temperature_row", "top_k_row", "top_p_row", "min_p_row",
                       "seed_row", "positions_row", "positions_node"]
)  # fmt: skip
def sample_split_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, positions_ptr,
    best_ptr, ids_ptr, peaks_ptr,
    nodes, vocab, share, logits_row, logits_node, logits_token, temperature_row, top_k_row,
    top_p_row, min_p_row, seed_row, positions_row, positions_node,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program draws in `share` tiles of a row; if filters are on it only surveys them."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, node = row // nodes, row % nodes
    temperature, noisy, _, _, _, filtered = load_law(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_row, top_k_row, top_p_row,
        min_p_row, batch, vocab,
    )  # fmt: skip
    logits_ptr += batch * logits_row + node * logits_node
    groups = tl.cdiv(vocab, GROUP)
    source = (logits_ptr, logits_token, vocab, None, groups)
    begin, end = split * share, tl.minimum(split * share + share, tl.cdiv(vocab, BLOCK))
    parts = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    part = row * tl.num_programs(1) + split
    if filtered:
        total, peak = survey(source, peaks_ptr + row * groups, begin, end, temperature, BLOCK)
        tl.store(best_ptr + part, total)
        tl.store(best_ptr + 2 * parts + part, peak)
    else:
        seed = tl.load(seed_ptr + batch * seed_row)
        position = tl.load(positions_ptr + batch * positions_row + node * positions_node)
        logit, noise, id, peak = draw(
            source, begin, end, temperature, noisy, seed, position, 0, 0, 0, False, BLOCK
        )  # fmt: skip
        tl.store(best_ptr + part, logit)
        tl.store(best_ptr + parts + part, noise)
        tl.store(best_ptr + 2 * parts + part, peak)
        tl.store(ids_ptr + part, id)


@triton.jit(
    do_not_specialize=["nodes", "splits", "temperature_row", "top_k_row", "top_p_row", "min_p_row",
                       "seed_row", "positions_row", "positions_node"]
)  # fmt: skip
def sample_merge_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, positions_ptr,
    best_ptr, ids_ptr, peaks_ptr, groups_ptr, tokens_ptr,
    nodes, vocab, splits, logits_row, logits_node, logits_token, temperature_row, top_k_row,
    top_p_row, min_p_row, seed_row, positions_row, positions_node,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program takes the best of a row's splits, or filters and draws if filters are on."""
    row = tl.program_id(0).to(tl.int64)
    batch, node = row // nodes, row % nodes
    temperature, noisy, top_k, top_p, min_p, filtered = load_law(
        temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, temperature_row, top_k_row, top_p_row,
        min_p_row, batch, vocab,
    )  # fmt: skip
    split = tl.arange(0, SPLITS)
    part, there = row * splits + split, split < splits
    parts = tl.num_programs(0).to(tl.int64) * splits
    peaks = tl.load(best_ptr + 2 * parts + part, there, float("-inf"))
    peak = tl.max(peaks, 0)
    if filtered & (peak > float("-inf")):
        seed = tl.load(seed_ptr + batch * seed_row)
        position = tl.load(positions_ptr + batch * positions_row + node * positions_node)
        groups = tl.cdiv(vocab, GROUP)
        source = (
            logits_ptr + batch * logits_row + node * logits_node, logits_token, vocab,
            groups_ptr + row * groups, groups,
        )  # fmt: skip
        rate = tl.minimum(1 / temperature, HIGHEST)
        totals = tl.load(best_ptr + part, there, 0)
        total = tl.sum(totals * tl.exp((peaks - peak) * rate), 0)
        token = draw_filtered(
            source, peaks_ptr + row * groups, total, peak, temperature, rate,
            top_k, top_p, min_p, seed, position, BLOCK,
        )  # fmt: skip
    else:
        logits = tl.load(best_ptr + part, there, float("-inf"))
        noise = tl.load(best_ptr + parts + part, there, 0)
        score = scaled(logits, tl.maximum(peak, -HIGHEST), temperature) + noise
        ids = tl.load(ids_ptr + part, there, NO_ID)
        token = tl.min(tl.where(score == tl.max(score, 0), ids, NO_ID), 0)
    token = tl.where(peak > float("-inf"), token, -1)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@on_its_device
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = results.sample(positions) if out is None else out
    batch, nodes, vocab = logits.shape
    rows = batch * nodes
    if not rows:
        return out
    block = 1024
    tiles, groups = triton.cdiv(vocab, block), triton.cdiv(vocab, GROUP.value)
    splits = min(tiles, triton.cdiv(PROGRAMS, rows), MOST_SPLITS)
    share = triton.cdiv(tiles, splits)
    splits = triton.cdiv(tiles, share)
    best = temperature.new_empty((3, rows, splits))
    ids = top_k.new_empty((rows, splits))
    peaks = temperature.new_empty((rows, groups))
    chosen = top_k.new_empty((rows, groups))
    rows_of = (temperature, top_k, top_p, min_p, seed)
    strides = (*logits.stride(), *(x.stride(0) for x in rows_of), *positions.stride())
    sample_split_kernel[(rows, splits)](
        logits, *rows_of, positions, best, ids, peaks,
        nodes, vocab, share, *strides,
        block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    sample_merge_kernel[(rows,)](
        logits, *rows_of, positions, best, ids, peaks, chosen, out,
        nodes, vocab, splits, *strides,
        MOST_SPLITS, 2048, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return out
