"""Cycles of one size, as a CUDA graph replays them, run here step by step."""

import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from eagle2.cycle import Cycle, State, StaticCycle
from eagle2.requests import Requests, Sampling
from eagle2.target import Target, prefill
from test_decode import TREES
from tiny import PROMPTS, make_eagle3_pair, make_pair
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle2_kernels

LENGTHS = {"max_new_tokens": 40}


@pytest.fixture(scope="module", params=[make_pair, make_eagle3_pair])
def pair(request):
    return request.param(context=3.0)


@pytest.fixture
def static(monkeypatch):
    """Let `generate` use cycles of one size; the cycles of each call, in a list."""
    made = []

    def make_cycle(*arguments):
        cycle = StaticCycle(*arguments, capture=lambda step: warmed_up(cycle))
        made.append(cycle)
        return cycle

    monkeypatch.setattr("eagle2.decode.make_cycle", make_cycle)
    return made


def warmed_up(cycle):
    """What a capture does first: two steps on no nodes, which must leave everything as it is."""
    kept = [*cycle.state, *cycle.cache, *cycle.drafter.cache]
    before = [buffer.clone() for buffer in kept]
    for _ in range(2):
        cycle.step()
    assert all(map(torch.equal, kept, before))
    return cycle.step


@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_the_same(pair, static, tree):
    wanted = baseline.generate(pair[0], PROMPTS, **LENGTHS)
    result = generate(*pair, PROMPTS, tree=TreeConfig(*tree), **LENGTHS)
    assert result.tokens == wanted.tokens
    assert len(static) == 1


def test_statistics_are_those_of_cycles_that_follow_the_rows(pair, static, monkeypatch):
    settings = {"tree": TreeConfig(4, 3, 10), **LENGTHS}
    found = generate(*pair, PROMPTS[:1], **settings).statistics
    monkeypatch.undo()
    wanted = generate(*pair, PROMPTS[:1], **settings).statistics
    assert found.tau == wanted.tau > 1.2


def test_sampled_text_is_the_same(pair, static):
    settings = {"temperature": [0.0, 1.0, 1.3], "seed": [1, 2, 3], "top_p": 0.9, **LENGTHS}
    wanted = baseline.generate(pair[0], PROMPTS, **settings)
    assert generate(*pair, PROMPTS, tree=TreeConfig(4, 3, 12), **settings).tokens == wanted.tokens


@pytest.mark.parametrize("limit", [24, 25, 31])
def test_r04_up_to_the_context_limit(static, limit):
    pair = make_pair(context=3.0, max_position_embeddings=limit)
    wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=100)
    result = generate(*pair, PROMPTS, max_new_tokens=100, tree=TreeConfig(4, 3, 10))
    assert result.tokens == wanted.tokens
    assert static[0].cache.k.shape[2] == limit + 1


def test_r33_rows_that_end_early_keep_their_caches(pair, static):
    wanted = baseline.generate(pair[0], PROMPTS, **LENGTHS)
    ends = [wanted.tokens[0][5], wanted.tokens[2][9]]
    wanted = baseline.generate(pair[0], PROMPTS, eos_token_id=ends, **LENGTHS)
    assert len({len(tokens) for tokens in wanted.tokens}) > 1
    first = min(range(3), key=lambda row: len(wanted.tokens[row]))
    rows = []

    def keep(tree, path):
        if tree.num_nodes[first] == 0:
            rows.append([cache[:, first].clone() for cache in static[0].cache])

    result = generate(*pair, PROMPTS, eos_token_id=ends, on_cycle=keep, **LENGTHS)
    assert result.tokens == wanted.tokens
    assert len(rows) > 1
    for later in rows[1:]:
        assert all(map(torch.equal, rows[0], later))


def start(pair, kind, **options):
    """A cycle after the prefill, and its state."""
    target, config = Target(pair[0], eagle2_kernels), TreeConfig(4, 3, 12)
    requests = Requests(PROMPTS, 20, [], target.context_limit)
    capacity, sampling = requests.capacity(12), Sampling.of(3, [0.0, 1.0, 1.0], top_p=0.9)
    with torch.inference_mode():
        cycle = kind(target, pair[1], config, sampling, 3, capacity, **options)
        begun = prefill(target, requests, sampling, cycle.cache, cycle.drafter.feature_layers)
        hidden = cycle.drafter.prefill(begun.shifted, begun.features, begun.prefix_len)
    return cycle, State(begun.first, hidden, begun.prefix_len), begun.prefix


def test_r34_a_step_reads_nothing_back(pair):
    cycle, cycle.state, _ = start(pair, StaticCycle, capture=None)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        cycle.step()


def test_cycles_that_stop_early_do_read_back(pair):
    cycle, state, prefix = start(pair, Cycle)
    with (
        torch.inference_mode(),
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="tolist|_local_scalar_dense"),
    ):
        cycle.run(state, [12] * 3, 3, max(prefix), lambda stage: None)
