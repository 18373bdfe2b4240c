import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from ..tree import Candidates, Tree
from .order import DEAD, order_bits, score_of


@triton.jit(do_not_specialize=[
    "columns", "max_nodes",
    "tokens_row", "scores_row", "parents_row", "root_tokens_stride", "num_nodes_stride",
])  # fmt: skip
def rerank_kernel(
    tokens_ptr, scores_ptr, parents_ptr, root_tokens_ptr, num_nodes_ptr,
    out_tokens_ptr, out_parents_ptr, out_depths_ptr, out_ancestors_ptr, out_scores_ptr,
    out_num_nodes_ptr,
    columns, max_nodes,
    tokens_row, tokens_column, scores_row, scores_column, parents_row, parents_column,
    root_tokens_stride, num_nodes_stride,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One program makes one row's tree: a thread holds candidates, then nodes."""
    row = tl.program_id(0).to(tl.int64)
    wanted = tl.load(num_nodes_ptr + row * num_nodes_stride)
    wanted = tl.minimum(tl.maximum(wanted, 0), max_nodes)
    index = tl.arange(0, BLOCK_C)
    live = index < columns
    score_place = scores_ptr + row * scores_row + index * scores_column
    parent_place = parents_ptr + row * parents_row + index * parents_column
    score = tl.load(score_place, mask=live, other=float("-inf"))
    parent = tl.load(parent_place, mask=live, other=-1)
    orphan = (parent < -1) | (parent >= index)
    order = least_on_path(tl.where(orphan, DEAD, order_bits(score)), tl.where(orphan, -1, parent))
    keep = first_of(order, index, tl.maximum(wanted - 1, 0), BLOCK_C)

    # node numbers: the root is 0, then the kept candidates by ascending index
    number = running_count(keep.to(tl.int32), BLOCK_C)
    count = tl.where(wanted > 0, 1 + tl.max(number), 0)
    node_parent = of_parents(number, tl.where(keep, parent, -1), 0)
    root_token = tl.load(root_tokens_ptr + row * root_tokens_stride)
    first = row * max_nodes
    out_parents_ptr += first
    tl.store(out_parents_ptr + number, node_parent, mask=keep)
    tl.store(out_scores_ptr + first + number, score_of(order), mask=keep)
    tokens = tl.load(tokens_ptr + row * tokens_row + index * tokens_column, mask=keep)
    tl.store(out_tokens_ptr + first + number, tokens, mask=keep)
    # below, threads read parents that others stored above: the barrier makes these visible to the
    # whole program (bar.sync on CUDA; work-group release, s_barrier, acquire on ROCm)
    tl.debug_barrier()

    words = tl.cdiv(max_nodes, 64)
    begin = 0
    while begin < max_nodes:
        node = begin + tl.arange(0, BLOCK_N)
        inside = node < max_nodes
        depth = tl.zeros((BLOCK_N,), tl.int32)
        first_word = 0
        while first_word < words:
            word = (first_word + tl.arange(0, BLOCK_W))[None, :]
            bits, depth = ancestor_bits(out_parents_ptr, node, count, word)
            place = out_ancestors_ptr + (first + node)[:, None] * words + word
            tl.store(place, bits, mask=inside[:, None] & (word < words))
            first_word += BLOCK_W
        tl.store(out_depths_ptr + first + node, depth, mask=inside)

        root = (node == 0) & (count > 0)
        other = ((node == 0) | (node >= count)) & inside  # the root, padding
        tl.store(out_parents_ptr + node, -1, mask=other)
        tl.store(out_tokens_ptr + first + node, tl.where(root, root_token, -1), mask=other)
        tl.store(out_scores_ptr + first + node, tl.where(root, 0.0, float("-inf")), mask=other)
        begin += BLOCK_N
    tl.store(out_num_nodes_ptr + row, count)


@triton.jit
def least_on_path(order, parent):
    """The least order bits from the root to each candidate. What `expand` returns is it already."""
    above = of_parents(order, parent, 0x7FFFFFFF)
    while tl.max((above < order).to(tl.int32)) > 0:
        order = tl.minimum(order, above)
        above = of_parents(order, parent, 0x7FFFFFFF)
    return order


@triton.jit
def of_parents(values, parent, root_value):
    return tl.where(parent < 0, root_value, tl.gather(values, tl.maximum(parent, 0), 0))


@triton.jit
def first_of(order, index, size, BLOCK_C: tl.constexpr):
    """Which are the first `size` of the order; dead ones never are."""
    # halve [low, high) until exactly `size` lie at or above low, or low alone is left
    low = DEAD + 1
    high = 0x7FFFFFFF
    at_low = tl.sum((order >= low).to(tl.int32))
    at_high = 0
    while (at_low > size) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)  # their sum can overflow
        reached = tl.sum((order >= middle).to(tl.int32))
        enough = reached >= size
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, reached, at_low)
        high = tl.where(enough, high, middle)
        at_high = tl.where(enough, at_high, reached)
    # too many at low: the lowest indices of them
    begin = tl.where(at_low > size, 0, BLOCK_C)
    end = BLOCK_C
    while begin < end:
        middle = (begin + end) // 2
        within = tl.sum(((order == low) & (index < middle)).to(tl.int32))
        enough = within >= size - at_high
        end = tl.where(enough, middle, end)
        begin = tl.where(enough, begin, middle + 1)
    return (order > low) | ((order == low) & (index < end))


