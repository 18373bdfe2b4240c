"""Which slots of the cache the rows of a tile see. Words are ancestor words, one of each row."""

import triton
import triton.language as tl


@triton.jit
def split_of(
    prefix_len_ptr, num_nodes_ptr, capacity, splits, window, WORDS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One batch row's slots in blocks: those of the prefix, then those of the tail.

    Returns the prefix length, tail slots in use, first prefix slot that a node can see, blocks
    clear..full of the prefix which every node sees, blocks of the prefix, all blocks, and blocks of
    each split.
    """
    prefix = tl.minimum(tl.maximum(tl.load(prefix_len_ptr), 0), capacity)
    limit = tl.minimum(tl.minimum(tl.load(num_nodes_ptr), 64 * WORDS), capacity)
    first, clear = 0, 0
    if window is not None:
        first = tl.minimum(tl.maximum(prefix + 1 - window, 0), prefix)
        # no node is deeper than there are tail slots in use
        clear = (tl.maximum(prefix + limit - window - first, 0) + BLOCK_T - 1) // BLOCK_T
    full = (prefix - first) // BLOCK_T
    clear = tl.minimum(clear, full)
    prefix_blocks = (prefix - first + BLOCK_T - 1) // BLOCK_T
    blocks = tl.where(limit > 0, prefix_blocks + (limit + BLOCK_T - 1) // BLOCK_T, 0)
    share = (blocks + splits - 1) // splits
    return prefix, limit, first, clear, full, prefix_blocks, blocks, share


@triton.jit
def lowest(word, count):
    """The bits of words below bit `count`."""
    above = tl.full((), -1, tl.int64) << tl.minimum(tl.maximum(count, 0), 63)
    return tl.where(count < 64, word & ~above, word)


@triton.jit
def word_in_use(words_ptr, number, column, limit):
    """Word `number` of each row, without the bits from tail slot `limit` on."""
    return lowest(tl.load(words_ptr + number * column), limit - 64 * number)


@triton.jit
def is_live(words_ptr, column, limit, WORDS: tl.constexpr):
    """Whether rows have an ancestor: those without are padding."""
    live = tl.full(words_ptr.shape, False, tl.int1)
    for number in tl.static_range(WORDS):
        live |= word_in_use(words_ptr, number, column, limit) != 0
    return live


@triton.jit
def bit_count(word):
    word -= (word >> 1) & 0x5555555555555555
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    word += word >> 32
    return (word & 127).to(tl.int32)


@triton.jit
def start_of_window(words_ptr, column, prefix, limit, window, WORDS: tl.constexpr):
    """First slot that each row sees: in the prefix, or that of one of its ancestors."""
    hidden = tl.full(words_ptr.shape, 0, tl.int32) - window
    for number in tl.static_range(WORDS):
        hidden += bit_count(word_in_use(words_ptr, number, column, limit))
    start = prefix + tl.minimum(hidden, 0)
    if tl.max(hidden, 0) >= 0:  # so many ancestors are out of the window
        for number in tl.static_range(WORDS):
            word = word_in_use(words_ptr, number, column, limit)
            length = tl.full(words_ptr.shape, 0, tl.int32)  # most bits with no more than hidden set
            for step in tl.static_range(7):
                longer = length + max(32 >> step, 1)
                length = tl.where(bit_count(lowest(word, longer)) <= hidden, longer, length)
            start += length
            hidden -= bit_count(word)
    return start


@triton.jit
def masked_slots(
    j, words_ptr, column, start, prefix, limit, first, prefix_blocks, begin, edge, rest,
    BLOCK_T: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The j-th STEP slots of the blocks begin..begin + edge and rest.., not seen by every row.

    Returns which of them each row sees, as bits of an int32, the first slot, and how many are in
    use. STEP is 32 or less.
    """
    steps: tl.constexpr = BLOCK_T // STEP
    block = tl.where(j // steps < edge, begin + j // steps, rest + j // steps - edge)
    is_tail = block >= prefix_blocks
    ahead = tl.maximum(block - prefix_blocks, 0) * BLOCK_T + j % steps * STEP
    slot = tl.where(is_tail, prefix + ahead, first + block * BLOCK_T + j % steps * STEP)
    count = prefix + tl.where(is_tail, limit, 0) - slot
    word = tl.load(words_ptr + ahead // 64 * column) >> ahead % 64
    word = lowest(tl.where(is_tail, word, -1), count)
    if start is not None:
        word ^= lowest(word, start - slot)
    return word.to(tl.int32), slot, count


@triton.jit
def place_of(slot, table_ptr, table_column, block, step, PAGE: tl.constexpr):
    """Where slots begin, from the row's first slot or, with a table, from the first block."""
    slot = slot.to(tl.int64)
    if table_ptr is None:
        return slot * step
    else:
        number = tl.maximum(tl.load(table_ptr + slot // PAGE * table_column), 0)
        return number.to(tl.int64) * block + slot % PAGE * step
