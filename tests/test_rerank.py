import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels
from eagle2_kernels import Candidates, Tree, reference

INF, NAN = math.inf, math.nan


def candidates(tokens, scores, parents):
    return Candidates(
        torch.tensor([tokens]), torch.tensor([scores]), torch.tensor([parents], dtype=torch.int32)
    )


def levels(k, depth, scores):
    """Candidates of a full tree in which the first k of each level are expanded."""
    count = k + (depth - 1) * k * k
    parents = [-1] * k
    for level in range(2, depth + 1):
        begin = 0 if level == 2 else k + (level - 3) * k * k
        parents += [begin + leaf for leaf in range(k) for _ in range(k)]
    return candidates(list(range(100, 100 + count)), scores, parents)


def rerank(form, drafted, num_nodes, max_nodes=None, roots=(7,)):
    max_nodes = num_nodes if max_nodes is None else max_nodes
    sizes = torch.full((len(drafted.tokens),), num_nodes, dtype=torch.int32)
    return form.rerank(drafted, torch.tensor(roots), sizes, max_nodes)


def test_r13_one_level_only(form):
    tree = rerank(form, levels(3, 1, [-1.0, -2.0, -3.0]), 4)
    assert tree.parents.tolist() == [[-1, 0, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 1, 1]]


def test_r13_more_nodes_than_candidates(form):
    tree = rerank(form, levels(3, 1, [-1.0, -2.0, -3.0]), 9)
    assert tree.num_nodes.tolist() == [4]
    assert tree.tokens.tolist() == [[7, 100, 101, 102, -1, -1, -1, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 0, 0, -1, -1, -1, -1, -1]]
    assert tree.ancestors[0, 4:].tolist() == [[0]] * 5


def test_r13_all_candidates_kept(form):
    tree = rerank(form, levels(2, 2, [-1.0, -2.0, -2.0, -3.0, -3.0, -4.0]), 7)
    assert tree.num_nodes.tolist() == [7]
    assert tree.tokens.tolist() == [[7, 100, 101, 102, 103, 104, 105]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]


def test_r13_root_alone(form):
    for tree in (rerank(form, levels(1, 1, [-1.0]), 1), rerank(form, levels(1, 1, [-INF]), 3, 1)):
        assert tree.num_nodes.tolist() == [1]
        assert tree.tokens.tolist() == [[7]]
        assert tree.ancestors.tolist() == [[[1]]]


def test_r11_dead_candidates_never_become_nodes(form):
    a, b = math.log(1 / (1 + math.exp(-1))), math.log(1 / (1 + math.e))
    scores = [a, b, -INF, -INF, 2 * a, a + b, -INF, -INF, a + b, 2 * b, -INF, -INF]
    scores += [-INF, NAN, -INF, -INF, NAN, -INF, -INF, -INF]
    drafted = levels(4, 2, scores)
    for num_nodes in (7, 9, 21):
        tree = rerank(form, drafted, num_nodes)
        assert tree.num_nodes.tolist() == [7]
        assert tree.tokens[0, :7].tolist() == [7, 100, 101, 104, 105, 108, 109]
        assert tree.parents[0, :7].tolist() == [-1, 0, 0, 1, 1, 2, 2]
        assert tree.scores[0, :7].isfinite().all()
        assert not tree.scores.isnan().any()


def test_r30_deep_chains_are_told_apart(form):
    step = math.log(0.05)
    scores, parents = [], []
    for level in range(40):
        for chain, last in ((0, 0.04), (1, 0.06)):
            scores.append(level * step + (math.log(last) if level == 39 else step))
            parents.append(-1 if level == 0 else 2 * (level - 1) + chain)
    drafted = candidates(list(range(80)), scores, parents)
    tree = rerank(form, drafted, 80)
    assert 79 in tree.tokens[0].tolist()
    assert 78 not in tree.tokens[0].tolist()
    assert tree.scores[0].min().item() == pytest.approx(-119.647, abs=1e-2)


