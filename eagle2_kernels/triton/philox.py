"""Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""

import triton
import triton.language as tl

MOST_NOISE = tl.constexpr(23.0)  # gumbel(0) is 22.9


@triton.jit
def philox(seed, position, block):
    """Four random words uint32 of each block. Key and counter as in reference/philox.py."""
    key_low, key_high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c0, c1, c2, c3 = block.to(tl.uint32), position.to(tl.uint32), (position >> 32).to(tl.uint32), 0
    for _ in tl.static_range(10):
        # 64-bit products, so that both halves come from one multiplication
        product0, product1 = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key_low
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key_high
        c1, c3 = product1.to(tl.uint32), product0.to(tl.uint32)
        key_low += 0x9E3779B9
        key_high += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel(word):
    """Standard Gumbel noise, -log(-log(1 - u)) with u = word / 2^32."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2**-32, 1 - 2**-24)
    rest = 1 - u
    # log1p(-u): what `rest` was rounded by is in the quotient too (Kahan)
    lost = tl.maximum(1 - rest, 2**-24)
    waited = tl.where(rest == 1, u, -tl.log(rest) * tl.div_rn(u, lost))
    return -tl.log(waited)


@triton.jit
def most_gumbel(word):
    """A little more than gumbel(word) <= -log(u): a float's exponent with its mantissa behind it
    is at most its log2."""
    LN2: tl.constexpr = 0.6931472
    bits = (word.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    return LN2 * (127 + 32) + 1e-3 - bits.to(tl.float32) * (LN2 * 2**-23)
