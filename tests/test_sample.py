"""sample in every form: its law by enumeration and chi-square, its filters, its seeds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2_kernels import reference
from eagle2_kernels.reference.sample import score

INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    """The arguments of `sample` for logits [B, N, V]; a number stands for all rows."""
    batch, nodes, _ = logits.shape

    def each(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(batch).clone()

    return (
        logits,
        each(temperature, torch.float32),
        each(top_k, torch.int32),
        each(top_p, torch.float32),
        each(min_p, torch.float32),
        each(seed, torch.int64) + torch.arange(batch),
        torch.arange(nodes).repeat(batch, 1),
    )


def many_draws(form, logits, count=20000, **filters):
    rows = torch.tensor(logits).expand(count // 500, 500, -1)
    return form.sample(*law(rows, **filters)).flatten()


def check_law(tokens, probs):
    """Chi-square with a bound that a right law exceeds once in some 10^6 tests."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    wanted = torch.tensor(probs).double() * len(tokens)
    live = wanted > 0
    assert not counts[~live].any()
    statistic = ((counts - wanted)[live] ** 2 / wanted[live]).sum().item()
    freedom = int(live.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * max(freedom, 1)) + 20, (counts, wanted)


def brute_law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the filters in transformers' order, or one-hot at temperature 0."""
    if temperature <= 0:
        best = max(range(len(logits)), key=lambda i: (logits[i], -i))
        return [float(i == best) for i in range(len(logits))]
    x = [v / temperature for v in logits]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if top_k:
        last = x[order[min(top_k, len(x)) - 1]]
        x = [v if v >= last else -INF for v in x]
    weights = [math.exp(v - max(x)) for v in x]
    if top_p < 1:
        before, kept = 0.0, []
        for i in order:
            if not kept or before < top_p * sum(weights):
                kept.append(i)
            before += weights[i]
        weights = [w if i in kept else 0.0 for i, w in enumerate(weights)]
    weights = [w if w >= min_p * max(weights) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def test_r27_law_over_two_hundred_thousand_draws(fast_form):
    tokens = many_draws(fast_form, [math.log(p) for p in (0.5, 0.3, 0.2)], 200_000)
    check_law(tokens, [0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 100},
        {"top_p": 0.0},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"min_p": 0.25},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.2},
    ],
    ids=str,
)
def test_law_is_the_enumerated_one(fast_form, filters):
    logits = [0.3, -1.0, 2.0, 1.1, -INF, 1.1, 0.0]
    check_law(many_draws(fast_form, logits, **filters), brute_law(logits, **filters))


def test_r19_top_p_counts_what_top_k_left(fast_form):
    logits = [math.log(p) for p in (0.35, 0.25, 0.20, 0.05, 0.05, 0.05, 0.05)]
    tokens = many_draws(fast_form, logits, top_k=3, top_p=0.82)
    check_law(tokens, [0.4375, 0.3125, 0.25, 0, 0, 0, 0])
    # top_k=4 keeps all that tie with the fourth, as transformers does
    tied = many_draws(fast_form, logits, top_k=4, top_p=0.75)
    assert tied.unique().tolist() == [0, 1, 2]


