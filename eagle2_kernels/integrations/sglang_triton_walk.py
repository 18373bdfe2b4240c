"""SGLang's two verifications on CUDA and ROCm tensors; `sglang_cpu.py` says what they mean.

The launchers read nothing back to the host and write only into the caller's tensors.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 4096


@triton.jit(do_not_specialize=["num_nodes", "longest"])
def walk_greedy_kernel(
    predicts_ptr, accept_ptr, accepted_ptr, tokens_ptr, index_ptr,
    next_token_ptr, next_sibling_ptr, target_ptr,
    accept_row, tokens_row, index_row, next_token_row, next_sibling_row,
    num_nodes, longest,
):  # fmt: skip
    """One program walks one row's tree along the target's own tokens."""
    row = tl.program_id(0).to(tl.int64)
    accept_ptr += row * accept_row
    tokens_ptr += row * tokens_row
    index_ptr += row * index_row
    next_token_ptr += row * next_token_row
    next_sibling_ptr += row * next_sibling_row

    last = tl.load(index_ptr)
    tl.store(accept_ptr, last.to(tl.int32))
    wanted = tl.load(target_ptr + last)
    node = tl.load(next_token_ptr)
    accepted, looked_at = 0, 0
    # links in a circle end too: each of the n nodes is looked at once at most
    while (node >= 0) & (node < num_nodes) & (accepted < longest - 1) & (looked_at < num_nodes):
        if tl.load(tokens_ptr + node) == wanted:
            tl.store(predicts_ptr + last, wanted.to(tl.int32))
            accepted += 1
            last = tl.load(index_ptr + node)
            tl.store(accept_ptr + accepted, last.to(tl.int32))
            wanted = tl.load(target_ptr + last)
            node = tl.load(next_token_ptr + node)
        else:
            node = tl.load(next_sibling_ptr + node)
        looked_at += 1
    tl.store(accepted_ptr + row, accepted)
    tl.store(predicts_ptr + last, wanted.to(tl.int32))


def walk_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    batch, nodes = candidates.shape
    if batch:
        walk_greedy_kernel[(batch,)](
            predicts, accept_index, accept_token_num, candidates, retrieve_index,
            next_token, next_sibling, target_predict,
            accept_index.stride(0), candidates.stride(0), retrieve_index.stride(0),
            next_token.stride(0), next_sibling.stride(0),
            nodes, accept_index.shape[1], num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit
def weights_of(
    ids, vocab, target_ptr, draft_ptr, tokens_ptr, child, next_sibling_ptr, num_nodes,
    ENDED, HAS_DRAFT: tl.constexpr,
):  # fmt: skip
    """What is left of the target's law once the children were refused."""
    inside = ids < vocab
    left = tl.load(target_ptr + ids, mask=inside, other=0.0)
    if ENDED:
        if HAS_DRAFT:
            left -= tl.load(draft_ptr + ids, mask=inside, other=0.0)
        node, looked_at = child, 0
        while (node >= 0) & (node < num_nodes) & (looked_at < num_nodes):
            left = tl.where(ids == tl.load(tokens_ptr + node), 0.0, left)
            node = tl.load(next_sibling_ptr + node)
            looked_at += 1
    return tl.maximum(left, 0.0)


@triton.jit(do_not_specialize=["num_nodes", "longest", "vocab"])
def walk_sampled_kernel(
    predicts_ptr, accept_ptr, accepted_ptr, tokens_ptr, index_ptr,
    next_token_ptr, next_sibling_ptr, coins_ptr, final_coins_ptr, target_ptr, draft_ptr,
    accept_row, tokens_row, index_row, next_token_row, next_sibling_row, coins_row,
    target_row, target_node, draft_row, draft_node,
    threshold_single, threshold_acc, num_nodes, longest, vocab,
    HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program walks one row's tree by its coins, then draws what follows the path."""
    row = tl.program_id(0).to(tl.int64)
    accept_ptr += row * accept_row
    tokens_ptr += row * tokens_row
    index_ptr += row * index_row
    next_token_ptr += row * next_token_row
    next_sibling_ptr += row * next_sibling_row
    coins_ptr += row * coins_row
    target_ptr += row * target_row
    draft_ptr += row * draft_row

    last = tl.load(index_ptr)
    tl.store(accept_ptr, last.to(tl.int32))
    at = row * 0
    coin = tl.load(coins_ptr)
    child = tl.load(next_token_ptr)
    node = child
    mass = 0.0
    accepted, looked_at = 0, 0
    while (node >= 0) & (node < num_nodes) & (accepted < longest - 1) & (looked_at < num_nodes):
        token = tl.load(tokens_ptr + node)
        p = tl.load(target_ptr + at * target_node + token)
        mass += p
        chosen = (coin < tl.div_rn(mass, threshold_acc)) | (p >= threshold_single)
        if chosen & (p > 0):
            tl.store(predicts_ptr + last, token.to(tl.int32))
            accepted += 1
            last = tl.load(index_ptr + node)
            tl.store(accept_ptr + accepted, last.to(tl.int32))
            at, mass = node, 0.0
            coin = tl.load(coins_ptr + node)
            child = tl.load(next_token_ptr + node)
            node = child
        else:
            node = tl.load(next_sibling_ptr + node)
        looked_at += 1
    tl.store(accepted_ptr + row, accepted)

    ended = accepted < longest - 1  # at a choice of none: its children are out
    target_ptr += at * target_node
    draft_ptr += at * draft_node
    total, start = 0.0, 0
    while start < vocab:
        ids = start + tl.arange(0, BLOCK)
        total += tl.sum(weights_of(
            ids, vocab, target_ptr, draft_ptr, tokens_ptr, child, next_sibling_ptr, num_nodes,
            ended, HAS_DRAFT,
        ))  # fmt: skip
        start += BLOCK
    limit = tl.load(final_coins_ptr + row) * total
    drawn, latest, before, start = vocab, -1, 0.0, 0
    while (start < vocab) & (drawn == vocab):
        ids = start + tl.arange(0, BLOCK)
        weights = weights_of(
            ids, vocab, target_ptr, draft_ptr, tokens_ptr, child, next_sibling_ptr, num_nodes,
            ended, HAS_DRAFT,
        )  # fmt: skip
        within = (weights > 0) & (before + tl.cumsum(weights) > limit)
        drawn = tl.min(tl.where(within, ids, vocab))
        latest = tl.maximum(latest, tl.max(tl.where(weights > 0, ids, -1)))
        before += tl.sum(weights)
        start += BLOCK
    # rounding can leave the sum below the limit: the last of positive weight, else the last token
    rest = tl.where(latest < 0, vocab - 1, latest)
    tl.store(predicts_ptr + last, tl.where(drawn < vocab, drawn, rest).to(tl.int32))


def walk_sampled(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    batch, nodes, vocab = target_probs.shape
    draft = target_probs if draft_probs is None else draft_probs
    if batch:
        walk_sampled_kernel[(batch,)](
            predicts, accept_index, accept_token_num, candidates, retrieve_index,
            next_token, next_sibling,
            uniform_samples, uniform_samples_for_final_sampling, target_probs, draft,
            accept_index.stride(0), candidates.stride(0), retrieve_index.stride(0),
            next_token.stride(0), next_sibling.stride(0), uniform_samples.stride(0),
            *target_probs.stride()[:2], *draft.stride()[:2],
            float(threshold_single), float(max(threshold_acc, 1e-9)),
            nodes, accept_index.shape[1], vocab,
            draft_probs is not None, BLOCK_V, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
