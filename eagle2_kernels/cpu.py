"""The C++ form as seen from Python: memory for the results, pointers, sizes and strides into _C."""

import torch
from torch import Tensor

from . import _C
from .tree import Candidates, Tree


def expand(
    logits: Tensor, leaf_scores: Tensor, k: int, draft_to_target: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:2], k)
    tokens = torch.empty(shape, dtype=torch.int64)
    scores = torch.empty(shape, dtype=torch.float32)
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
    return tokens, scores


def select_leaves(scores: Tensor, k: int) -> Tensor:
    index = scores.new_empty((scores.shape[0], k), dtype=torch.int32)
    _C.select_leaves(_view(scores), *scores.shape, k, index.data_ptr(), torch.get_num_threads())
    return index


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, _, size = words.shape
    leaves = (
        torch.empty((batch, k), dtype=torch.int64),
        torch.empty((batch, k), dtype=torch.float32),
        torch.empty((batch, k), dtype=torch.int32),
        torch.empty((batch, k), dtype=torch.int64),
        torch.empty((batch, k, size), dtype=torch.int64),
        torch.empty(batch, dtype=torch.int32),
    )
    _C.enter_level(
        [_view(column) for column in candidates],
        begin,
        [_view(x) for x in (tokens, scores, words)],
        _view(parents),
        (*tokens.shape, size),
        first_slot,
        k,
        _view(num_nodes),
        [column.data_ptr() for column in leaves],
        torch.get_num_threads(),
    )
    return leaves


def rerank(candidates: Candidates, root_tokens: Tensor, num_nodes: Tensor, max_nodes: int) -> Tree:
    shape = (candidates.tokens.shape[0], max_nodes)
    tree = Tree(
        tokens=torch.empty(shape, dtype=torch.int64),
        parents=torch.empty(shape, dtype=torch.int32),
        depths=torch.empty(shape, dtype=torch.int32),
        ancestors=torch.empty((*shape, -(-max_nodes // 64)), dtype=torch.int64),
        scores=torch.empty(shape, dtype=torch.float32),
        num_nodes=torch.empty(shape[:1], dtype=torch.int32),
    )
    _C.rerank(
        *map(_view, candidates),
        _view(root_tokens),
        _view(num_nodes),
        *candidates.tokens.shape,
        max_nodes,
        *(column.data_ptr() for column in tree),
        torch.get_num_threads(),
    )
    return tree


def verify(tree: Tree, target_tokens: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    batch = target_tokens.shape[0]
    path = torch.empty((batch, depth + 1), dtype=torch.int32)
    accept_length = torch.empty(batch, dtype=torch.int32)
    bonus_token = torch.empty(batch, dtype=torch.int64)
    _C.verify(
        _view(tree.tokens),
        _view(tree.parents),
        _view(tree.num_nodes),
        _view(target_tokens),
        *target_tokens.shape,
        depth,
        path.data_ptr(),
        accept_length.data_ptr(),
        bonus_token.data_ptr(),
        torch.get_num_threads(),
    )
    return path, accept_length, bonus_token


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
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
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
) -> Tensor:
    tokens = torch.empty(positions.shape, dtype=torch.int64)
    law = _law(logits, temperature, top_k, top_p, min_p, seed, positions)
    _C.sample(law, tokens.data_ptr(), torch.get_num_threads())
    return tokens


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = positions.shape[0]
    path = torch.empty((batch, depth + 1), dtype=torch.int32)
    accept_length = torch.empty(batch, dtype=torch.int32)
    bonus_token = torch.empty(batch, dtype=torch.int64)
    path_tokens = torch.empty((batch, depth + 1), dtype=torch.int64)
    _C.accept(
        _view(tree.tokens),
        _view(tree.parents),
        _view(tree.num_nodes),
        _law(logits, temperature, top_k, top_p, min_p, seed, positions),
        depth,
        path.data_ptr(),
        accept_length.data_ptr(),
        bonus_token.data_ptr(),
        path_tokens.data_ptr(),
        torch.get_num_threads(),
    )
    return path, accept_length, bonus_token, path_tokens


def _law(logits: Tensor, *sampling: Tensor) -> tuple:
    where = (logits.data_ptr(), _DTYPES[logits.dtype], tuple(logits.shape), logits.stride())
    return (*where, *map(_view, sampling))


def _view(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())
