"""Which slots of the cache the rows of a tile see, and where slots lie."""

import triton
import triton.language as tl


@triton.jit
def ancestors_in(begin, words_ptr, column, limit, COUNT: tl.constexpr):
    """1 where rows have an ancestor in the tail slots begin.. [COUNT] below `limit`, else 0.

    COUNT is 32 or less and divides `begin`.
    """
    t = tl.arange(0, COUNT)
    word = (tl.load(words_ptr + begin // 64 * column) >> begin % 64).to(tl.int32)
    return tl.where((begin + t < limit)[None, :], word[:, None] >> t[None, :] & 1, 0)


@triton.jit
def depth_of(words_ptr, column, limit):
    """How many of the first `limit` tail slots each row sees: its depth + 1, or 0 for padding."""
    depth = tl.full(words_ptr.shape, 0, tl.int32)
    for number in tl.range((limit + 31) // 32):
        depth += tl.sum(ancestors_in(32 * number, words_ptr, column, limit, 32), 1)
    return depth


@triton.jit
def masked_slots(
    j, words_ptr, column, prefix, limit, first, last, edge, rest, window, depth, passed,
    COUNT: tl.constexpr,
):  # fmt: skip
    """The j-th COUNT of the slots that not every row sees, and which rows see them, [R, COUNT].

    First come `edge` times COUNT slots from `first` on, then those from `rest` to the last of the
    tail, `last`. Of a row's ancestors, `passed` [R] came before; also returns how many have now.
    """
    left = (prefix - rest + COUNT - 1) // COUNT
    begin = tl.where(j < edge, first - prefix + j * COUNT, (j - edge - left) * COUNT)
    t = begin + tl.arange(0, COUNT)  # below 0 in the prefix
    bit = ancestors_in(tl.maximum(begin, 0), words_ptr, column, limit, COUNT)
    inside = t >= tl.where(j < edge, first, rest) - prefix
    seen = tl.where(begin < 0, inside[None, :], bit != 0)
    if window is not None:
        ahead = tl.where(begin < 0, t[None, :], passed[:, None] + tl.cumsum(bit, 1) - 1)
        seen &= ahead >= depth[:, None] - window
        passed += tl.where(begin < 0, 0, tl.sum(bit, 1))
    # some slots that no row sees would lie outside of what is in use
    return tl.minimum(tl.maximum(prefix + t, 0), last), seen, passed


@triton.jit
def place_of(slot, table_ptr, table_column, block, step, PAGE: tl.constexpr):
    """Where slots begin, from the row's first slot or, with a table, from the first block."""
    slot = slot.to(tl.int64)
    if table_ptr is None:
        return slot * step
    else:
        number = tl.maximum(tl.load(table_ptr + slot // PAGE * table_column), 0)
        return number.to(tl.int64) * block + slot % PAGE * step
