import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import eagle2_kernels

SCORES = [0.0, -0.0, -1.0, -1.0, -1.5, -40.0, -3.4e38, 2.0, 1e-45, math.inf, -math.inf, math.nan]


def ordered(scores):
    worth = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(range(len(worth)), key=lambda i: (-worth[i], i))


@given(st.lists(st.lists(st.sampled_from(SCORES), min_size=9, max_size=9), max_size=3), st.data())
def test_order_rule(form, rows, data):
    k = data.draw(st.integers(1, 9))
    scores = torch.tensor(rows).reshape(-1, 9)
    index = form.select_leaves(scores, k)
    assert index.dtype == torch.int32
    assert index.tolist() == [ordered(row)[:k] for row in scores.tolist()]


@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
def test_order_rule_of_any_float(form, scores, data):
    k = data.draw(st.integers(1, len(scores)))
    assert form.select_leaves(torch.tensor([scores]), k).tolist() == [ordered(scores)[:k]]


@pytest.mark.parametrize(
    ("scores", "k", "index"),
    [
        ([0.0] * 6, 3, [0, 1, 2]),
        ([3.0, 2.0, 3.0, 2.0, 1.0, 1.0], 2, [0, 2]),
        ([3.0, 2.0, 3.0, 2.0, 1.0, 1.0], 4, [0, 2, 1, 3]),
        ([-0.0, 0.0, -0.0, 0.0], 4, [0, 1, 2, 3]),
        ([math.nan, -math.inf, -3.4e38, math.inf], 4, [3, 2, 0, 1]),
    ],
)
def test_r02_ties_take_the_lower_index(form, scores, k, index):
    assert form.select_leaves(torch.tensor([scores]), k).tolist() == [index]


def test_r02_ties_in_a_long_row(fast_form):
    assert fast_form.select_leaves(torch.zeros(1, 32000), 3).tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 400])
def test_every_width(form, columns):
    """Few values, so most places are decided by the index."""
    generator = torch.Generator().manual_seed(columns)
    scores = torch.randint(-3, 1, (3, columns), generator=generator).float()
    index = form.select_leaves(scores, min(columns, 64))
    assert index.tolist() == [ordered(row)[:64] for row in scores.tolist()]


def test_widest_level(fast_form):
    """64 leaves of 64 children."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4096, generator=generator).round(decimals=1)
    for k in (64, 65, 4096):
        index = fast_form.select_leaves(scores, k)
        assert index.tolist() == [ordered(row)[:k] for row in scores.tolist()]


def test_r39_every_k(form):
    scores = torch.tensor([[3.0, 1, 7, 5, 2, 8, 6, 4]])
    for k in range(1, 9):
        chosen = scores.gather(1, form.select_leaves(scores, k).long())
        assert chosen.tolist() == [[8, 7, 6, 5, 4, 3, 2, 1][:k]]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[::2, ::3],
        lambda x: x[:, :1].expand(-1, 7),
        lambda x: x[:1].expand(4, -1),
        lambda x: x[..., :20],
    ],
)
def test_r16_any_strides(form, view):
    scores = view(torch.randn(24, 24))
    wanted = form.select_leaves(scores.contiguous(), 5)
    assert torch.equal(form.select_leaves(scores, 5), wanted)


def test_no_rows(form):
    assert form.select_leaves(torch.zeros(0, 5), 3).shape == (0, 3)


def test_operator_dispatches_to_the_same_result(form):
    scores = torch.randn(3, 100).round(decimals=1)
    wanted = form.select_leaves(scores, 10)
    assert torch.equal(eagle2_kernels.select_leaves(scores, 10), wanted)
