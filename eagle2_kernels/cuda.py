"""The CUDA C++ form as seen from Python: pointers and strides into _cuda.

It has the four operators of integers, whose kernels are so short that the launch is what counts.
"""

import torch
from torch import Tensor

from . import _cuda, results
from .tree import Candidates, Tree


def select_leaves(scores: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    out = results.select_leaves(scores, k) if out is None else out
    _launch(_cuda.select_leaves, scores, _view(scores), *scores.shape, k, out.data_ptr())
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
    batch, columns = candidates.tokens.shape
    scratch = candidates.parents.new_empty((batch, _cuda.rerank_scratch(columns)))
    _launch(
        _cuda.rerank,
        candidates.tokens,
        *map(_view, candidates),
        _view(root_tokens),
        _view(num_nodes),
        batch,
        columns,
        max_nodes,
        *(column.data_ptr() for column in out),
        scratch.data_ptr(),
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
    _launch(
        _cuda.verify,
        target_tokens,
        _view(tree.tokens),
        _view(tree.parents),
        _view(tree.num_nodes),
        _view(target_tokens),
        *target_tokens.shape,
        depth,
        *(column.data_ptr() for column in out),
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
    _launch(
        _cuda.compact_kv,
        k_cache,
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
    )


def built_for() -> str:
    version = _version(_cuda.runtime_version)
    return f"built for {_cuda.architectures.replace('/', ', ')} and PTX with CUDA {version}"


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _launch(operator, tensor: Tensor, *arguments) -> None:
    """On the current stream of the device that `tensor` is on."""
    device = tensor.device
    with torch.cuda.device(device):
        operator(*arguments, device.index, torch.cuda.current_stream().cuda_stream)


def _view(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.stride())


_known = _cuda.driver_version()
if _known // 1000 < _cuda.runtime_version // 1000:  # within a major version any driver will do
    _driver = f"is for CUDA {_version(_known)}" if _known else "is not there"
    raise ImportError(f"{built_for()}; NVIDIA's driver {_driver}")