def test_r43_chain(form):
    tree = rerank(form, levels(1, 4, [-1.0, -2.0, -3.0, -4.0]), 5)
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 3, 4]]
    assert tree.ancestors[0, :, 0].tolist() == [1, 3, 7, 15, 31]


def test_r44_malformed_candidates_leave_neighbours_alone(form):
    rows = [[-1, 0, 1], [2, 0, 1], [-1, 7, 0], [-1, -2, 1], [-1, 2, 0]]
    drafted = Candidates(
        torch.arange(3).repeat(5, 1),
        torch.tensor([-1.0, -2.0, -3.0]).repeat(5, 1),
        torch.tensor(rows, dtype=torch.int32),
    )
    tree = rerank(form, drafted, 4, roots=[7] * 5)
    # a candidate without a valid parent is dead, and all below it
    assert tree.parents.tolist() == [
        [-1, 0, 1, 2],
        [-1, -1, -1, -1],
        [-1, 0, 1, -1],
        [-1, 0, -1, -1],
        [-1, 0, 1, -1],
    ]
    assert tree.num_nodes.tolist() == [4, 1, 3, 2, 3]


def test_child_counts_for_no_more_than_its_parent(form):
    tree = rerank(form, candidates([1, 2, 3], [-2.0, -1.0, -0.5], [-1, -1, 0]), 3)
    assert tree.tokens.tolist() == [[7, 1, 2]]
    tree = rerank(form, candidates([1, 2, 3], [NAN, -1.0, -0.5], [-1, -1, 0]), 4)
    assert tree.tokens.tolist() == [[7, 2, -1, -1]]