@triton.jit
def running_count(flags, BLOCK_C: tl.constexpr):
    """tl.cumsum in runs of 16; over thousands of flags at once it takes three times the code."""
    runs = tl.reshape(flags, (BLOCK_C // 16, 16))
    size = tl.sum(runs, 1)
    before = tl.cumsum(size, 0) - size
    return tl.reshape(before[:, None] + tl.cumsum(runs, 1), (BLOCK_C,))


@triton.jit
def ancestor_bits(parents_ptr, node, count, word):
    """Words [BLOCK_N, BLOCK_W] and depths of the nodes."""
    bits = tl.zeros((node.shape[0], word.shape[1]), tl.int64)
    depth = tl.zeros(node.shape, tl.int32)
    up = tl.where(node < count, node, -1)
    while tl.max(up) >= 0:
        for _ in tl.static_range(4):  # the end of a path is looked for every fourth step
            bit = tl.full(node.shape, 1, tl.int64) << (up & 63)
            bits |= tl.where((up >> 6)[:, None] == word, bit[:, None], 0)
            depth += (up > 0).to(tl.int32)
            up = tl.load(parents_ptr + up, mask=up > 0, other=-1)
    return bits, depth


@on_its_device
def rerank(
    candidates: Candidates,
    root_tokens: Tensor,
    num_nodes: Tensor,
    max_nodes: int,
    *,
    out: Tree | None = None,
) -> Tree:
    out = out or results.rerank(candidates, max_nodes)
    batch, columns = candidates.tokens.shape
    words = triton.cdiv(max_nodes, 64)
    if batch:
        block_c = max(triton.next_power_of_2(columns), 128)
        # a thread holds up to 4 candidates, or 16: with 8, ptxas spills some to get to 64 registers
        warps = min(max(block_c // 64, 4), 16) if block_c <= 2048 else min(block_c // 512, 16)
        block_w = min(triton.next_power_of_2(words), 16)
        rerank_kernel[(batch,)](
            *candidates, root_tokens, num_nodes, *out,
            columns, max_nodes,
            *candidates.tokens.stride(), *candidates.scores.stride(), *candidates.parents.stride(),
            *root_tokens.stride(), *num_nodes.stride(),
            BLOCK_C=block_c,
            BLOCK_N=max(min(triton.next_power_of_2(max_nodes), 1024 // block_w), 64),
            BLOCK_W=block_w,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return out
