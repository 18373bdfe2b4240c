import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from .order import order_bits, score_of
from .search import choose

HIGHEST = tl.constexpr(3.4028234663852886e38)  # the largest finite float32
HIGHEST_ORDER = tl.constexpr(0x7F7FFFFF)  # and its order bits
NOT_A_SCORE = tl.constexpr(0x7FFFFFFF)  # order bits of a NaN
EMPTY = tl.constexpr(-(2**63))  # less than any key, as are the next few
MOST_KEPT = 64
POOL = 4096  # keys that one program merges, where the vocabulary allows it


@triton.jit
def finite(logits):
    """float32, NaN as -inf and +inf as the largest finite float."""
    x = logits.to(tl.float32)
    return tl.where(x != x, float("-inf"), tl.minimum(x, HIGHEST))


@triton.jit
def log_prob(x, peak, log_total):
    return (x - peak) - log_total


@triton.jit
def key_of(order, ids):
    """int64, more = earlier, no two alike."""
    return (order.to(tl.int64) << 32) - ids


@triton.jit
def head_of(key, STEP: tl.constexpr):
    """The key of the same score with id 0; the keys of unequal scores are STEP apart."""
    return (key + (STEP - 1)) & -STEP


@triton.jit
def order_of(key):
    return (head_of(key, 2**32) >> 32).to(tl.int32)


@triton.jit
def take_best(key, count, NO_KEY: tl.constexpr, SLOTS: tl.constexpr):
    """The `count` best in order, the last of them, and the keys without them."""
    slot = tl.arange(0, SLOTS)
    best = tl.full([SLOTS], NO_KEY, key.dtype)
    last = tl.max(best, 0)
    taken = 0
    while taken < count:
        last = tl.max(key, 0)
        best = tl.where(slot == taken, last, best)
        key = tl.where(key == last, NO_KEY, key)
        taken += 1
    return best, last, key


