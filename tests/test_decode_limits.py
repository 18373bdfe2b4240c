"""Where a text ends, what is written on the way there, and what is counted."""

import pytest
import torch
from eagle2 import Statistics, TreeConfig, baseline, generate
from eagle2.cache import KVCache
from eagle2.decode import commit, decode
from eagle2.requests import Requests, Sampling
from eagle2.target import Target
from tiny import PROMPTS, make_pair

GUARD = 8
TREES = [TreeConfig(1, 4, 5), TreeConfig(2, 3, 8), TreeConfig()]


@pytest.fixture(scope="module")
def pair():
    return make_pair(context=1.0)


@pytest.fixture
def caches(monkeypatch):
    """Every cache allocated from now on, the draft's first, with sentinel rows beyond its end."""
    allocated, plain = [], KVCache.allocate

    def allocate(layers, batch, capacity, *rest):
        cache = plain(layers, batch, capacity + GUARD, *rest)
        for half in cache:
            half[:, :, capacity:] = 777
        allocated.append(cache)
        return cache

    monkeypatch.setattr(KVCache, "allocate", allocate)
    return allocated


def guarded(caches):
    # the very last slot is spare
    return all((half[:, :, -GUARD - 1 : -1] == 777).all() for cache in caches for half in cache)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("limit", [11, 12, 16, 23])
def test_r04_context_limit(caches, tree, limit):
    pair = make_pair(context=1.0, max_position_embeddings=limit)
    prompts = [[*range(3, 13)], [4, 5, 6]]
    wanted = baseline.generate(pair[0], prompts, max_new_tokens=50)
    result = generate(*pair, prompts, max_new_tokens=50, tree=tree)
    assert result.tokens == wanted.tokens
    assert [len(p) + len(t) for p, t in zip(prompts, result.tokens, strict=True)] == [limit] * 2
    assert result.finish_reasons == ["length"] * 2
    assert len(caches) == 3
    assert guarded(caches)


def test_r04_prompt_that_fills_the_context_is_refused_before_any_pass(monkeypatch):
    pair = make_pair(max_position_embeddings=16)
    monkeypatch.setattr(Target, "_forward", None)
    for decoder, models in ((baseline.generate, pair[:1]), (generate, pair)):
        for prompt in ([3] * 16, [3] * 17, []):
            with pytest.raises(ValueError, match=r"wanted 1\.\.15 tokens .* in row 1"):
                decoder(*models, [[3], prompt], max_new_tokens=5)


@pytest.mark.parametrize("tree", TREES)
def test_max_new_tokens_is_exact(pair, tree):
    longest = baseline.generate(pair[0], PROMPTS, max_new_tokens=14).tokens
    for most in range(1, 15):
        result = generate(*pair, PROMPTS, max_new_tokens=most, tree=tree)
        assert result.tokens == [tokens[:most] for tokens in longest]
        assert result.finish_reasons == ["length"] * 3
        assert result.statistics.new_tokens == 3 * most


@pytest.mark.parametrize("tree", TREES)
def test_eos_one_several_and_inside_a_path(pair, tree):
    text = baseline.generate(pair[0], PROMPTS[:1], max_new_tokens=30).tokens[0]
    inside = 0
    for eos in [*set(text), [text[3], text[9]], [text[20], 60], torch.tensor([text[5], text[7]])]:
        ids = {eos} if isinstance(eos, int) else {int(token) for token in eos}
        end = next(i for i, token in enumerate(text) if token in ids) + 1
        committed = []
        result = generate(
            *pair,
            PROMPTS[:1],
            max_new_tokens=30,
            eos_token_id=eos,
            tree=tree,
            on_cycle=lambda tree, path, committed=committed: committed.append((path > 0).sum()),
        )
        assert result.tokens == [text[:end]]
        assert result.finish_reasons == ["eos"]
        inside += 1 + sum(int(n) + 1 for n in committed) > end
    assert inside


def test_eos_of_the_generation_config(pair):
    text = baseline.generate(pair[0], PROMPTS[:1], max_new_tokens=30).tokens[0]
    pair[0].generation_config.eos_token_id = [text[4], 60]
    try:
        result = generate(*pair, PROMPTS[:1], max_new_tokens=30)
        every = generate(*pair, PROMPTS[:1], max_new_tokens=30, eos_token_id=[])
    finally:
        pair[0].generation_config.eos_token_id = None
    assert result.tokens == [text[: text.index(text[4]) + 1]]
    assert every.tokens == [text]


