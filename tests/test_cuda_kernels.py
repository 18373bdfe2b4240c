"""What the CUDA kernels do beyond the sizes of the other tests: more than shared memory holds, the
widths of moves, failed launches. On the host, as cuda_on_host has it, and on a GPU."""

import cuda_on_host
import numpy as np
import pytest
import torch
from on_gpu import OnGpu

import eagle2_kernels
from eagle2_kernels import Candidates, Tree, reference

HOST = pytest.mark.skipif(not cuda_on_host.has_compiler(), reason="needs g++ on Linux")
FORMS = [pytest.param(cuda_on_host.OnHost(), id="host", marks=HOST)]
if torch.cuda.is_available() and "cuda" not in eagle2_kernels.missing_forms:
    FORMS.append(pytest.param(OnGpu(eagle2_kernels.cuda), id="gpu", marks=pytest.mark.gpu))
each_place = pytest.mark.parametrize("cuda", FORMS)


def int32(values):
    return torch.as_tensor(np.asarray(values), dtype=torch.int32)


def drafted(rng, batch, columns, levels=12):
    """Many ties; parents anywhere below, some of them wrong."""
    scores = rng.choice([-0.0, 0.0, -0.5, -1.0, -1.5, -np.inf, np.nan], (batch, columns))
    scores = scores - rng.integers(0, levels, (batch, columns))
    parents = rng.integers(-2, np.arange(columns) + 1, (batch, columns))
    parents[:, rng.random(columns) < 0.3] = -1
    tokens = torch.from_numpy(rng.integers(0, 9, (batch, columns)))
    return Candidates(tokens, torch.from_numpy(scores.astype(np.float32)), int32(parents))


@each_place
@pytest.mark.parametrize("columns", [0, 1, 31, 32, 33, 510, 511, 512, 513, 1100, 11_600])
def test_rerank_of_any_number_of_candidates(cuda, columns):
    rng = np.random.default_rng(columns)
    candidates, roots = drafted(rng, 4, columns), torch.arange(4)
    for max_nodes in (1, 60, 64, 65, 130) if columns < 512 else (65,):
        num_nodes = int32([max_nodes, -1, max_nodes // 2, max_nodes + 9])
        wanted = reference.rerank(candidates, roots, num_nodes, max_nodes)
        got = cuda.rerank(candidates, roots, num_nodes, max_nodes)
        for name, ours, theirs in zip(Tree._fields, got, wanted, strict=True):
            assert torch.equal(ours, theirs), name
        assert wanted.depths.max() > 1 or columns < 500 or max_nodes == 1


@each_place
def test_rerank_of_one_deep_chain(cuda):
    count = 400
    scores = torch.linspace(-1, -2, count).round(decimals=2)[None]
    chain = Candidates(torch.arange(count)[None], scores, int32([np.arange(-1, count - 1)]))
    for num_nodes in (int32([200]), int32([count + 1])):
        wanted = reference.rerank(chain, torch.tensor([7]), num_nodes, count + 1)
        got = cuda.rerank(chain, torch.tensor([7]), num_nodes, count + 1)
        assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


@each_place
@pytest.mark.parametrize("nodes", [1, 64, 65, 2457, 2458, 3000])
def test_verify_of_any_number_of_nodes(cuda, nodes):
    rng = np.random.default_rng(nodes)
    parents = rng.integers(-1, np.maximum(np.arange(nodes) // 8, 1), (3, nodes))
    tokens = torch.from_numpy(rng.integers(0, 2, (3, nodes)))
    rest = torch.zeros(0)
    num_nodes = int32([nodes, nodes // 2, nodes + 5])
    tree = Tree(tokens, int32(parents), rest, rest, rest, num_nodes)
    target_tokens = torch.from_numpy(rng.integers(0, 2, (3, nodes)))
    wanted = reference.verify(tree, target_tokens, 9)
    assert all(map(torch.equal, cuda.verify(tree, target_tokens, 9), wanted))
    if nodes > 2000:
        assert wanted[1].max() > 1


@each_place
@pytest.mark.parametrize("columns", [127, 128, 129, 4096, 4097, 8000])
def test_select_leaves_across_tiles(cuda, columns):
    scores = torch.from_numpy(np.random.default_rng(columns).integers(-9, 9, (2, columns))).float()
    wanted = reference.select_leaves(scores, columns)
    assert torch.equal(cuda.select_leaves(scores, columns), wanted)


@each_place
@pytest.mark.parametrize(
    ("dtype", "dim", "offset"),
    [
        (torch.int8, 3, 0),  # moves of 1 byte
        (torch.int8, 32, 1),
        (torch.int16, 5, 0),  # 2
        (torch.int16, 8, 1),
        (torch.float32, 7, 0),  # 4
        (torch.bfloat16, 4, 0),  # 8
        (torch.bfloat16, 128, 0),  # 16
        (torch.complex128, 1, 0),
        (torch.complex128, 3, 0),
    ],
)
def test_compact_kv_in_moves_of_any_width(cuda, dtype, dim, offset):
    shape = (2, 3, 40, 5, dim)  # layers, batch, slots, heads
    rng = np.random.default_rng(dim)
    size = int(np.prod(shape))
    caches = []
    for first in (0, offset):  # V alone is out of line
        memory = torch.from_numpy(rng.integers(0, 100, size + first)).to(dtype)
        caches.append(memory[first:].view(shape))
    path = int32([[0, *range(2, 21)], [0, 1, 4, *[-1] * 17], [0, *[-1] * 19]])
    lengths, prefix_len = int32([19, 2, 19]), int32([3, 30, 0])
    wanted = [cache.clone() for cache in caches]
    reference.compact_kv(*wanted, path, lengths, prefix_len)
    assert not torch.equal(wanted[0], caches[0])
    cuda.compact_kv(*caches, path, lengths, prefix_len)
    assert all(map(torch.equal, caches, wanted))


@each_place
@pytest.mark.parametrize("empty", [0, 1, 3, 4])
def test_compact_kv_of_empty_caches(cuda, empty):
    sizes = [2, 3, 10, 4, 8]
    sizes[empty] = 0
    rows = int32(np.zeros((sizes[1], 3)))
    cuda.compact_kv(torch.zeros(sizes), torch.zeros(sizes), rows, rows[:, 0], rows[:, 0])


@HOST
def test_a_launch_that_fails_raises():
    _cuda = cuda_on_host.form()._cuda
    index = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="invalid"):
        _cuda.select_leaves((index.data_ptr(), 1, 1), 1, 1, 1, index.data_ptr(), 3, 0)