def test_top_k_keeps_ties_and_top_p_settles_them_by_id(fast_form):
    logits = [2.0, 1.0, 1.0, 1.0, 0.0]
    assert many_draws(fast_form, logits, top_k=2).unique().tolist() == [0, 1, 2, 3]
    share = math.exp(1) + 1.5  # half of the second of three equal tokens
    total = math.exp(1) + 3 + math.exp(-1)
    assert many_draws(fast_form, logits, top_p=share / total).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_r29_temperature_zero_in_a_mixed_batch(fast_form, dtype):
    row = torch.tensor([2.0, 5.0, -INF, 1.0], dtype=dtype)
    logits = row.expand(2, 300, 4)
    tokens = fast_form.sample(*law(logits, temperature=[0.0, 1.0], top_p=[0.9, 1.0]))
    assert tokens[0].unique().tolist() == [1]
    assert tokens[1].unique().tolist() == [0, 1, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_r02_greedy_ties_take_the_lowest_id(form, dtype):
    logits = torch.zeros(1, 3, 9000, dtype=dtype)
    logits[0, 1, [8999, 777]] = 2.0
    logits[0, 2, [40, 41]] = INF
    assert form.sample(*law(logits, temperature=0.0)).tolist() == [[0, 777, 40]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_r10_bad_rows_give_minus_one_and_leave_others_alone(form, temperature):
    good = torch.arange(6.0).expand(1, 3, 6)
    alone = form.sample(*law(good, temperature=temperature))
    both = torch.cat((good, torch.full((1, 3, 6), NAN)))
    tokens = form.sample(*law(both, temperature=temperature))
    assert torch.equal(tokens[:1], alone)
    assert tokens[1].tolist() == [-1, -1, -1]
    odd = torch.tensor([[[1, NAN, 3, -INF], [INF, 0, 1, NAN], [-INF] * 4]])
    tokens = form.sample(*law(odd, temperature=temperature))
    assert tokens[0, 0] in ([2] if temperature == 0 else [0, 2])
    assert tokens[0, 1:].tolist() == [0, -1]


ODD = [[NAN, 2, 2, 1], [1, INF, INF, 3], [NAN] * 4, [-INF] * 4, [-INF, -INF, 5, NAN]]
ODD += [[0.0, -0.0, -0.0, 0.0], [-3e38, 3.4e38, -INF, 0], [1e-45, 0, -1e-45, 1e-45]]


@pytest.mark.parametrize(
    ("temperature", "filters"),
    [(0.0, {}), (1.0, {}), (1e-30, {}), (1.0, {"top_k": 2, "top_p": 0.7}), (1e-30, {"min_p": 0.5})],
)
def test_r10_odd_rows_as_the_reference(form, temperature, filters):
    arguments = law(torch.tensor([ODD]), temperature, **filters)
    assert torch.equal(form.sample(*arguments), reference.sample(*arguments))


def philox(seed, position, block):
    mask = 2**32 - 1
    key = [seed & mask, seed >> 32 & mask]
    c = [block, position & mask, position >> 32 & mask, 0]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ key[0], p1 & mask, p0 >> 32 ^ c[3] ^ key[1], p0 & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return c


def test_philox_known_answer():
    """A vector of the authors' own test file."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", [0, 2**40 + 5, -1, -(2**63)])
def test_a_flat_row_gives_the_smallest_word(form, seed):
    """The token is that of the least random integer: all forms and devices have the same ones."""
    *arguments, positions = law(torch.zeros(1, 2, 2501), seed=seed)
    positions += torch.tensor([[5, 2**40 + 7]])
    wanted = []
    for position in positions[0].tolist():
        words = [word for block in range(626) for word in philox(seed, position, block)][:2501]
        wanted.append(words.index(min(words)))
    assert form.sample(*arguments, positions)[0].tolist() == wanted


FILTERS = [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.0}]
FILTERS += [{"min_p": 0.05}, {"temperature": 3.0, "top_p": 0.95}]
FILTERS += [{"top_k": 50, "top_p": 0.8, "min_p": 0.02}]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize(("vocab", "dtype"), [(65, torch.float16), (1100, torch.bfloat16)])
def test_draws_as_the_reference(form, filters, vocab, dtype):
    torch.manual_seed(vocab)
    arguments = law((torch.randn(1, 2, vocab) * 4).to(dtype), **filters)
    assert torch.equal(form.sample(*arguments), reference.sample(*arguments))


def test_r13_sizes_at_the_edge(form):
    assert form.sample(*law(torch.zeros(0, 3, 5))).shape == (0, 3)
    assert form.sample(*law(torch.zeros(2, 0, 5))).shape == (2, 0)
    assert form.sample(*law(torch.zeros(1, 1, 1), top_k=1, top_p=0.5, min_p=0.5)).item() == 0


def test_filters_differ_from_row_to_row(form):
    arguments = law(
        (torch.randn(6, 1, 2100) * 3).round(),
        temperature=[1.0, 0.0, 0.7, 1.0, 2.0, 1.0],
        top_k=[0, 3, 40, 0, 0, 2000],
        top_p=[1.0, 0.5, 1.0, 0.6, 1.0, 0.9],
        min_p=[0.0, 0.5, 0.0, 0.0, 0.1, 0.0],
    )
    assert torch.equal(form.sample(*arguments), reference.sample(*arguments))


@pytest.mark.parametrize("share", [2, 128])
def test_top_p_keeps_the_first_ids_of_a_flat_row(form, share):
    tokens = form.sample(*law(torch.zeros(1, 3, 4096), top_p=1 / share))
    assert (tokens < 4096 // share).all()
    tokens = form.sample(*law(torch.zeros(1, 8, share), top_p=1 / share))
    assert not tokens.any()


def test_top_p_of_a_row_without_a_head(form):
    logits = torch.tensor([0.0, -1.0]).repeat(1, 6, 1000)
    arguments = law(logits, top_p=0.99)
    tokens = form.sample(*arguments)
    assert torch.equal(tokens, reference.sample(*arguments))
    assert 0 < (tokens % 2).sum() < 6


@pytest.mark.parametrize("filters", [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_draws_differ_from_the_reference_only_at_near_ties(fast_form, filters):
    torch.manual_seed(1)
    arguments = law(torch.randn(10, 100, 1001) * 3, temperature=0.8, **filters)
    tokens, scores = fast_form.sample(*arguments), score(*arguments)
    gap = scores.amax(-1) - scores.gather(-1, tokens[..., None])[..., 0]
    assert (gap < 1e-5).all()
    assert (gap == 0).float().mean() > 0.999


def test_r48_seeds(form):
    logits = torch.randn(4, 5, 300)
    first = form.sample(*law(logits, seed=42))
    assert torch.equal(form.sample(*law(logits, seed=42)), first)
    alone = [x[:1] for x in law(logits, seed=42)]
    assert torch.equal(form.sample(*alone), first[:1])
    arguments = [*law(logits, seed=42)]
    arguments[5] = arguments[5] + torch.tensor([0, 9, 0, 0])
    others = form.sample(*arguments)
    assert torch.equal(others[[0, 2, 3]], first[[0, 2, 3]])
    assert not torch.equal(others[1], first[1])


def test_r48_a_token_depends_on_its_position_not_on_its_place(form):
    logits = torch.randn(1, 1, 300).expand(1, 20, 300)
    arguments = [*law(logits)]
    first = form.sample(*arguments)
    shuffle = torch.randperm(20)
    arguments[6] = arguments[6][:, shuffle]
    assert torch.equal(form.sample(*arguments), first[:, shuffle])


def test_r48_draws_at_two_positions_are_independent(fast_form):
    tokens = many_draws(fast_form, [0.0, 0.0], 200_000).view(-1, 2).float()
    assert abs(torch.corrcoef(tokens.t())[0, 1].item()) < 0.015
    other = many_draws(fast_form, [0.0, 0.0], 200_000, seed=10_000).view(-1, 2).float()
    assert abs(torch.corrcoef(torch.stack((tokens[:, 0], other[:, 0])))[0, 1].item()) < 0.015


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., :4],
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, 2),
        lambda x: x[:1].expand(3, -1, -1),
    ],
)
def test_r16_any_strides(form, dtype, view):
    logits = view(torch.randn(2, 3, 5).to(dtype))
    top_p = torch.tensor([0.95, 1, 1]).repeat(2)[: logits.shape[0]]
    packed, *others = law(logits.contiguous(), temperature=0.7, top_p=top_p)
    wanted = reference.sample(packed, *others)
    strided = [torch.stack((x, x + 1), -1)[..., 0] for x in others]
    assert torch.equal(form.sample(logits, *strided), wanted)


def test_r14_rows_beyond_32_bits(form):
    # 4 GiB of which only the pages that are written come into being
    torch.utils.deterministic.fill_uninitialized_memory = False
    storage = torch.empty(2**31 + 2048, dtype=torch.float16)
    logits = storage.as_strided((3, 1, 1000), (2**30, 1000, 1))
    logits.copy_(torch.randn(3, 1, 1000))
    assert torch.equal(form.sample(*law(logits)), form.sample(*law(logits.clone())))


def test_a_long_row(form):
    """Long enough for two tiles of 1024 in each split of the Triton form."""
    logits = torch.full((2, 1, 270_000), -INF)
    logits[0, 0, :1024], logits[0, 0, 1024:2048] = 0.0, 3.0
    logits[1, 0, :512], logits[1, 0, 4096:4608], logits[1, 0, 1500] = 0.0, 0.0, 2.0
    arguments = law(logits, top_p=[1.0, 0.5], seed=1)  # the largest noise is not at the peak
    tokens = form.sample(*arguments)
    assert torch.equal(tokens, reference.sample(*arguments))
    assert tokens[1] < 4096  # half the mass: the peak and 508 others


def test_unlikely_tokens_are_drawn_as_often_as_they_should(fast_form):
    """A tail of 5,000 tokens that share 1 % of the mass."""
    logits = torch.full((5_001,), math.log(0.01 / 5_000))
    logits[0] = math.log(0.99)
    tokens = fast_form.sample(*law(logits.expand(2, 500, -1)))
    share = (tokens > 0).float().mean().item()
    assert abs(share - 0.01) < 5 * math.sqrt(0.01 * 0.99 / 1000)


@settings(max_examples=150)
@given(st.data())
def test_every_draw_lies_in_the_enumerated_support(fast_form, data):
    value = st.sampled_from([0.0, -0.0, 1.0, 1.0, 2.5, -3.0, 40.0, -40.0, -INF])
    logits = data.draw(st.lists(value, min_size=1, max_size=70))
    filters = {
        "temperature": data.draw(st.sampled_from([0.0, 0.37, 1.0, 2.9])),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 7, 500])),
        "top_p": data.draw(st.sampled_from([1.0, 0.013, 0.71, 0.993])),
        "min_p": data.draw(st.sampled_from([0.0, 0.0123, 0.617])),
    }
    drawn = set(many_draws(fast_form, logits, 500, **filters).tolist())
    if max(logits) == -INF:
        assert drawn == {-1}
        return
    probs = brute_law(logits, **filters)
    assert all(probs[token] > 0 for token in drawn)
