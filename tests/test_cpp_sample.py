"""sample and accept in C++: against Philox and Gumbel-max in plain Python, then the reference."""

import math

import numpy as np
import pytest
import torch

from eagle2_kernels import Tree, reference

cpu = pytest.importorskip("eagle2_kernels.cpu", exc_type=ImportError)

INF, NAN = math.inf, math.nan
FILTERS = [{}, {"top_k": 1}, {"top_k": 5}, {"top_p": 0.9}, {"top_p": 0.0}, {"min_p": 0.05}]
FILTERS += [{"temperature": 3.0, "top_p": 0.95}, {"top_k": 50, "top_p": 0.8, "min_p": 0.02}]


@pytest.fixture(params=range(cpu._C.cpu_level() + 1))
def _level(request):
    cpu._C.cap_level(request.param)
    yield
    cpu._C.cap_level(cpu._C.cpu_level())


def law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=3):
    """The arguments of `sample`: rows b with seeds seed + b, positions beyond 32 bits."""
    rows, columns, _ = logits.shape
    return (
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.arange(rows) + seed,
        torch.arange(rows * columns).view(rows, columns) + 2**33,
    )


def philox(seed, position, block):
    mask = 2**32 - 1
    key = [seed & mask, seed >> 32 & mask]
    c = [block, position & mask, position >> 32 & mask, 0]
    for _ in range(10):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [p1 >> 32 ^ c[1] ^ key[0], p1 & mask, p0 >> 32 ^ c[3] ^ key[1], p0 & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return c


def brute_draw(logits, seed, position):
    scores = []
    for token, logit in enumerate(logits):
        u = (philox(seed, position, token // 4)[token % 4] + 0.5) / 2**32
        scores.append(logit - math.log(-math.log1p(-min(u, 1 - 2**-24))))
    return max(range(len(scores)), key=lambda token: scores[token])


def test_philox_known_answers():
    """The vectors of the authors' own test file."""
    assert philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 5, -1, -(2**63)])
def test_draws_as_plain_python(seed):
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 2, (1, 8, 150))).float()
    arguments = law(logits, seed=seed)
    wanted = [
        brute_draw(row.tolist(), seed, position)
        for row, position in zip(logits[0], arguments[-1][0].tolist(), strict=True)
    ]
    assert cpu.sample(*arguments)[0].tolist() == wanted


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_draws_as_the_reference(filters, dtype):
    rng = np.random.default_rng(7)
    for vocab in (1, 3, 64, 65, 1000, 5003):
        logits = torch.from_numpy(rng.normal(0, 4, (3, 5, vocab))).to(dtype)
        arguments = law(logits, **filters)
        assert torch.equal(cpu.sample(*arguments), reference.sample(*arguments)), vocab


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("temperature", [0.0, -1.0, 1.0, 1e-30])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.5}], ids=str)
def test_r10_ties_and_broken_logits(temperature, filters):
    odd = [[NAN, 2, 2, 1], [1, INF, INF, 3], [NAN] * 4, [-INF] * 4, [-INF, -INF, 5, NAN]]
    odd += [[0.0, -0.0, -0.0, 0.0], [-3e38, 3.4e38, -INF, 0], [1e-45, 0, -1e-45, 1e-45]]
    logits = torch.tensor([odd, odd]).repeat(1, 1, 20)
    arguments = law(logits, temperature=temperature, **filters)
    tokens = cpu.sample(*arguments)
    assert torch.equal(tokens, reference.sample(*arguments))
    assert tokens[:, 2:4].eq(-1).all()
    if temperature <= 0:
        assert tokens[0].tolist() == [1, 1, -1, -1, 2, 0, 1, 0]


def test_top_k_keeps_what_ties_with_the_last():
    logits = torch.tensor([4.0, 3, 3, 3, 1]).expand(1, 400, 5)
    drawn = cpu.sample(*law(logits, temperature=5.0, top_k=2))
    assert drawn.unique().tolist() == [0, 1, 2, 3]


def test_any_strides_and_an_empty_batch():
    base = torch.randn(130, 6, 4)
    logits = base.permute(2, 1, 0)
    assert torch.equal(cpu.sample(*law(logits)), cpu.sample(*law(logits.contiguous())))
    halves = base.bfloat16().permute(2, 1, 0)[:, ::2]
    assert torch.equal(cpu.sample(*law(halves)), cpu.sample(*law(halves.contiguous())))
    assert cpu.sample(*law(logits[:0])).shape == (0, 6)


def random_trees(rng, rows, columns, vocab):
    parents = rng.integers(-1, np.maximum(np.arange(columns), 1), (rows, columns))
    unused = torch.zeros(0)
    tokens = torch.from_numpy(rng.integers(0, vocab, (rows, columns)))
    num_nodes = torch.from_numpy(rng.integers(0, columns + 1, rows)).int()
    return Tree(tokens, torch.from_numpy(parents).int(), unused, unused, unused, num_nodes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("threads", [1, 2])
def test_accept_is_sample_then_verify(temperature, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rng = np.random.default_rng(11)
    tree = random_trees(rng, 300, 20, 3)
    arguments = law(torch.from_numpy(rng.normal(0, 1, (300, 20, 3))).float(), temperature)
    wanted = reference.accept(tree, *arguments, 6)
    for got, value in zip(cpu.accept(tree, *arguments, 6), wanted, strict=True):
        assert torch.equal(got, value)
    assert wanted[1].max() >= 3


def test_a_row_draws_the_same_alone():
    arguments = law(torch.randn(5, 7, 300))
    whole = cpu.sample(*arguments)
    for row in range(5):
        alone = [field[row : row + 1] for field in arguments]
        assert torch.equal(cpu.sample(*alone), whole[row : row + 1])