def test_r24_rows_with_limits_of_their_own(pair, caches):
    """Row 0 ends early, row 2 has one token left after its prompt: no draft."""
    target, limits, config = Target(pair[0]), [3, 30, 2], TreeConfig(4, 4, 20)
    wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=30).tokens
    del caches[:]
    requests = Requests(PROMPTS, 30, [], target.context_limit)
    requests.limits = limits
    before, ended, accepted = {}, 0, []

    def watch(tree, path):
        nonlocal ended
        accepted.append((path > 0).sum(1).tolist())
        for row, size in enumerate(tree.num_nodes.tolist()):
            now = [half[:, row, :-1].clone() for cache in caches for half in cache]
            if size == 0 and row in before:
                ended += 1
                assert path[row].tolist() == [-1] * path.shape[1]
                for old, new in zip(before[row], now, strict=True):
                    assert torch.equal(old, new)
            before[row] = now

    result = decode(target, pair[1], requests, Sampling.of(3), config, watch)
    assert result.tokens == [tokens[:n] for tokens, n in zip(wanted, limits, strict=True)]
    assert ended > 4
    assert max(row[1] for row in accepted) == 4
    assert all(row[2] == 0 for row in accepted)
    assert guarded(caches)


def test_r24_all_rows_ended_returns_at_once(pair):
    cycles = []
    result = generate(
        *pair, PROMPTS, max_new_tokens=1, on_cycle=lambda tree, path: cycles.append(tree)
    )
    assert cycles == []
    assert [len(tokens) for tokens in result.tokens] == [1, 1, 1]
    assert result.statistics.cycles == 0
    assert result.statistics.tau == 0


@pytest.mark.parametrize("decoder", ["plain", "trees"])
def test_streamed_chunks_make_up_the_answers(pair, decoder):
    chunks = [[], [], []]
    settings = {"max_new_tokens": 20, "on_commit": lambda row, ids: chunks[row].append(ids)}
    if decoder == "plain":
        result = baseline.generate(pair[0], PROMPTS, **settings)
        assert all(len(ids) == 1 for row in chunks for ids in row)
    else:
        result = generate(*pair, PROMPTS, **settings)
        assert max(len(ids) for row in chunks for ids in row) > 2
    assert [sum(row, []) for row in chunks] == result.tokens
    assert all(ids for row in chunks for ids in row)


def test_r47_counting():
    """Cycles that accept 2, 0 and 4 drafts; then the same with room for eight tokens."""
    for room, counted in ((9, 9), (8, 8)):
        requests, statistics = Requests([[1]], room, [], 100), Statistics()
        for tokens, accepted in (([5, 6, 7], 2), ([8], 0), ([9, 10, 11, 12, 13], 4)):
            commit(requests, statistics, [tokens + [-1] * (5 - len(tokens))], [accepted], [8])
        result = requests.generation(statistics)
        assert result.tokens == [[5, 6, 7, 8, 9, 10, 11, 12, 13][:counted]]
        assert (statistics.new_tokens, statistics.cycle_tokens) == (counted, counted)
        assert statistics.cycles == 3
        assert statistics.accept_histogram == [1, 0, 1, 0, 1]
        assert statistics.tau == counted / 3


def test_r47_statistics_of_a_run(pair):
    lengths, paths = [], []
    result = generate(
        *pair,
        PROMPTS[:1],
        max_new_tokens=33,
        on_commit=lambda row, ids: lengths.append(len(ids)),
        on_cycle=lambda tree, path: paths.append(int((path > 0).sum())),
    )
    statistics = result.statistics
    assert statistics.new_tokens == len(result.tokens[0]) == sum(lengths) == 33
    assert statistics.cycles == len(lengths) - 1 == len(paths)
    assert statistics.tau == sum(lengths[1:]) / len(paths)
    assert sum(statistics.accept_histogram) == statistics.cycles
    assert sum(n * count for n, count in enumerate(statistics.accept_histogram)) == sum(paths)
    assert {"prefill", "draft", "tree", "target", "verify", "commit"} == {*statistics.stage_seconds}
    assert statistics.seconds > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": [0.0, 1.0]}, "temperature: wanted one value or 3, got 2"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1.0}, "min_p"),
        ({"tree": TreeConfig(62, 2, 9)}, "top_k: wanted at most the head's 61 draft ids, got 62"),
    ],
)
def test_r13_r29_arguments_out_of_range_are_refused_before_any_pass(
    pair, monkeypatch, changes, message
):
    monkeypatch.setattr(Target, "_forward", None)
    with pytest.raises(ValueError, match=message):
        generate(*pair, PROMPTS, **changes)
    if "tree" not in changes:
        with pytest.raises(ValueError, match=message):
            baseline.generate(pair[0], PROMPTS, **changes)


@pytest.mark.parametrize("field", ["top_k", "depth", "num_nodes"])
def test_r13_empty_trees_are_refused(field):
    with pytest.raises(ValueError, match=f"{field}: wanted 1 or more, got 0"):
        TreeConfig(**{field: 0})


def test_r13_smallest_vocabulary():
    target, head = make_pair(vocab_size=1, pad_token_id=None)
    result = generate(target, head, [[0], [0, 0]], max_new_tokens=5, tree=TreeConfig(1, 3, 9))
    assert result.tokens == [[0] * 5] * 2
