"""One level entered among the candidates; its leaves are those that `select_leaves` gives."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eagle2_kernels
from eagle2_kernels import Candidates, reference
from eagle2_kernels.reference.words import unpack

INF = float("inf")


def buffers(batch, columns):
    return Candidates(
        torch.full((batch, columns), -5),
        torch.full((batch, columns), -INF),
        torch.full((batch, columns), -7, dtype=torch.int32),
    )


def level(tokens, scores, parents, words):
    return (
        torch.tensor(tokens),
        torch.tensor(scores),
        torch.tensor(parents, dtype=torch.int32),
        torch.tensor(words),
    )


def test_a_level_drawn_by_hand(form):
    """Two leaves (candidates 1 and 0) with three children each, after a first level of three."""
    candidates = buffers(1, 10)
    candidates.scores[0, :3] = torch.tensor([-1.0, -0.5, -3.0])
    tokens, scores, parents, words = level(
        [[[10, 11, 12], [20, 21, 22]]],
        [[[-0.75, -2.0, -4.0], [-1.5, -1.5, -INF]]],
        [[1, 0]],
        [[[1], [2]]],
    )
    nodes = torch.tensor([6], dtype=torch.int32)
    got = form.enter_level(candidates, 3, tokens, scores, parents, words, 2, 4, nodes)
    assert candidates.tokens.tolist() == [[-5] * 3 + [10, 11, 12, 20, 21, 22] + [-5]]
    assert candidates.scores[0, 3:9].tolist() == [-0.75, -2.0, -4.0, -1.5, -1.5, -INF]
    assert candidates.parents.tolist() == [[-7] * 3 + [1, 1, 1, 0, 0, 0] + [-7]]
    assert [field.tolist() for field in got] == [
        [[10, 20, 21, 11]],
        [[-0.75, -1.5, -1.5, -2.0]],
        [[3, 6, 7, 4]],
        [[0, 1, 1, 0]],
        [[[1 | 4], [2 | 8], [2 | 16], [1 | 32]]],
        [3],  # in all: candidates 1, 3, 0, 6, 7 are the best five
    ]
    kinds = [field.dtype for field in got]
    assert kinds == [torch.int64, torch.float32, torch.int32, torch.int64, torch.int64, torch.int32]


VALUES = [0.0, -0.0, -1.0, -1.0, -2.0, -2.5, -INF, float("nan"), 3e38]


@given(seed=st.integers(0, 2**32))
def test_every_form_gives_the_reference(fast_form, seed):
    check_random(fast_form, np.random.default_rng(seed))


def test_random_levels(form):
    for seed in range(4):
        check_random(form, np.random.default_rng(seed))


def check_random(form, rng):
    batch, leaves, children = rng.integers(0, 4), rng.integers(1, 5), rng.integers(1, 5)
    begin, size = int(rng.integers(0, 9)), int(leaves * children)
    k, wide = int(rng.integers(1, size + 1)), int(rng.integers(1, 4))
    first_slot = int(rng.integers(0, 64 * wide - k + 1))

    def drawn(*shape):
        return torch.from_numpy(rng.choice(VALUES, shape)).float()

    candidates = buffers(batch, begin + size + 2)
    candidates.scores[:, :begin] = drawn(batch, begin)
    copies = Candidates(*(field.clone() for field in candidates))
    # every other column and row of something larger
    tokens = torch.from_numpy(rng.integers(0, 99, (batch, leaves, 2 * children)))[..., ::2]
    scores = drawn(batch, leaves, children)
    parents = torch.from_numpy(rng.integers(-1, begin + 1, (2, leaves, batch)))[0].T.int()
    words = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, (batch, leaves, wide)))
    nodes = torch.from_numpy(rng.integers(0, begin + size + 3, batch)).int()
    rest = (begin, tokens, scores, parents, words, first_slot, k, nodes)
    wanted = reference.enter_level(copies, *rest)
    got = form.enter_level(candidates, *rest)
    for one, other in zip((*got, *candidates), (*wanted, *copies), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_leaves_are_those_of_select_leaves(form):
    torch.manual_seed(0)
    scores = -torch.rand(2, 10, 10)
    tokens = torch.arange(200).view(2, 10, 10)
    parents, words = torch.arange(10).repeat(2, 1).int(), torch.zeros(2, 10, 1, dtype=torch.int64)
    nodes = torch.full((2,), 30, dtype=torch.int32)
    rest = (0, tokens, scores, parents, words, 54, 10, nodes)
    got = form.enter_level(buffers(2, 100), *rest)
    index = eagle2_kernels.select_leaves(scores.flatten(1), 10).long()
    assert torch.equal(got[0], tokens.flatten(1).gather(1, index))
    assert torch.equal(got[3], index // 10)
    assert unpack(got[4], 64)[0].nonzero().tolist() == [[r, 54 + r] for r in range(10)]
    assert got[5].tolist() == [10, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"begin": 2}, "begin: wanted 0..C - L * K = 1, got 2"),
        ({"begin": -1}, "begin: wanted"),
        ({"k": 7}, "k: wanted 1..L * K=6, got 7"),
        ({"k": 0}, "k: wanted"),
        ({"first_slot": 63}, "first_slot: wanted 0..64 * W - k = 62, got 63"),
        ({"scores": torch.zeros(1, 2, 2)}, "scores: wanted shape [1, 2, 3]"),
        ({"parents": torch.zeros(1, 2)}, "parents: wanted int32"),
        ({"num_nodes": torch.zeros(2).int()}, "num_nodes: wanted shape [1]"),
    ],
)
def test_what_it_refuses(change, message):
    settings = {
        "begin": 0,
        "tokens": torch.zeros(1, 2, 3, dtype=torch.int64),
        "scores": torch.zeros(1, 2, 3),
        "parents": torch.zeros(1, 2, dtype=torch.int32),
        "words": torch.zeros(1, 2, 1, dtype=torch.int64),
        "first_slot": 0,
        "k": 2,
        "num_nodes": torch.ones(1, dtype=torch.int32),
    }
    eagle2_kernels.enter_level(buffers(1, 7), **settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        eagle2_kernels.enter_level(buffers(1, 7), **{**settings, **change})
