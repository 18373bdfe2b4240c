"""expand in every form, against sorting in plain Python."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels
from eagle2_kernels import reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BIGGEST = torch.finfo(torch.float32).max
LOGITS = [0.0, -0.0, 1.0, 1.0, 2.5, -3.0, 1e-40, 60.0, -60.0, -200.0, 3e38, -3e38]
LOGITS += [math.inf, -math.inf, math.nan]


def brute_expand(row):
    """The cleaned logits and log-probabilities of one row, float64 throughout."""
    x = [-math.inf if math.isnan(v) else min(v, BIGGEST) for v in row]
    peak = max(x)
    if peak == -math.inf:
        return x, x
    log_total = math.log(sum(math.exp(v - peak) for v in x))
    return x, torch.tensor([(v - peak) - log_total for v in x], dtype=torch.float32).tolist()


def check(form, logits, leaf_scores, k, tolerance=1e-5):
    """The right scores, in order: equal logits by id, others where they differ beyond rounding."""
    tokens, scores = form.expand(logits, leaf_scores, k)
    assert tokens.dtype == torch.int64
    assert scores.dtype == torch.float32

    def above(a, b):
        return a > b and a - b > tolerance + 1e-6 * min(abs(b), BIGGEST)

    for b, leaf in torch.cartesian_prod(*map(torch.arange, leaf_scores.shape)).tolist():
        x, worth = brute_expand(logits[b, leaf].float().tolist())
        got = tokens[b, leaf].tolist()
        wanted = torch.tensor([leaf_scores[b, leaf].item() + worth[i] for i in got])
        torch.testing.assert_close(
            scores[b, leaf], wanted, rtol=1e-6, atol=tolerance, equal_nan=True
        )
        assert len(set(got)) == k
        for first, second in pairwise(got):
            same = x[first] == x[second]
            assert first < second if same else not above(worth[second], worth[first]), got
        for left_out in set(range(len(x))) - set(got):
            assert not above(worth[left_out], worth[got[-1]]), (left_out, got)
            assert all(taken < left_out for taken in got if x[taken] == x[left_out]), got
    return tokens, scores


def check_row(form, row, data):
    k = data.draw(st.integers(1, len(row)))
    check(form, torch.tensor([[row]]), torch.tensor([[-1.5]]), k)


@settings(max_examples=300)
@given(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=40), st.data())
def test_any_row(fast_form, row, data):
    check_row(fast_form, row, data)


@settings(max_examples=20)
@given(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=9), st.data())
def test_any_short_row(form, row, data):
    check_row(form, row, data)


@pytest.mark.parametrize("peak", [50.0, 198.4322, -300.0])
def test_a_peak_that_grows_far_from_zero_keeps_the_sum(level, peak):
    logits = peak + torch.randn(300, 1, 1024, generator=torch.Generator().manual_seed(0)) * 1e-4
    _, scores = level.expand(logits, torch.zeros(300, 1), 1)
    wanted = logits.double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(scores[..., 0].double(), wanted, rtol=0, atol=1.5e-6)


@pytest.mark.parametrize("last", [3.4e38, math.inf])
def test_r10_very_large_logits_on_the_way_to_the_peak(fast_form, last):
    """Rows whose running sums overflow before the peak comes, in the last few logits."""
    logits = torch.zeros(1, 1, 300)
    logits[..., [50, 280]] = last
    logits[..., [20, 100]] = 3.399e38
    for view in (logits, torch.stack((logits, logits), -1)[..., 0]):
        tokens, scores = fast_form.expand(view, torch.zeros(1, 1), 4)
        assert tokens[0, 0].tolist() == [50, 280, 20, 100]
        torch.testing.assert_close(scores[0, 0, :2], -torch.tensor([2.0] * 2).log())


@pytest.mark.parametrize("dtype", DTYPES)
def test_r10_infinities_that_come_late_share_the_mass(form, dtype):
    """Behind finite logits, which lie 3e38 below them."""
    logits = torch.full((1, 1, 300), -17.5, dtype=dtype)
    logits[..., 200:204] = math.inf
    tokens, scores = form.expand(logits, torch.zeros(1, 1), 5)
    assert tokens[0, 0].tolist() == [200, 201, 202, 203, 0]
    torch.testing.assert_close(scores[0, 0, :4], -torch.tensor([4.0] * 4).log())


def test_a_difference_below_rounding_may_go_either_way(form):
    row = torch.zeros(1, 1, 19, dtype=torch.float16)
    row[..., 18] = 2.0**-23  # its log-probability and the others' are half a last bit apart
    check(form, row, torch.zeros(1, 1), 2)


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_finite_row(fast_form, dtype, data):
    value = st.floats(-30, 30, width=16)
    row = torch.tensor([[data.draw(st.lists(value, min_size=1, max_size=150))]], dtype=dtype)
    check(fast_form, row, torch.zeros(1, 1), data.draw(st.integers(1, row.shape[-1])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_r02_ties_take_the_lower_id(form, dtype):
    for size, k in ((6, 3), (9000, 3), (3000, 200)):
        logits = torch.zeros(1, 1, size, dtype=dtype)
        assert form.expand(logits, torch.zeros(1, 1), k)[0].tolist() == [[[*range(k)]]]
    row = torch.tensor([[[3.0, 2, 3, 2, 1, 1]]], dtype=dtype)
    assert form.expand(row, torch.zeros(1, 1), 2)[0].tolist() == [[[0, 2]]]
    assert form.expand(row, torch.zeros(1, 1), 4)[0].tolist() == [[[0, 2, 1, 3]]]


def test_r02_ties_that_rounding_makes_take_the_lower_id(form):
    logits = torch.rand(1, 1, 300)
    logits[..., 250] = 1e8  # all the others are -1e8 as log-probabilities
    tokens, scores = form.expand(logits, torch.zeros(1, 1), 6)
    assert tokens.tolist() == [[[250, 0, 1, 2, 3, 4]]]
    assert scores.tolist() == [[[0, *[-1e8] * 5]]]
    # neighbouring floats, far below the peak: the same log-probability
    row = torch.full((200,), -50.0)
    row[7], row[100], row[150] = 9.0, 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))
    assert form.expand(row[None, None], torch.zeros(1, 1), 2)[0].tolist() == [[[7, 100]]]
    row[101] = 1.0  # equal to the last chosen, where a neighbour above it is chosen
    assert form.expand(row[None, None], torch.zeros(1, 1), 3)[0].tolist() == [[[7, 100, 101]]]
    # the two best logits are neighbours in the row, and so is the one that comes before the second
    row = torch.full((3000,), -50.0)
    row[1030], row[1400], row[1500] = 9.0, 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))
    assert form.expand(row[None, None], torch.zeros(1, 1), 2)[0].tolist() == [[[1030, 1400]]]


@pytest.mark.parametrize("size", [5000, 5001])
def test_r02_ties_that_rounding_makes_early_in_a_long_row(level, size):
    row = torch.full((size,), -50.0)
    row[7], row[3], row[200] = 9.0, 1.0, torch.tensor(1.0).nextafter(torch.tensor(2.0))
    assert level.expand(row[None, None], torch.zeros(1, 1), 2)[0].tolist() == [[[7, 3]]]
    row[4000] = row[200]
    assert level.expand(row[None, None], torch.zeros(1, 1), 3)[0].tolist() == [[[7, 3, 200]]]


@pytest.mark.parametrize("peak", [100.0, 300.0, 1000.0, 60000.0])
@pytest.mark.parametrize("place", [0, 3000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_order_far_below_the_peak(level, dtype, peak, place):
    logits = torch.randn(1, 1, 5000).to(dtype)
    logits[..., place] = peak
    tokens, scores = level.expand(logits, torch.zeros(1, 1), 20)
    wanted = reference.expand(logits, torch.zeros(1, 1), 20)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(scores, wanted[1])


def test_r10_nan_and_infinity(form):
    row = torch.tensor([[[math.nan, math.inf, 0.0, BIGGEST, -math.inf]]])
    tokens, scores = form.expand(row, torch.zeros(1, 1), 5)
    assert tokens.tolist() == [[[1, 3, 0, 2, 4]]] or tokens.tolist() == [[[1, 3, 2, 0, 4]]]
    assert scores[0, 0, 0] == scores[0, 0, 1]
    assert not scores.isnan().any()
    dead = torch.tensor([math.nan, -math.inf, math.nan]).expand(1, 2, 3)
    tokens, scores = form.expand(dead, torch.zeros(1, 2), 3)
    assert tokens.tolist() == [[[0, 1, 2]] * 2]
    assert (scores == -math.inf).all()


def test_r10_a_bad_row_leaves_its_neighbours_alone(form):
    logits = torch.randn(1, 3, 500)
    alone = form.expand(logits[:, ::2], torch.zeros(1, 2), 10)
    logits[:, 1, ::3] = math.nan
    logits[:, 1, 1::3] = math.inf
    tokens, scores = form.expand(logits, torch.zeros(1, 3), 10)
    assert torch.equal(tokens[:, ::2], alone[0])
    assert torch.equal(scores[:, ::2], alone[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_r10_infinity_is_the_largest_float32_not_the_largest_of_its_own_type(form, dtype):
    largest = torch.finfo(dtype).max
    row = torch.tensor([[[largest, math.inf, -math.inf, largest, math.inf]]], dtype=dtype)
    tokens, scores = form.expand(row, torch.zeros(1, 1), 4)
    wanted = reference.expand(row, torch.zeros(1, 1), 4)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(scores, wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_r11_fewer_live_tokens_than_k(form, dtype):
    row = torch.tensor([[[0, -math.inf, -math.inf, 1]]], dtype=dtype)
    tokens, scores = form.expand(row, torch.zeros(1, 1), 4)
    assert tokens.tolist() == [[[3, 0, 1, 2]]]
    wanted = torch.tensor([[[-0.31326, -1.31326, -math.inf, -math.inf]]])
    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=0)


def test_r11_masked_vocabulary(form):
    row = torch.full((1, 1, 5000), -math.inf)
    row[..., [4999, 17, 2500]] = torch.tensor([1.0, 2.0, 1.0])
    tokens, _ = form.expand(row, torch.zeros(1, 1), 6)
    assert tokens.tolist() == [[[17, 2500, 4999, 0, 1, 2]]]


def test_r13_sizes_at_the_edge(form):
    tokens, scores = form.expand(torch.tensor([[[5.0]]]), torch.tensor([[-2.0]]), 1)
    assert (tokens.item(), scores.item()) == (0, -2.0)
    assert form.expand(torch.zeros(0, 3, 5), torch.zeros(0, 3), 2)[0].shape == (0, 3, 2)
    assert form.expand(torch.zeros(2, 0, 5), torch.zeros(2, 0), 2)[1].shape == (2, 0, 2)


@pytest.mark.parametrize("k", [0, 4])
def test_r13_k_outside_the_vocabulary_is_an_error(k):
    with pytest.raises(ValueError, match="k: wanted 1..V=3"):
        eagle2_kernels.expand(torch.zeros(1, 1, 3), torch.zeros(1, 1), k)


def test_r14_rows_beyond_32_bits(form):
    # 4 GiB of which only the pages that are written come into being
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 2048, dtype=torch.float16)
    logits = storage.as_strided((3, 1, 1000), (2**30, 1000, 1))
    logits.copy_(torch.randn(3, 1, 1000))
    tokens, _ = form.expand(logits, torch.zeros(3, 1), 5)
    assert torch.equal(tokens, form.expand(logits.clone(), torch.zeros(3, 1), 5)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., :5],
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, 2),
        lambda x: x[:1].expand(3, -1, -1),
        lambda x: x[..., 3:4].expand(-1, -1, 20),
    ],
)
def test_r16_any_strides(form, dtype, view):
    logits = view(torch.randn(3, 2, 6).to(dtype))
    leaf_scores = -torch.rand(logits.shape[1], logits.shape[0]).t()
    tokens, scores = form.expand(logits, leaf_scores, 3)
    wanted = reference.expand(logits.contiguous(), leaf_scores.contiguous(), 3)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(scores, wanted[1], rtol=1e-6, atol=1e-6)


def test_r18_draft_ids_become_target_ids(form):
    logits = torch.tensor([[[0.0, 1, 2]]])
    plain = form.expand(logits, torch.zeros(1, 1), 3)
    tokens, scores = form.expand(logits, torch.zeros(1, 1), 3, torch.tensor([1, 4, 9]))
    assert tokens.tolist() == [[[9, 4, 1]]]
    assert torch.equal(scores, plain[1])
    every_other = torch.tensor([1, 0, 4, 0, 9, 0])[::2]
    assert form.expand(logits, torch.zeros(1, 1), 3, every_other)[0].tolist() == [[[9, 4, 1]]]


def test_r30_scores_are_sums_of_logarithms(form):
    score = torch.zeros(1, 1)
    for _ in range(39):
        row = torch.tensor([[[0.05, 0.95]]]).log()
        tokens, scores = form.expand(row, score, 2)
        score = scores[tokens == 0][None]
    last = torch.tensor([[[0.06, 0.04, 0.9]]]).log()
    tokens, scores = form.expand(last, score, 3)
    assert tokens.tolist() == [[[2, 0, 1]]]
    assert scores[0, 0, 1:].tolist() == pytest.approx([-119.647, -120.052], abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_r31_scores_are_float32_whatever_the_logits(form, dtype):
    row = torch.zeros(1, 1, 2, dtype=dtype)
    row[..., 1] = -3.0  # log-probability -0.0486 of token 0
    _, scores = form.expand(row, torch.tensor([[-20.0]]), 1)
    assert scores.item() == pytest.approx(-20.0486, abs=1e-4)


def test_a_child_never_scores_above_its_parent(form):
    logits = torch.randn(2, 8, 700) * 5
    logits[0, 0] = -200
    logits[0, 0, 33] = 7  # all the mass on one token
    leaf_scores = -torch.rand(2, 8) * 30
    _, scores = form.expand(logits, leaf_scores, 20)
    assert (scores <= leaf_scores[..., None]).all()
    assert scores[0, 0, 0] == pytest.approx(leaf_scores[0, 0].item(), abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 16, 63, 64, 65, 129, 1000, 32000])
def test_every_instruction_set_agrees_with_the_reference(level, dtype, size):
    torch.manual_seed(size)
    logits = (torch.randn(2, 3, size) * 6).to(dtype)
    logits[1, 0, ::3] = math.nan
    logits[1, 1] = logits[1, 1].sort().values  # every logit beats all before it
    logits[1, 2] = logits[1, 2].sort(descending=True).values
    leaf_scores = -torch.rand(2, 3)
    for k in {1, min(10, size), min(70, size)}:
        tokens, scores = level.expand(logits, leaf_scores, k)
        wanted = reference.expand(logits, leaf_scores, k)
        assert torch.equal(tokens, wanted[0])
        torch.testing.assert_close(scores, wanted[1], rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "k"), [(1023, 2), (1024, 10), (1025, 64), (2100, 66), (4500, 3)])
def test_any_size_as_the_reference(form, dtype, size, k):
    torch.manual_seed(size)
    logits = (torch.randn(2, 1, size) * 4).to(dtype)
    logits[1, 0, ::3] = math.nan
    logits[0, 0, -5:] = 30.0  # a tie at the end, k and more of them in one place
    leaf_scores = -torch.rand(2, 1)
    tokens, scores = form.expand(logits, leaf_scores, k)
    wanted = reference.expand(logits, leaf_scores, k)
    assert torch.equal(tokens, wanted[0])
    torch.testing.assert_close(scores, wanted[1], rtol=1e-6, atol=3e-6)


def test_threads_do_not_change_the_result(fast_form):
    logits, leaf_scores = torch.randn(3, 5, 9000), torch.zeros(3, 5)
    threads = torch.get_num_threads()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(fast_form.expand(logits, leaf_scores, 10))
    torch.set_num_threads(threads)
    for tokens, scores in results[1:]:
        assert torch.equal(tokens, results[0][0])
        torch.testing.assert_close(scores, results[0][1], rtol=1e-6, atol=1e-6)
