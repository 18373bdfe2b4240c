"""FlexAttention as a form of tree_attention: what torch has where a mask depends on the data.

The block mask is made in the first call with a tree and kept, as a user would: once for the layers
of a target pass. `tree_ops.py` calls once before it times, so the mask's own time is left out, as
that of the dense mask is. On a GPU attention is compiled for each shape, without autotuning; on the
CPU it runs as written, to be checked rather than timed.
"""

import functools

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


@functools.cache
def compiled():
    return torch.compile(flex_attention, dynamic=False)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
) -> Tensor:
    attend = compiled() if q.is_cuda else flex_attention
    mask = block_mask(prefix_len, ancestors, num_nodes, k_cache.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


@functools.lru_cache(1)  # tensors are keys by identity
def block_mask(
    prefix_len: Tensor, ancestors: Tensor, num_nodes: Tensor, capacity: int
) -> BlockMask:
    batch, nodes, words = ancestors.shape

    def sees(b, _, node, slot):
        tail = slot - prefix_len[b]
        word = ancestors[b, node, (tail // 64).clamp(0, words - 1)]
        own = (tail < num_nodes[b]) & ((word >> tail % 64 & 1) != 0)
        return (node < num_nodes[b]) & ((tail < 0) | own)

    device = str(ancestors.device)
    return create_block_mask(sees, batch, None, nodes, capacity, device=device)
