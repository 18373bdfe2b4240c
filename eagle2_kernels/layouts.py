"""Trees in the layouts of other engines; `from_parents` is the way back from a plain list.

The exporters are functions of a Tree and of prefix lengths alone: on their device, without a read
to the host. Where a size depends on the data, the caller gives it. Shapes in the letters of
`ops.py`; n is num_nodes of a row, p its prefix length. Prefix lengths are [B] int32 or int64.
Facts about the engines were read from FlashInfer 0.7.4, TensorRT-LLM (2026), SGLang 0.5.23 and
SafeAILab/EAGLE (2026).
"""

import torch
from torch import Tensor

from .checks import wanted
from .parents import from_parents
from .reference.words import unpack
from .tree import Tree

__all__ = [
    "FULL_MASK",
    "QLEN_ONLY",
    "QLEN_ONLY_BITPACKING",
    "from_parents",
    "to_additive_bias",
    "to_bool",
    "to_flashinfer",
    "to_safeailab",
    "to_sglang",
    "to_trtllm",
    "to_trtllm_compact",
    "to_xqa",
]

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = 0, 1, 2  # SGLang's TreeMaskMode
_LENGTHS = (torch.int32, torch.int64)


def to_bool(tree: Tree, prefix_len: Tensor | None = None, num_keys: int | None = None) -> Tensor:
    """Which keys a node sees, as scaled_dot_product_attention takes it: True = seen.

    Args:
        prefix_len: with it, the columns are cache slots: the prefix, then the nodes at slot p.
        num_keys: how many slots, at least p + N; needed with prefix_len.

    Returns:
        [B, N, N] bool, or [B, N, num_keys] bool. Padding rows are False throughout.
    """
    seen = unpack(tree.ancestors, tree.tokens.shape[1])
    if prefix_len is None:
        return seen
    prefix_len = _lengths(tree, prefix_len)
    if num_keys is None:
        raise ValueError("num_keys: wanted how many slots a row has, got None")
    slot = torch.arange(num_keys, device=seen.device) - prefix_len[:, None]
    node = slot.clamp(0, max(seen.shape[2] - 1, 0))[:, None].expand(-1, seen.shape[1], -1)
    tail = seen.gather(2, node) & ((slot >= 0) & (slot < seen.shape[2]))[:, None]
    return tail | (_live(tree)[..., None] & (slot < 0)[:, None])


def to_additive_bias(
    tree: Tree, dtype: torch.dtype, prefix_len: Tensor | None = None, num_keys: int | None = None
) -> Tensor:
    """`to_bool` as what is added to attention scores: 0 where seen, else the lowest of `dtype`.

    Returns:
        [B, 1, N, N] or [B, 1, N, num_keys] in `dtype`, to spread over the heads.
    """
    seen = to_bool(tree, prefix_len, num_keys)[:, None]
    lowest = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=seen.device)
    return torch.where(seen, torch.zeros_like(lowest), lowest)