@triton.jit(do_not_specialize=["leaves", "kept"])
def expand_split_kernel(
    logits_ptr, keys_ptr, peak_ptr, total_ptr,
    leaves, vocab, kept, logits_row, logits_leaf, logits_token,
    BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """One program reads BLOCK logits of a leaf: their sum of exponentials and the `kept` best.

    With these goes the best of what is less than the last of them.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part = row * tl.num_programs(1) + split
    logits_ptr += row // leaves * logits_row + row % leaves * logits_leaf
    place = tl.arange(0, BLOCK)
    ids = split * BLOCK + place
    inside = ids < vocab
    logits = tl.load(logits_ptr + ids.to(tl.int64) * logits_token, inside, float("-inf"))
    x = finite(logits)
    peak = tl.max(x, 0)
    tl.store(peak_ptr + part, peak)
    tl.store(total_ptr + part, tl.sum(tl.exp(x - tl.maximum(peak, -HIGHEST)), 0))

    if logits.dtype.primitive_bitwidth == 16:  # the low order bits are 0: room for the place
        STEP: tl.constexpr = BLOCK
        SHIFT: tl.constexpr = 0
        NO_KEY: tl.constexpr = -(2**31)
        key = order_bits(logits.to(tl.float32)) - place
    else:
        STEP: tl.constexpr = 2**32
        SHIFT: tl.constexpr = 32
        NO_KEY: tl.constexpr = -(2**63)
        key = key_of(order_bits(x), place)
    best, last, key = take_best(tl.where(inside, key, NO_KEY), kept, NO_KEY, SLOTS)
    less = tl.where(head_of(key, STEP) < head_of(last, STEP), key, NO_KEY)
    slot = tl.arange(0, SLOTS)
    best = tl.where(slot == kept, tl.max(less, 0), best)
    head = head_of(best, STEP)
    order = tl.minimum((head >> SHIFT).to(tl.int32), HIGHEST_ORDER)
    handed = tl.where(best == NO_KEY, EMPTY, key_of(order, split * BLOCK + (head - best)))
    tl.store(keys_ptr + part * (kept + 1) + slot, handed, mask=slot <= kept)


@triton.jit
def best_of_row(
    logits_ptr, logits_token, vocab, peak, log_total, bound, SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best keys of log-probabilities below `bound`, in any order."""
    best = EMPTY + tl.arange(0, SLOTS).to(tl.int64)
    tile = 0
    while tile * BLOCK < vocab:
        ids = tile * BLOCK + tl.arange(0, BLOCK)
        inside = ids < vocab
        logits = tl.load(logits_ptr + ids.to(tl.int64) * logits_token, inside, float("-inf"))
        key = key_of(order_bits(log_prob(finite(logits), peak, log_total)), ids)
        key = tl.where(inside & (key < bound), key, EMPTY)
        top, least = tl.max(key, 0), tl.min(best, 0)
        while top > least:
            best = tl.where(best == least, top, best)
            key = tl.where(key == top, EMPTY, key)
            top, least = tl.max(key, 0), tl.min(best, 0)
        tile += 1
    return best


@triton.jit
def store_children(
    key, done, k, leaf_ptr, map_ptr, map_column, tokens_ptr, scores_ptr
):  # fmt: skip
    """Keys of log-probabilities, in any order, to places `done` and on."""
    leaf_score = tl.load(leaf_ptr)  # arrives while places are counted
    place = done + tl.sum((key[None, :] > key[:, None]).to(tl.int32), 1)
    wanted = place < k
    order = order_of(key)
    token = (order.to(tl.int64) << 32) - key
    if map_ptr is not None:
        token = tl.load(map_ptr + token * map_column, mask=wanted, other=0)
    tl.store(tokens_ptr + place, token, mask=wanted)
    tl.store(scores_ptr + place, leaf_score + score_of(order), mask=wanted)


@triton.jit(
    do_not_specialize=["leaves", "splits", "kept", "k", "leaf_row", "leaf_column", "map_column"]
)
def expand_merge_kernel(
    keys_ptr, peak_ptr, total_ptr, logits_ptr, leaf_scores_ptr, map_ptr, tokens_ptr, scores_ptr,
    leaves, vocab, splits, kept, k,
    logits_row, logits_leaf, logits_token, leaf_row, leaf_column, map_column,
    SPLITS: tl.constexpr, KEYS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program merges a leaf's splits; it reads the row again only where they do not tell all.

    That is where rounding decides, and where more children are wanted than a split keeps.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, leaf = row // leaves, row % leaves
    logits_ptr += batch * logits_row + leaf * logits_leaf
    tokens_ptr += row * k
    scores_ptr += row * k
    leaf_ptr = leaf_scores_ptr + batch * leaf_row + leaf * leaf_column

    split = tl.arange(0, SPLITS)
    part, there = row * splits + split, split < splits
    peaks = tl.load(peak_ptr + part, mask=there, other=float("-inf"))
    totals = tl.load(total_ptr + part, mask=there, other=0)
    peak = tl.maximum(tl.max(peaks, 0), -HIGHEST)
    log_total = tl.log(tl.maximum(tl.sum(totals * tl.exp(peaks - peak), 0), 1.0))

    done = 0
    if kept == k:
        place, size = tl.arange(0, KEYS), splits * (kept + 1)
        pool = tl.load(keys_ptr + row * size + place, mask=place < size, other=EMPTY)
        best, last, pool = take_best(pool, kept, EMPTY, SLOTS)
        # the best logits may not be the best log-probabilities where rounding makes these equal
        order, rest, last = order_of(best), order_of(pool), order_of(last)
        above = tl.min(tl.where(order > last, order, NOT_A_SCORE), 0)
        below = tl.max(tl.where(rest < last, rest, -NOT_A_SCORE), 0)
        worth = log_prob(score_of(last), peak, log_total)
        tied = log_prob(score_of(above), peak, log_total) == worth
        tied |= log_prob(score_of(below), peak, log_total) == worth
        if not tied:
            worths = order_bits(log_prob(score_of(order), peak, log_total))
            ids = (order.to(tl.int64) << 32) - best
            found = tl.where(best == EMPTY, EMPTY, key_of(worths, ids))
            store_children(found, 0, k, leaf_ptr, map_ptr, map_column, tokens_ptr, scores_ptr)
            done = k
    bound = tl.full([], 2**63 - 1, tl.int64)
    while done < k:
        more = best_of_row(logits_ptr, logits_token, vocab, peak, log_total, bound, SLOTS, BLOCK)
        store_children(more, done, k, leaf_ptr, map_ptr, map_column, tokens_ptr, scores_ptr)
        bound = tl.min(more, 0)
        done += SLOTS


@on_its_device
def expand(
    logits: Tensor,
    leaf_scores: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, scores = out = out or results.expand(logits, leaf_scores, k)
    batch, leaves, vocab = logits.shape
    rows = batch * leaves
    if not rows:
        return out
    kept = k if k <= MOST_KEPT else 0

    def launch(block: int, warps: int) -> None:
        splits = triton.cdiv(vocab, block)
        keys = tokens.new_empty((rows, splits, kept + 1))
        peak, total = scores.new_empty((2, rows, splits))
        expand_split_kernel[(rows, splits)](
            logits, keys, peak, total,
            leaves, vocab, kept, *logits.stride(),
            block, triton.next_power_of_2(kept + 1), num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        size = triton.next_power_of_2(splits * (kept + 1))
        expand_merge_kernel[(rows,)](
            keys, peak, total, logits, leaf_scores, draft_to_target, tokens, scores,
            leaves, vocab, splits, kept, k, *logits.stride(), *leaf_scores.stride(),
            0 if draft_to_target is None else draft_to_target.stride(0),
            triton.next_power_of_2(splits), size, triton.next_power_of_2(kept or MOST_KEPT), 2048,
            num_warps=8 if size > 2048 else 4, enable_fp_fusion=False,
        )  # fmt: skip

    kind = ("expand", logits.device, logits.dtype, rows, vocab, k)
    launch(*choose(kind, blocks_and_warps(vocab, kept), launch))
    return out


def blocks_and_warps(vocab: int, kept: int) -> list[tuple[int, int]]:
    """Ids that one program looks at, and its warps: the usual choice, and others worth a trial."""
    block = triton.next_power_of_2(triton.cdiv(vocab * (kept + 1), POOL))
    block = min(max(block, 1024), 8192)
    usual, larger = (block, block // 1024), min(2 * block, 8192)
    return [*dict.fromkeys((usual, (block, block // 512), (larger, larger // 1024)))]
