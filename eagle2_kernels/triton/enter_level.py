import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from ..tree import Candidates
from .order import DEAD, order_bits


@triton.jit(do_not_specialize=["begin", "size", "children", "first_slot", "k", "words"])
def enter_level_kernel(
    all_tokens_ptr, all_scores_ptr, all_parents_ptr,
    tokens_ptr, scores_ptr, parents_ptr, words_ptr, sizes_ptr,
    leaf_tokens_ptr, leaf_scores_ptr, leaf_parents_ptr, ranks_ptr, leaf_words_ptr, live_ptr,
    begin, size, children, first_slot, k, words,
    all_tokens_row, all_tokens_column, all_scores_row, all_scores_column,
    all_parents_row, all_parents_column,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One program enters one row's level, BLOCK children at a time, each at its place."""
    row = tl.program_id(0).to(tl.int64)
    all_scores_ptr += row * all_scores_row
    scores_ptr += row * size
    first_leaf = row * (size // children)
    wanted = tl.load(sizes_ptr + row)
    # a thread holds one child and counts in its warp's share of the others, STEPS at a time
    step = tl.arange(0, STEPS)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    live = 0
    start = 0
    while start < size:
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        leaf = index // children
        score = tl.load(scores_ptr + index, mask=inside)
        token = tl.load(tokens_ptr + row * size + index, mask=inside)
        parent = tl.load(parents_ptr + first_leaf + leaf, mask=inside)
        candidate = begin + index
        place = all_tokens_ptr + row * all_tokens_row + candidate * all_tokens_column
        tl.store(place, token, mask=inside)
        tl.store(all_scores_ptr + candidate * all_scores_column, score, mask=inside)
        place = all_parents_ptr + row * all_parents_row + candidate * all_parents_column
        tl.store(place, parent, mask=inside)

        order = tl.where(inside, order_bits(score), DEAD)
        key = (order.to(tl.int64) << 32) - index
        before = tl.zeros((WARPS, BLOCK), tl.int32)
        other = 0
        while other < size:
            its_index = other + step
            other_score = tl.load(
                scores_ptr + its_index, mask=its_index < size, other=float("-inf")
            )
            other_key = (order_bits(other_score).to(tl.int64) << 32) - its_index
            before += tl.sum((other_key[:, :, None] > key[None, None, :]).to(tl.int32), 0)
            other += STEPS * WARPS
        rank = tl.sum(before, 0)

        # of the earlier candidates an equal one comes first too
        earlier = tl.zeros((WARPS, BLOCK), tl.int32)
        other = 0
        while other < begin:
            its_index = other + step
            other_score = tl.load(
                all_scores_ptr + its_index * all_scores_column,
                mask=its_index < begin,
                other=float("-inf"),
            )
            ahead = order_bits(other_score)[:, :, None] >= order[None, None, :]
            earlier += tl.sum((ahead & (its_index < begin)[:, :, None]).to(tl.int32), 0)
            other += STEPS * WARPS

        chosen = inside & (rank < k)
        leaf_place = row * k + rank
        tl.store(leaf_tokens_ptr + leaf_place, token, mask=chosen)
        tl.store(leaf_scores_ptr + leaf_place, score, mask=chosen)
        tl.store(leaf_parents_ptr + leaf_place, candidate, mask=chosen)
        tl.store(ranks_ptr + leaf_place, leaf.to(tl.int64), mask=chosen)
        slot = first_slot + rank
        word = 0
        while word < words:
            bits = tl.load(words_ptr + (first_leaf + leaf) * words + word, mask=chosen)
            own = tl.full((BLOCK,), 1, tl.int64) << (slot & 63)
            bits |= tl.where((slot >> 6) == word, own, 0)
            tl.store(leaf_words_ptr + leaf_place * words + word, bits, mask=chosen)
            word += 1
        worth = chosen & (order > DEAD) & (rank + tl.sum(earlier, 0) < wanted - 1)
        live += tl.sum(worth.to(tl.int32))
        start += BLOCK
    tl.store(live_ptr + row, live)


@on_its_device
def enter_level(
    candidates: Candidates,
    begin: int,
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    words: Tensor,
    first_slot: int,
    k: int,
    num_nodes: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = out or results.enter_level(words, k)
    batch, leaves, children = tokens.shape
    if batch:
        enter_level_kernel[(batch,)](
            *candidates,
            *(x.contiguous() for x in (tokens, scores, parents, words, num_nodes)),
            *out,
            begin, leaves * children, children, first_slot, k, words.shape[2],
            *(stride for column in candidates for stride in column.stride()),
            BLOCK=32, STEPS=8, WARPS=4, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