def to_flashinfer(tree: Tree, prefix_len: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """FlashInfer's packed custom mask for n queries and p + n keys a row.

    Element e = q * (p + n) + k of a row is bit e % 8, least significant first, of its byte e // 8.
    Rows of queries are not aligned; each row of the batch begins a byte. To go with it:
    qo_indptr = num_nodes and kv lengths = prefix_len + num_nodes, summed up.

    `plan(..., packed_custom_mask=mask)` alone leaves element counts where the kernel wants byte
    offsets (pull request 2201 there). Give both buffers: after `plan`,
    `wrapper._mask_indptr_buf.copy_(mask_indptr)`; with CUDA graphs that is the mask_indptr_buf
    handed to the constructor, next to custom_mask_buf.

    Args:
        num_bytes: the size of the mask, at least the sum of ceil(n * (p + n) / 8).

    Returns:
        mask [num_bytes] uint8, 0 behind the last row, and mask_indptr [B + 1] int32, in bytes.
    """
    prefix_len = _lengths(tree, prefix_len)
    rows = tree.num_nodes.long()
    keys = prefix_len + rows
    num_bits = rows * keys
    mask_indptr = _cumulative((num_bits + 7) // 8)
    used = torch.arange(num_bytes, device=rows.device) < mask_indptr[-1]

    # everything is seen but these bits: other branches of the tree, and the end of the last byte
    node = torch.arange(tree.tokens.shape[1], device=rows.device)
    live = _live(tree)
    unseen = ~to_bool(tree) & live[:, None] & live[..., None]
    element = node[:, None] * keys[:, None, None] + prefix_len[:, None, None] + node
    beyond = num_bits[:, None] + torch.arange(8, device=rows.device)
    unseen = torch.cat((unseen.flatten(1), beyond < (num_bits + 7)[:, None] // 8 * 8), 1)
    bit = torch.cat((element.flatten(1), beyond), 1) + 8 * mask_indptr[:-1, None]
    place = torch.where(unseen, bit >> 3, 0).flatten()
    cleared = torch.where(unseen, 1 << (bit & 7), 0).flatten().to(torch.uint8)
    mask = torch.where(used, 255, 0).to(torch.uint8)
    mask -= torch.zeros_like(mask).scatter_add_(0, place, cleared)
    return mask, mask_indptr.to(torch.int32)


def to_trtllm(tree: Tree) -> Tensor:
    """TensorRT-LLM's spec_decoding_packed_mask, padded: the form that Blackwell reads.

    Bit j of word w of a row: the node sees node 32w + j. With it go spec_decoding_position_offsets
    = tree.depths and spec_decoding_generation_lengths = tree.num_nodes.

    Returns:
        [B, N, ceil(N / 32)] int32; padding rows 0.
    """
    halves = tree.ancestors.contiguous().view(torch.int32)  # low half first: little-endian machines
    return halves[..., : -(-tree.tokens.shape[1] // 32)].contiguous()


def to_trtllm_compact(tree: Tree) -> tuple[Tensor, Tensor]:
    """As `to_trtllm`, rows one after another without padding: the form that Hopper reads.

    Returns:
        words [B * N, ceil(N / 32)] int32, row q of batch row b at starts[b] + q, 0 behind the last;
        starts [B + 1] int32, the running sum of num_nodes.
    """
    words, starts = to_trtllm(tree), _cumulative(tree.num_nodes.long())
    batch, nodes, width = words.shape
    node = torch.arange(nodes, device=words.device)
    spare = batch * nodes  # takes the padding
    row = torch.where(_live(tree), starts[:-1, None] + node, spare)
    out = words.new_zeros((spare + 1, width))
    out.scatter_(0, row.flatten()[:, None].expand(-1, width), words.flatten(0, 1))
    return out[:-1], starts.to(torch.int32)


def to_xqa(tree: Tree) -> Tensor:
    """The mask of FlashInfer's xqa, q_seq_len = N: bit j of item w: the node sees node 16w + j.

    Returns:
        [B, N, ceil(N / 32) * 2] uint16; padding rows 0.
    """
    return to_trtllm(tree).view(torch.uint16)


def to_sglang(
    tree: Tree, prefix_len: Tensor, mask_mode: int = FULL_MASK, prefix_sum: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What SGLang's build_tree_kernel_efficient returns, in its order; all rows have N nodes there.

    A padding row has token 0, position p, no links (so it is never accepted), and sees the prefix
    and itself, so that its attention is finite.

    Args:
        mask_mode: FULL_MASK: a row of the batch is N rows of p + N keys; QLEN_ONLY: N rows of N;
            QLEN_ONLY_BITPACKING: one uint8, uint16 or uint32 a node for N up to 8, 16 or 32,
            bit j = node j.
        prefix_sum: the sum of prefix_len, known to the host; needed with FULL_MASK.

    Returns:
        tree_mask, flat, bool or packed; positions [B * N], retrieve_index [B, N] = b * N + node,
        retrieve_next_token [B, N] (first child) and retrieve_next_sibling [B, N], -1 = none,
        children ascending; draft_tokens [B * N]. All int64 but the mask.

    Raises:
        ValueError: packing with N > 32; a mask_mode that is none of these.
    """
    prefix_len = _lengths(tree, prefix_len)
    batch, nodes = tree.tokens.shape
    node = torch.arange(nodes, device=tree.tokens.device)
    live = _live(tree)
    seen = to_bool(tree) | (node[:, None] == node)
    related = live[:, None] & live[..., None]
    child = related & (tree.parents[:, None] == node[:, None])  # [B, N parents, N]
    sibling = related & (tree.parents[:, None] == tree.parents[..., None]) & (node > node[:, None])
    return (
        _sglang_mask(seen, prefix_len, mask_mode, prefix_sum),
        (prefix_len[:, None] + tree.depths).flatten(),
        torch.arange(batch * nodes, device=node.device).view(batch, nodes),
        _first(child),
        _first(sibling),
        tree.tokens.clamp(min=0).flatten(),
    )


def _sglang_mask(seen: Tensor, prefix_len: Tensor, mask_mode: int, prefix_sum: int | None):
    batch, nodes, _ = seen.shape
    if mask_mode == QLEN_ONLY:
        return seen.flatten()
    if mask_mode == QLEN_ONLY_BITPACKING:
        if nodes > 32:
            raise ValueError(f"tree: wanted 32 nodes or fewer to pack them, got {nodes}")
        bits = (seen.long() << torch.arange(nodes, device=seen.device)).sum(-1).flatten()
        signed, unsigned = next(kinds for most, kinds in _PACKED if nodes <= most)
        return bits.to(signed).view(unsigned)
    if mask_mode != FULL_MASK:
        raise ValueError(f"mask_mode: wanted 0, 1 or 2, got {mask_mode}")
    if prefix_sum is None:
        raise ValueError("prefix_sum: wanted the sum of prefix_len, got None")
    node, keys = torch.arange(nodes, device=seen.device), prefix_len + nodes
    start = nodes * _cumulative(keys)[:-1]  # int64: passes 2^31 with many long prefixes
    cell = (start + prefix_len)[:, None, None] + node[:, None] * keys[:, None, None] + node
    mask = torch.ones(nodes * (prefix_sum + batch * nodes), dtype=torch.bool, device=seen.device)
    return mask.scatter_(0, cell.flatten(), seen.flatten())


_PACKED = (
    (8, (torch.uint8, torch.uint8)),
    (16, (torch.int16, torch.uint16)),
    (32, (torch.int32, torch.uint32)),
)


def to_safeailab(tree: Tree, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """SafeAILab/EAGLE's tree buffers, for a whole batch (its own code has B = 1).

    Args:
        depth: the longest path below the root that the tree can have.

    Returns:
        tree_mask [B, 1, N, N] float32, 1 = seen; tree_position_ids [B, N] int64, depths;
        retrieve_indices [B, N, depth + 1] int64: line l is the path from the root to the l-th
        childless node, filled up with -1; num_paths [B] int64: how many lines, the rest is -1.
    """
    live, seen = _live(tree), to_bool(tree)
    node = torch.arange(tree.tokens.shape[1], device=seen.device)
    parent = (live[..., None] & (tree.parents[..., None] == node)).any(1)
    last = live & ~parent
    batch, nodes = last.shape
    # an ancestor's place on a path is its depth; what is not an ancestor goes to a spare column
    column = torch.where(seen, tree.depths[:, None].long(), depth + 1)
    paths = node.new_full((batch, nodes, depth + 2), -1)
    paths.scatter_(2, column, node.expand_as(column))
    line = torch.where(last, last.cumsum(1) - 1, nodes)[..., None].expand(-1, -1, depth + 1)
    lines = node.new_full((batch, nodes + 1, depth + 1), -1)
    lines.scatter_(1, line, paths[..., :-1])
    return seen[:, None].float(), tree.depths.long(), lines[:, :-1], last.sum(1)


def _lengths(tree: Tree, prefix_len: Tensor) -> Tensor:
    wanted("prefix_len", prefix_len, tree.tokens.shape[:1], _LENGTHS, tree.tokens.device)
    return prefix_len.long()


def _live(tree: Tree) -> Tensor:
    nodes = torch.arange(tree.tokens.shape[1], device=tree.tokens.device)
    return nodes < tree.num_nodes[:, None]


def _cumulative(sizes: Tensor) -> Tensor:
    """Running sums with a 0 in front, [B + 1] int64."""
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))


def _first(marked: Tensor) -> Tensor:
    """The first true column of each line, or -1."""
    return torch.where(marked.any(-1), marked.to(torch.int8).argmax(-1), -1)
