"""The C++ form as seen from Python: pointers, sizes and strides into _C."""

import torch
from torch import Tensor

from . import _C, results
from .tree import Candidates, Tree


def expand(
    logits: Tensor,
    leaf_scores: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    tokens, scores = out = out or results.expand(logits, leaf_scores, k)
    _C.expand(
        logits.data_ptr(),
        _DTYPES[logits.dtype],
        logits.shape,
        logits.stride(),
        _view(leaf_scores),
        k,
        (0, 0) if draft_to_target is None else _view(draft_to_target),
        tokens.data_ptr(),
        scores.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def select_leaves(scores: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    out = results.select_leaves(scores, k) if out is None else out
    _C.select_leaves(_view(scores), *scores.shape, k, out.data_ptr(), torch.get_num_threads())
    return out


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
    _C.enter_level(
        [_view(column) for column in candidates],
        begin,
        [_view(x) for x in (tokens, scores, words)],
        _view(parents),
        (*tokens.shape, words.shape[2]),
        first_slot,
        k,
        _view(num_nodes),
        [column.data_ptr() for column in out],
        torch.get_num_threads(),
    )
    return out


def rerank(
    candidates: Candidates,
    root_tokens: Tensor,
    num_nodes: Tensor,
    max_nodes: int,
    *,
    out: Tree | None = None,
) -> Tree:
    out = out or results.rerank(candidates, max_nodes)
    _C.rerank(
        *map(_view, candidates),
        _view(root_tokens),
        _view(num_nodes),
        *candidates.tokens.shape,
        max_nodes,
        *(column.data_ptr() for column in out),
        torch.get_num_threads(),
    )
    return out


def verify(
    tree: Tree,
    target_tokens: Tensor,
    depth: int,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    out = out or results.verify(target_tokens, depth)
    _C.verify(
        _view(tree.tokens),
        _view(tree.parents),
        _view(tree.num_nodes),
        _view(target_tokens),
        *target_tokens.shape,
        depth,
        *(column.data_ptr() for column in out),
        torch.get_num_threads(),
    )
    return out


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    block_table: Tensor | None = None,
    window: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = results.tree_attention(q) if out is None else out
    # the copies of small integer tensors live until the call returns
    prefix_len, num_nodes = prefix_len.contiguous(), num_nodes.contiguous()
    ancestors = ancestors.contiguous()
    table = None if block_table is None else block_table.contiguous()
    _C.tree_attention(
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        _DTYPES[q.dtype],
        q.shape,
        q.stride(),
        k_cache.shape,
        k_cache.stride(),
        v_cache.stride(),
        prefix_len.data_ptr(),
        num_nodes.data_ptr(),
        ancestors.data_ptr(),
        ancestors.shape[2],
        0 if table is None else table.data_ptr(),
        0 if table is None else table.shape[1],
        scale,
        _NO_WINDOW if window is None else window,
        torch.get_num_threads(),
    )
    return out


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    accept_length: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    _C.compact_kv(
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.element_size(),
        k_cache.shape,
        k_cache.stride(),
        v_cache.stride(),
        _view(path),
        *path.shape,
        _view(accept_length),
        _view(prefix_len),
        (0, 0, 0) if block_table is None else _view(block_table),
        0 if block_table is None else block_table.shape[1],
        torch.get_num_threads(),
    )


_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NO_WINDOW = 2**62


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    out = results.sample(positions) if out is None else out
    law = _law(logits, temperature, top_k, top_p, min_p, seed, positions)
    _C.sample(law, out.data_ptr(), torch.get_num_threads())
    return out


def accept(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    depth: int,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = out or results.accept(positions, depth)
    _C.accept(
        _view(tree.tokens),
        _view(tree.parents),
        _view(tree.num_nodes),
        _law(logits, temperature, top_k, top_p, min_p, seed, positions),
        depth,
        *(column.data_ptr() for column in out),
        torch.get_num_threads(),
    )
    return out


def _law(logits: Tensor, *sampling: Tensor) -> tuple:
    where = (logits.data_ptr(), _DTYPES[logits.dtype], tuple(logits.shape), logits.stride())
    return (*where, *map(_view, sampling))


def _view(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())
