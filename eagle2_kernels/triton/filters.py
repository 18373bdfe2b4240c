"""top-k, top-p and min-p as bounds on order bits, found without sorting.

x = (logit - peak) / temperature rises with the logit, so what a filter keeps by x is a range of
order bits, and no pass over the row divides. Passes skip the groups of ids whose peak rules them
out. What is read is a tuple `source`: pointer, stride and number of the
logits, then pointer to the numbers of the groups to look at (None: all) and their count.
"""

import triton
import triton.language as tl

from .expand import finite
from .order import DEAD, order_bits, score_of

GROUP = tl.constexpr(64)  # ids
NO_GROUP = tl.constexpr(2**24)
NO_ID = tl.constexpr(2**31 - 1)  # more than any, and than any order bits
TINY = tl.constexpr(1e-37)


@triton.jit
def blocks_of(source, tile, BLOCK: tl.constexpr):
    """Numbers of the blocks of four ids in a tile."""
    _, _, _, groups_ptr, groups = source
    block = tile * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    if groups_ptr is None:
        return block
    else:
        place = block // (GROUP // 4)
        group = tl.load(groups_ptr + place, mask=place < groups, other=NO_GROUP)
        return group * (GROUP // 4) + block % (GROUP // 4)


@triton.jit
def load_blocks(source, block):
    """[T] -> [T, 4]: ids, logits, -inf beyond the row, and whether they are in it."""
    logits_ptr, logits_token, vocab, _, _ = source
    ids = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = ids < vocab
    logits = tl.load(logits_ptr + ids.to(tl.int64) * logits_token, inside, float("-inf"))
    return ids, finite(logits), inside


@triton.jit
def load_order(source, tile, BLOCK: tl.constexpr):
    """Ids, logits and order bits of a tile; beyond the row less than any order bits."""
    ids, x, inside = load_blocks(source, blocks_of(source, tile, BLOCK))
    return ids, x, tl.where(inside, order_bits(x), DEAD - 1)


@triton.jit
def scaled(logit, peak, temperature):
    return tl.div_rn(logit - peak, temperature)


@triton.jit
def bound_of(least, peak, temperature, ABOVE: tl.constexpr):
    """The lowest order bits whose x is `least` or more, or with ABOVE what is more."""
    low, high = tl.full([], DEAD - 1, tl.int64), order_bits(peak).to(tl.int64) + 1
    for _ in range(4):  # each leaves one part of 256
        marks = low + (high - low) * (1 + tl.arange(0, 256)) // 256
        x = scaled(score_of(marks.to(tl.int32)), peak, temperature)
        enough = ((x > least) if ABOVE else (x >= least)) | (marks == high)
        low = tl.max(tl.where(enough, low, marks), 0)
        high = tl.min(tl.where(enough, marks, high), 0)
    return high.to(tl.int32)


@triton.jit
def total_of(weights):
    return tl.sum(tl.sum(weights, 1), 0)


@triton.jit
def weigh(source, mark0, mark1, mark2, peak, rate, counted, BLOCK: tl.constexpr):
    """What the logits from each of three marks on weigh: 1 each, or exp(x)."""
    sum0 = tl.zeros([BLOCK // 4, 4], tl.float32)
    sum1, sum2 = sum0, sum0
    tile, tiles = 0, tl.cdiv(source[4] * GROUP, BLOCK)
    while tile < tiles:
        _, x, order = load_order(source, tile, BLOCK)
        weight = tl.where(counted, 1.0, tl.exp((x - peak) * rate))
        sum0 += tl.where(order >= mark0, weight, 0)
        sum1 += tl.where(order >= mark1, weight, 0)
        sum2 += tl.where(order >= mark2, weight, 0)
        tile += 1
    return total_of(sum0), total_of(sum1), total_of(sum2)


@triton.jit
def last_of_head(source, low, over, target, peak, rate, counted, BLOCK: tl.constexpr):
    """Order bits of the logit with which those from the peak down weigh `target` or more.

    From `low` on they weigh `over`, which is enough; inf stands for any such weight.
    """
    high = order_bits(peak) + 1
    under, unit = tl.zeros([], tl.float32), tl.zeros([], tl.float32)  # from `high` on; one at `low`
    while (high - low != 1) & (over > target) & (over - under >= 1.9 * unit):
        gap = (high - low).to(tl.uint32, bitcast=True)  # may be more than an int32 holds
        quarter = ((gap + 3) >> 2).to(tl.int32, bitcast=True)
        mark0, mark1, mark2 = low + quarter, low + 2 * quarter, low + 3 * quarter
        sum0, sum1, sum2 = weigh(source, mark0, mark1, mark2, peak, rate, counted, BLOCK)
        ok0, ok1, ok2 = sum0 >= target, sum1 >= target, sum2 >= target
        least = tl.where(ok1, mark2, tl.where(ok0, mark1, mark0))  # of those that are not enough
        high = tl.where(ok2, high, tl.minimum(high, least))
        low = tl.where(ok2, mark2, tl.where(ok1, mark1, tl.where(ok0, mark0, low)))
        over = tl.where(ok2, sum2, tl.where(ok1, sum1, tl.where(ok0, sum0, over)))
        under = tl.where(ok2, under, tl.where(ok1, sum2, tl.where(ok0, sum1, sum0)))
        unit = tl.where(counted, 1.0, tl.exp((score_of(low) - peak) * rate))
    found = tl.full([BLOCK // 4, 4], NO_ID, tl.int32)
    tile, tiles = 0, tl.cdiv(source[4] * GROUP, BLOCK)
    while tile < tiles:
        _, _, order = load_order(source, tile, BLOCK)
        found = tl.minimum(found, tl.where(order >= low, order, NO_ID))
        tile += 1
    return tl.min(tl.min(found, 1), 0)


@triton.jit
def nth_id(source, low, high, n, BLOCK: tl.constexpr):
    """Id of the nth logit whose order bits are `low` or more but not `high`; NO_ID if fewer are."""
    found = tl.full([], NO_ID, tl.int32)
    tile, tiles = 0, tl.cdiv(source[4] * GROUP, BLOCK)
    while (tile < tiles) & (n > 0):
        ids, _, order = load_order(source, tile, BLOCK)
        among = ((order >= low) & (order < high)).to(tl.int32)
        counts = tl.sum(among, 1)
        count = tl.sum(counts, 0)
        if count >= n:
            rank = (tl.cumsum(counts, 0) - counts)[:, None] + tl.cumsum(among, 1)
            found = tl.min(tl.min(tl.where((among > 0) & (rank == n), ids, NO_ID), 1), 0)
        n -= count
        tile += 1
    return found


@triton.jit
def bound_by_groups(
    source, vocab, total, peak, temperature, rate, top_k, top_p, min_p, BLOCK: tl.constexpr
):  # fmt: skip
    """Order bits below which nothing is kept, from the peaks of all groups.

    As the row holds more than the peaks, `top_k` of them or enough of the mass among them leave
    nothing below to be kept. What top-p counts with is left above the bound.
    """
    low, least = tl.full([], DEAD, tl.int32), tl.full([], float("-inf"), tl.float32)
    counted = top_k > 0
    target = tl.where(counted, top_k.to(tl.float32), tl.maximum(top_p * total, TINY))
    if counted | (top_p < 1):
        over, _, _ = weigh(source, low, low, low, peak, rate, counted, BLOCK)
        if over >= target:
            low = last_of_head(source, low, over, target, peak, rate, counted, BLOCK)
        elif not counted:  # what is below this weighs less than 1 - top_p of the total
            least = tl.minimum(tl.log((1 - top_p) * total / vocab) - 0.1, 0)
    elif min_p > 0:
        least = tl.minimum(tl.log(min_p), 0)
    return tl.maximum(low, bound_of(least, peak, temperature, False))


@triton.jit
def choose_groups(peaks_ptr, groups_ptr, groups, low, BLOCK: tl.constexpr):
    """The number of groups whose peak has the order bits `low` or more; writes which they are."""
    count = tl.zeros([], tl.int32)
    tile = 0
    while tile * BLOCK < groups:
        group = tile * BLOCK + tl.arange(0, BLOCK)
        inside = group < groups
        peaks = tl.load(peaks_ptr + group, mask=inside, other=float("-inf"))
        chosen = inside & (order_bits(peaks) >= low)
        rank = tl.cumsum(chosen.to(tl.int32), 0)
        tl.store(groups_ptr + count + rank - 1, group, mask=chosen)
        count += tl.max(rank, 0)
        tile += 1
    tl.debug_barrier()  # other threads read what these wrote
    return count


@triton.jit
def kept_of(
    source, low, total, peak, temperature, rate, top_k, top_p, min_p, BLOCK: tl.constexpr
):  # fmt: skip
    """What the filters keep: order bits from `high` on, and up to an id those from `low` on.

    Nothing below the given `low` is kept.
    """
    high, last_id = low, tl.full([], NO_ID, tl.int32)
    counted = top_k > 0
    if counted:
        over = tl.full([], float("inf"), tl.float32)
        last = last_of_head(source, low, over, top_k.to(tl.float32), peak, rate, True, BLOCK)
        low = bound_of(scaled(score_of(last), peak, temperature), peak, temperature, False)
        high = low
    if top_p < 1:
        over, _, _ = weigh(source, low, low, low, peak, rate, False, BLOCK)
        target = tl.maximum(top_p * tl.where(counted, over, total), TINY)
        last = last_of_head(source, low, over, target, peak, rate, False, BLOCK)
        x = scaled(score_of(last), peak, temperature)
        low = bound_of(x, peak, temperature, False)
        high = bound_of(x, peak, temperature, True)
        before, _, _ = weigh(source, high, high, high, peak, rate, False, BLOCK)
        n = tl.ceil((target - before) / tl.maximum(tl.exp(x), TINY))
        last_id = nth_id(source, low, high, tl.minimum(tl.maximum(n, 1), 1e9).to(tl.int32), BLOCK)
    if min_p > 0:
        least = bound_of(tl.minimum(tl.log(min_p), 0), peak, temperature, False)
        low, high = tl.maximum(low, least), tl.maximum(high, least)
    return low, high, last_id
