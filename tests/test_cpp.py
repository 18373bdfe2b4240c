"""The C++ form against brute force in plain Python, then against the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2_kernels import Candidates, Tree, reference

cpu = pytest.importorskip("eagle2_kernels.cpu", exc_type=ImportError)

SCORES = [0.0, -0.0, -1.0, -1.0, -1.5, -40.0, -3e38, 2.0, 1e-45, math.inf, -math.inf, math.nan]


def ordered(scores):
    worth = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(range(len(worth)), key=lambda i: (-worth[i], i))


def brute_rerank(tokens, scores, parents, root_token, num_nodes, columns):
    """One row of a tree as lists; ancestors as sets."""
    effective = []
    for i, (score, parent) in enumerate(zip(scores, parents, strict=True)):
        dead = math.isnan(score) or not -1 <= parent < i
        effective.append(-math.inf if dead else min([score] + effective[parent : parent + 1]))
    nodes = []
    if min(num_nodes, columns) > 0:
        nodes = [(root_token, -1, 0, {0}, 0.0)]
        best = ordered(effective)[: min(num_nodes, columns) - 1]
        chosen = sorted(i for i in best if effective[i] > -math.inf)
        for i in chosen:
            above = 0 if parents[i] == -1 else 1 + chosen.index(parents[i])
            line = nodes[above][3] | {len(nodes)}
            nodes.append((tokens[i], above, nodes[above][2] + 1, line, effective[i]))
    padding = [(-1, -1, 0, set(), -math.inf)] * (columns - len(nodes))
    return [*zip(*nodes + padding, strict=True)], len(nodes)


def brute_verify(tokens, parents, num_nodes, target_tokens, depth):
    if num_nodes <= 0:
        return [-1] * (depth + 1), 0, -1
    path = [0]
    while len(path) <= depth:
        node = path[-1]
        agreed = [
            j
            for j in range(node + 1, min(num_nodes, len(tokens)))
            if parents[j] == node and tokens[j] == target_tokens[node]
        ]
        if not agreed:
            break
        path.append(min(agreed))
    return path + [-1] * (depth + 1 - len(path)), len(path) - 1, target_tokens[path[-1]]


def check_rerank(candidates, root_tokens, num_nodes, columns):
    tree = cpu.rerank(candidates, root_tokens, num_nodes, columns)
    for row in range(len(root_tokens)):
        inputs = [field[row].tolist() for field in candidates]
        wanted, count = brute_rerank(
            *inputs, root_tokens[row].item(), num_nodes[row].item(), columns
        )
        assert tree.num_nodes[row] == count
        for field, values in zip(
            ("tokens", "parents", "depths", "scores"), wanted[:3] + wanted[4:], strict=True
        ):
            assert getattr(tree, field)[row].tolist() == list(values), field
        words = tree.ancestors[row].numpy().view(np.uint64).tolist()
        bits = [sum(int(word) << 64 * w for w, word in enumerate(line)) for line in words]
        assert bits == [sum(1 << j for j in line) for line in wanted[3]]
    return tree


def random_candidates(rng, batch, columns):
    parents = rng.integers(-1, np.arange(columns), (batch, columns))
    wrong = rng.integers(-3, columns + 3, (batch, columns))
    parents = np.where(rng.random((batch, columns)) < 0.9, parents, wrong)
    return Candidates(
        torch.from_numpy(rng.integers(0, 99, (batch, columns))),
        torch.from_numpy(rng.choice(np.array(SCORES, np.float32), (batch, columns))),
        torch.from_numpy(parents.astype(np.int32)),
    )


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@given(st.lists(st.sampled_from(SCORES), min_size=1, max_size=20), st.data())
def test_select_leaves_follows_the_order_rule(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    index = cpu.select_leaves(torch.tensor([scores]), k)
    assert index.tolist() == [ordered(torch.tensor(scores).tolist())[:k]]
    assert index.dtype == torch.int32


def test_select_leaves_r02_ties_take_the_lower_index():
    assert cpu.select_leaves(torch.zeros(1, 6), 3).tolist() == [[0, 1, 2]]
    assert cpu.select_leaves(torch.tensor([[3.0, 2, 3, 2, 1, 1]]), 4).tolist() == [[0, 2, 1, 3]]
    assert cpu.select_leaves(torch.zeros(1, 32000), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "view", [lambda x: x.t(), lambda x: x[::2, ::3], lambda x: x[:, :1].expand(-1, 7)]
)
def test_select_leaves_takes_any_strides(view):
    scores = view(torch.randn(24, 24))
    assert torch.equal(cpu.select_leaves(scores, 5), cpu.select_leaves(scores.contiguous(), 5))


@settings(max_examples=300)
@given(st.data())
def test_rerank_of_any_forest(data):
    columns = data.draw(st.integers(0, 12))
    row = st.lists(st.sampled_from(SCORES), min_size=columns, max_size=columns)
    parents = st.lists(st.integers(-3, columns), min_size=columns, max_size=columns)
    sane = st.tuples(*(st.integers(-1, i - 1) for i in range(columns)))
    candidates = Candidates(
        torch.arange(columns)[None] * 10,
        torch.tensor([data.draw(row)]),
        torch.tensor([list(data.draw(sane | parents))], dtype=torch.int32),
    )
    num_nodes = int32([data.draw(st.integers(-1, 16))])
    check_rerank(candidates, torch.tensor([7]), num_nodes, data.draw(st.integers(1, 15)))


@pytest.mark.parametrize("columns", [1, 2, 63, 64, 65, 128, 200])
def test_rerank_of_ragged_rows_and_many_words(columns):
    rng = np.random.default_rng(columns)
    num_nodes = int32([0, 1, columns, columns + 9, -5, columns // 2, 2])
    candidates = random_candidates(rng, 7, 300)
    check_rerank(candidates, torch.arange(7) + 500, num_nodes, columns)


def test_rerank_of_a_chain_deeper_than_a_word():
    chain = Candidates(
        torch.arange(150)[None], -torch.arange(150.0)[None], torch.arange(-1, 149).int()[None]
    )
    tree = check_rerank(chain, torch.tensor([9]), int32([140]), 140)
    assert tree.depths[0].tolist() == list(range(140))


def test_rerank_takes_any_strides_and_an_empty_batch():
    candidates = random_candidates(np.random.default_rng(0), 6, 80)
    roots, num_nodes = torch.arange(12)[::2], int32([9])[[0]].expand(6)
    strided = Candidates(*(field.t().contiguous().t() for field in candidates))
    for got, wanted in zip(
        cpu.rerank(strided, roots, num_nodes, 20),
        cpu.rerank(candidates, roots.clone(), num_nodes.clone(), 20),
        strict=True,
    ):
        assert torch.equal(got, wanted)
    none = Candidates(*(field[:0] for field in candidates))
    tree = cpu.rerank(none, roots[:0], num_nodes[:0], 20)
    assert tree.ancestors.shape == (0, 20, 1)


def random_tree(rng, batch, columns, num_nodes):
    parents = rng.integers(-2, np.maximum(np.arange(columns), 1), (batch, columns))
    return Tree(
        tokens=torch.from_numpy(rng.integers(0, 3, (batch, columns))),
        parents=torch.from_numpy(parents.astype(np.int32)),
        depths=torch.zeros(0),
        ancestors=torch.zeros(0),
        scores=torch.zeros(0),
        num_nodes=num_nodes,
    )


def check_verify(tree, target_tokens, depth):
    got = cpu.verify(tree, target_tokens, depth)
    for row in range(len(target_tokens)):
        wanted = brute_verify(
            tree.tokens[row].tolist(),
            tree.parents[row].tolist(),
            tree.num_nodes[row].item(),
            target_tokens[row].tolist(),
            depth,
        )
        assert (got[0][row].tolist(), got[1][row].item(), got[2][row].item()) == wanted
    return got


@pytest.mark.parametrize("columns", [1, 2, 30, 130])
@pytest.mark.parametrize("depth", [0, 1, 6, 200])
def test_verify_walks_as_the_target_says(columns, depth):
    rng = np.random.default_rng(columns + depth)
    num_nodes = torch.from_numpy(rng.integers(-1, columns + 3, 40)).int()
    tree = random_tree(rng, 40, columns, num_nodes)
    check_verify(tree, torch.from_numpy(rng.integers(0, 3, (40, columns))), depth)


@pytest.mark.parametrize(
    "parents", [[-1, 2, 1], [-1, 0, 7], [0, 0, 0], [-1, 2, 0], [-1, -9, 2**31 - 1]]
)
def test_verify_r44_malformed_tree_ends_and_leaves_neighbours_alone(parents):
    tree = random_tree(np.random.default_rng(0), 3, 3, int32([3, 3, 3]))
    tree.parents[:] = int32([-1, 0, 1])
    tree.parents[1] = int32(parents)
    tree.tokens[:] = 5
    path, accept_length, bonus = check_verify(tree, torch.full((3, 3), 5), 4)
    assert path[0].tolist() == path[2].tolist() == [0, 1, 2, -1, -1]
    assert accept_length[0] == accept_length[2] == 2
    assert bonus.tolist() == [5, 5, 5]


def test_verify_takes_any_strides_and_an_empty_batch():
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 8, 20, int32([20]).expand(8))
    target_tokens = torch.from_numpy(rng.integers(0, 3, (20, 8))).t()
    strided = tree._replace(
        tokens=tree.tokens.t().contiguous().t(), parents=tree.parents.repeat(1, 2)[:, :20]
    )
    wanted = cpu.verify(tree, target_tokens.contiguous(), 5)
    for got, other in zip(cpu.verify(strided, target_tokens, 5), wanted, strict=True):
        assert torch.equal(got, other)
    none = tree._replace(
        tokens=tree.tokens[:0], parents=tree.parents[:0], num_nodes=tree.num_nodes[:0]
    )
    path, *_ = cpu.verify(none, target_tokens[:0], 5)
    assert path.shape == (0, 6)


@pytest.mark.parametrize("threads", [1, 2])
def test_same_as_the_reference(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rng = np.random.default_rng(threads)
    candidates = random_candidates(rng, 64, 510)
    candidates.scores[:, 100:] = -torch.rand(64, 410)
    num_nodes = torch.from_numpy(rng.integers(0, 80, 64)).int()
    ours = cpu.rerank(candidates, torch.arange(64), num_nodes, 70)
    wanted = reference.rerank(candidates, torch.arange(64), num_nodes, 70)
    for field, got, value in zip(Tree._fields, ours, wanted, strict=True):
        assert torch.equal(got, value), field
        assert got.dtype == value.dtype
    target_tokens = torch.from_numpy(rng.integers(0, 99, (64, 70)))
    for got, value in zip(
        cpu.verify(ours, target_tokens, 6), reference.verify(ours, target_tokens, 6), strict=True
    ):
        assert torch.equal(got, value)
        assert got.dtype == value.dtype
    leaves = cpu.select_leaves(candidates.scores, 10)
    assert torch.equal(leaves, reference.select_leaves(candidates.scores, 10))
