"""The order rule on the 32 bits of a score: no arithmetic of a device can bend it."""

import triton
import triton.language as tl

DEAD = tl.constexpr(-0x7F800000)  # order bits of -inf, the least there are


@triton.jit
def order_bits(score):
    """int32, more for a higher score: NaN counts as -inf, -0.0 as 0.0."""
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude, bits)
    return tl.where(magnitude > 0x7F800000, DEAD, order)


@triton.jit
def score_of(order):
    bits = tl.where(order < 0, -0x80000000 - order, order)
    return bits.to(tl.float32, bitcast=True)