def test_ties_go_to_the_lower_index(form):
    for num_nodes in range(1, 14):
        tree = rerank(form, levels(3, 2, [0.0, -0.0] * 6), num_nodes)
        assert tree.tokens.tolist() == [[7, *range(100, 112)][:num_nodes] + [-1] * (num_nodes - 13)]


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 60, 63, 64, 65, 128])
def test_ragged_rows_equal_the_row_alone(form, columns):
    rng = np.random.default_rng(columns)
    scores = np.sort(-rng.random((4, 150), np.float32), 1)[:, ::-1].copy()
    drafted = Candidates(
        torch.from_numpy(rng.integers(0, 99, (4, 150))),
        torch.from_numpy(scores),
        torch.from_numpy(rng.integers(-1, np.arange(150), (4, 150)).astype(np.int32)),
    )
    sizes = torch.tensor([columns, 0, 1, max(columns // 2, 1)], dtype=torch.int32)
    roots = torch.arange(4)
    tree = form.rerank(drafted, roots, sizes, columns)
    assert tree.num_nodes.tolist() == sizes.tolist()
    for row in range(4):
        single = Candidates(*(field[row : row + 1] for field in drafted))
        alone = form.rerank(single, roots[row : row + 1], sizes[row : row + 1], columns)
        for name, field, wanted in zip(Tree._fields, tree, alone, strict=True):
            assert torch.equal(field[row : row + 1], wanted), name
        # padding, and what a row without a tree holds
        live = torch.arange(columns) < sizes[row]
        assert (tree.tokens[row][~live] == -1).all()
        assert (tree.parents[row][~live] == -1).all()
        assert (tree.ancestors[row][~live] == 0).all()
        assert (tree.scores[row][~live] == -INF).all()
        assert (tree.depths[row][~live] == 0).all()


def test_r16_any_strides(form):
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(-np.sort(rng.random((6, 80), np.float32), 1))
    parents = torch.from_numpy(rng.integers(-1, np.arange(80), (6, 80)).astype(np.int32))
    plain = Candidates(torch.from_numpy(rng.integers(0, 99, (6, 80))), scores, parents)
    strided = Candidates(
        plain.tokens.t().contiguous().t(),
        scores.repeat_interleave(2, 1)[:, ::2],
        torch.cat((parents, parents), 1)[:, :80],
    )
    roots, sizes = torch.arange(12)[::2], torch.full((1,), 9, dtype=torch.int32).expand(6)
    wanted = form.rerank(plain, roots.clone(), sizes.clone(), 20)
    for name, got, field in zip(
        Tree._fields, form.rerank(strided, roots, sizes, 20), wanted, strict=True
    ):
        assert torch.equal(got, field), name


def test_no_rows(form):
    none = Candidates(*(field[:0] for field in levels(2, 2, [-1.0] * 6)))
    tree = form.rerank(none, torch.zeros(0).long(), torch.zeros(0).int(), 70)
    assert [tuple(field.shape) for field in tree] == [(0, 70)] * 3 + [(0, 70, 2), (0, 70), (0,)]


@pytest.mark.parametrize("columns", [1, 2, 31, 64, 127, 128, 129, 300])
@pytest.mark.parametrize("nodes", [1, 60, 130])
def test_any_candidates_as_in_the_reference(form, columns, nodes):
    """Few scores, so ties decide; children above parents, parents that are none, odd floats."""
    rng = np.random.default_rng([columns, nodes])
    odd = [0.0, -0.0, -1e-45, 1e-45, -1.0, 2.0, -3.4e38, INF, -INF, NAN]
    scores = np.where(rng.random((4, columns)) < 0.2, rng.choice(odd, (4, columns)), -1.5)
    scores[1] = rng.choice([-1.0, -2.0, -3.0], columns)
    scores[2] = -np.sort(rng.random(columns))
    parents = rng.integers(-1, np.maximum(np.arange(columns), 1) // 2 + 1, (4, columns))
    broken = rng.random(columns) < 0.1
    parents[3, broken] = rng.choice([-2, columns - 1, columns, 2**31 - 1, -(2**31)], broken.sum())
    drafted = Candidates(
        torch.from_numpy(rng.integers(0, 2**40, (4, columns))),
        torch.from_numpy(scores.astype(np.float32)),
        torch.from_numpy(parents.astype(np.int32)),
    )
    roots, sizes = torch.arange(4) + 2**35, torch.tensor([nodes, 60, 7, 2**31 - 1]).int()
    wanted = reference.rerank(drafted, roots, sizes, nodes)
    for name, got, field in zip(
        Tree._fields, form.rerank(drafted, roots, sizes, nodes), wanted, strict=True
    ):
        assert torch.equal(got, field), name
        assert got.dtype == field.dtype


def random_rows(parents):
    rng = np.random.default_rng(1)
    rows, columns = parents.shape
    return Candidates(
        torch.arange(columns).repeat(rows, 1),
        torch.from_numpy(rng.choice([-1.0, -2.0, -3.0], parents.shape).astype(np.float32)),
        torch.from_numpy(parents.astype(np.int32)),
    )


def check_large(form, drafted, nodes):
    rows = len(drafted.tokens)
    roots, sizes = torch.arange(rows), torch.tensor([nodes, 256])[:rows].int()
    wanted = reference.rerank(drafted, roots, sizes, nodes)
    for got, field in zip(form.rerank(drafted, roots, sizes, nodes), wanted, strict=True):
        assert torch.equal(got, field)


def test_more_than_a_thousand_nodes(form):
    parents = np.random.default_rng(0).integers(-1, np.arange(1200))
    check_large(form, random_rows(parents[None]), 1100)


def test_widest_draft(fast_form):
    """32 leaves of 32 children at 8 levels, all in one chain, and anyhow."""
    index = np.arange(32 + 7 * 32 * 32)
    parents = np.stack((index - 1, np.random.default_rng(0).integers(-1, index)))
    check_large(fast_form, random_rows(parents), 1100)


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_operator_dispatches_to_the_same_tree(form, num_nodes, seed):
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, -0.5, -1.0, -INF, NAN], (2, 10)).astype(np.float32)
    drafted = Candidates(
        torch.from_numpy(rng.integers(0, 5, (2, 10))),
        torch.from_numpy(scores),
        torch.from_numpy(rng.integers(-1, np.arange(10), (2, 10)).astype(np.int32)),
    )
    roots = torch.tensor([3, 4])
    wanted = rerank(form, drafted, num_nodes, roots=[3, 4])
    for got, field in zip(eagle2_kernels.rerank(drafted, roots, num_nodes), wanted, strict=True):
        assert torch.equal(got, field)
