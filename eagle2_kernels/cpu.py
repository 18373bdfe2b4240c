"""The C++ form as seen from Python: memory for the results, pointers, sizes and strides into _C."""

import torch
from torch import Tensor

from . import _C
from .tree import Candidates, Tree


def select_leaves(scores: Tensor, k: int) -> Tensor:
    index = scores.new_empty((scores.shape[0], k), dtype=torch.int32)
    _C.select_leaves(_view(scores), *scores.shape, k, index.data_ptr(), torch.get_num_threads())
    return index


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


def _view(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())
