import triton
import triton.language as tl
from torch import Tensor

from .. import results
from ..device import on_its_device
from .order import order_bits


@triton.jit(do_not_specialize=["columns", "k", "scores_row"])
def select_leaves_kernel(
    scores_ptr, index_ptr,
    columns, k,
    scores_row, scores_column,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One program finds the places of BLOCK scores: how many of the row come before each."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * scores_row
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = order_key(scores_ptr, index, scores_column, columns)
    # a thread holds one of the keys and counts in its warp's share of the others, STEPS at a time
    other_index = tl.arange(0, STEPS)[:, None] * WARPS + tl.arange(0, WARPS)[None, :]
    before = tl.zeros((WARPS, BLOCK), tl.int32)
    begin = 0
    while begin < columns:
        other_key = order_key(scores_ptr, begin + other_index, scores_column, columns)
        before += tl.sum((other_key[:, :, None] > key[None, None, :]).to(tl.int32), 0)
        begin += STEPS * WARPS
    place = tl.sum(before, 0)
    tl.store(index_ptr + row * k + place, index, mask=(index < columns) & (place < k))


@triton.jit
def order_key(scores_ptr, index, scores_column, columns):
    """int64, more = earlier, no two alike; beyond the row there are none that come before it."""
    score = tl.load(
        scores_ptr + index.to(tl.int64) * scores_column, mask=index < columns, other=float("-inf")
    )
    return (order_bits(score).to(tl.int64) << 32) - index


@on_its_device
def select_leaves(scores: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    out = results.select_leaves(scores, k) if out is None else out
    batch, columns = scores.shape
    if batch:
        select_leaves_kernel[(batch, triton.cdiv(columns, 32))](
            scores, out,
            columns, k,
            *scores.stride(),
            BLOCK=32, STEPS=32, WARPS=4, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
