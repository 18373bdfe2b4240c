"""The loop under any draft: random trees for a target whose text is a function of its cache.

The caches hold tokens and positions, and the target says what a hash of the text that it finds
there says: a row that was lost, misplaced, or left behind changes the answer. Hypothesis draws a
tree for every row of every cycle.
"""

import contextlib
import zlib

import numpy as np
import pytest
import torch
from eagle2 import TreeConfig, baseline, decode
from eagle2.cache import KVCache
from eagle2.cycle import Cycle, StaticCycle
from eagle2.growth import StaticGrowth
from eagle2.requests import Requests, Sampling
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import eagle2_kernels
from eagle2_kernels import Candidates

VOCAB, GUARD, SENTINEL = 5, 3, 777.0


def cache_of(batch, capacity):
    """One row holds a pair of numbers; those before the last, the spare one, belong to no one."""
    cache = KVCache.allocate(1, batch, capacity + GUARD, 1, 2, torch.float32, torch.device("cpu"))
    for half in cache:
        half[:, :, capacity:-1] = SENTINEL
    return cache


def pairs(*columns):
    """Cache rows [B, T, 1, 2] of two columns [B, T]."""
    return torch.stack(columns, -1).float()[:, :, None]


class ScriptedTarget:
    """As `Target`; its hidden states are token, position and logits."""

    device, group = torch.device("cpu"), None

    def __init__(self, seed, bad, ops):
        self.seed, self.bad, self.ops = seed, bad, ops

    def new_cache(self, batch, capacity):
        return cache_of(batch, capacity)

    def opinion(self, text):
        """Logits after a text; of some texts, if there are bad ones, NaN."""
        number = zlib.crc32(bytes(text), self.seed)
        if self.bad and number % 64 == 0:
            return torch.full((VOCAB,), torch.nan)
        return torch.from_numpy(np.random.default_rng(number).normal(0, 2, VOCAB)).float()

    def prefill(self, tokens, cache):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        slots = cache.first_slots(len(places[0]))
        cache.write(0, pairs(tokens, places), pairs(places, tokens), slots.index)
        texts = [[row[: i + 1] for i in range(len(row))] for row in tokens.tolist()]
        return self.hidden(tokens, places, texts)

    def tree_pass(self, tree, prefix_len, longest, cache):
        width = tree.tokens.shape[1]
        places = prefix_len[:, None] + tree.depths.long()
        slots = cache.slots(prefix_len, tree.num_nodes, width)
        tokens = tree.tokens.clamp(min=0)
        cache.write(0, pairs(tokens, places), pairs(places, tokens), slots.index)
        texts = [
            [self.text_at(cache, tree, row, node, int(length)) for node in range(width)]
            for row, length in enumerate(prefix_len)
        ]
        return self.hidden(tokens, places, texts)

    def text_at(self, cache, tree, row, node, length):
        """The text that a node sees: the prefix, then the slots of its ancestors."""
        words = [int(word) % 2**64 for word in tree.ancestors[row, node]]
        tail = [i for i in range(tree.tokens.shape[1]) if words[i // 64] >> i % 64 & 1]
        if not tail:
            return []
        rows = cache.k[0, row, [*range(length), *(length + i for i in tail)], 0]
        assert rows[:, 1].tolist() == [*range(len(rows))]
        assert torch.equal(
            rows.flip(1), cache.v[0, row, [*range(length), *(length + i for i in tail)], 0]
        )
        return rows[:, 0].int().tolist()

    def hidden(self, tokens, places, texts):
        laws = torch.stack([torch.stack([self.opinion(text) for text in row]) for row in texts])
        return torch.cat((tokens[..., None].float(), places[..., None].float(), laws), -1)

    def logits(self, hidden):
        return hidden[..., 2:]

    @contextlib.contextmanager
    def inputs_of(self, layers):
        yield []


class ScriptedDrafter:
    """As `Drafter`: its cache pairs each token with the feature before it; its trees are drawn."""

    feature_layers = ()

    def __init__(self, play, batch, capacity):
        self.play, self.cache = play, cache_of(batch, capacity)
        self.growth = StaticGrowth([(0,)], batch, torch.device("cpu"))

    def prefill(self, tokens, features, count):
        self.write(tokens, features, self.cache.first_slots(tokens.shape[1]))
        return features[:, :1]

    def extend(self, tokens, features, start, count, longest):
        self.write(tokens, features, self.cache.slots(start, count, tokens.shape[1]))
        return features[:, :1]

    def write(self, tokens, features, slots):
        before, places = features[..., 0], features[..., 1]
        self.cache.write(0, pairs(before, places), pairs(tokens, tokens), slots.index)

    def draft(self, hidden, prefix_len, longest, num_nodes, depth, lap):
        rows = [self.play.forest(row, depth) for row in range(len(hidden))]
        columns = max(map(len, rows))
        rows = [row + [(0, -torch.inf, -1)] * (columns - len(row)) for row in rows]
        kinds = (torch.int64, torch.float32, torch.int32)
        return Candidates(*(
            torch.tensor([[entry[field] for entry in row] for row in rows], dtype=kind)
            .reshape(len(rows), columns) for field, kind in enumerate(kinds)
        ))  # fmt: skip


class Play:
    """One run of the loop: what is drawn for it, and what must hold before every cycle."""

    def __init__(self, data, requests, plain):
        self.data, self.requests, self.plain = data, requests, plain
        self.random = data.draw(st.randoms(use_true_random=True))
        self.skill = self.random.choice([0.0, 0.5, 0.9, 1.0, 1.0])
        self.ended, self.cycles = {}, 0

    def forest(self, row, depth):
        """(token, score, parent) of each candidate; with luck some say what the target will."""
        depths, said = [], len(self.requests.answers[row])
        entries = []
        for index in range(self.random.choice([0, 1, 6, 12]) if depth else 0):
            above = index - 1 if self.random.random() < 0.6 else self.random.randint(-1, index - 1)
            level = 1 if above < 0 else depths[above] + 1
            if level > depth:
                above, level = -1, 1
            depths.append(level)
            rest = self.plain[row][said + level - 1 :]
            knows = rest and self.random.random() < self.skill
            token = rest[0] if knows else self.random.randrange(VOCAB)
            score = self.random.choice([-0.0, -0.0, -1.0, -1.0, -2.5, -1e30, -torch.inf])
            entries.append((token, min(score, 0 if above < 0 else entries[above][1]), above))
        return entries

    def check(self, cycle, state, sizes):
        """The caches are those of a fresh prefill; ended rows and guards are as they were."""
        self.cycles += 1
        for row, size in enumerate(sizes):
            caches = [half[0, row, : -GUARD - 1, 0] for pair in (cycle.cache, cycle.drafter.cache)
                      for half in pair]  # fmt: skip
            if size == 0:
                kept = self.ended.setdefault(row, [half.clone() for half in caches])
                assert all(map(torch.equal, caches, kept))
                continue
            text = self.requests.prompts[row] + self.requests.answers[row]
            length = len(text) - 1
            assert int(state.prefix_len[row]) == length
            assert int(state.root_tokens[row]) == text[-1]
            assert length + size <= len(caches[0])
            places = torch.arange(length)
            before, after = torch.tensor(text[:-1]), torch.tensor(text[1:])
            fresh = ((before, places), (places, before), (before, places), (after, after))
            for half, columns in zip(caches, fresh, strict=True):
                assert torch.equal(half[:length], torch.stack(columns, 1).float())
        for pair in (cycle.cache, cycle.drafter.cache):
            assert all((half[:, :, -GUARD - 1 : -1] == SENTINEL).all() for half in pair)


class Scripted:
    """What makes a cycle a scripted one."""

    def __init__(self, target, play, config, sampling, batch, capacity):
        self.target, self.ops, self.sampling = target, target.ops, sampling
        self.play, self.config, self.capacity = play, config, capacity
        self.drafter = ScriptedDrafter(play, batch, capacity)
        self.cache = target.new_cache(batch, capacity)

    def run(self, state, sizes, *rest):
        self.play.check(self, state, sizes)
        return super().run(state, sizes, *rest)


class ScriptedCycle(Scripted, Cycle):
    pass


class ScriptedStaticCycle(Scripted, StaticCycle):
    def __init__(self, target, play, config, sampling, batch, capacity):
        super().__init__(target, play, config, sampling, batch, capacity)
        self.capture, self.replay = (lambda step: step), None
        self.wanted = torch.zeros(batch, dtype=torch.int32)
        self.num_nodes = torch.zeros(batch, dtype=torch.int32)
        self.report = torch.zeros(batch, config.depth + 2, dtype=torch.int64)
        self.host_report = self.report.clone()


def check_any_draft(kind, data):
    draw = data.draw
    token = st.integers(0, VOCAB - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=4))
    context = max(map(len, prompts)) + draw(st.integers(1, 24))
    limits = [min(draw(st.integers(1, 24)), context - len(prompt)) for prompt in prompts]
    ends = draw(st.lists(st.integers(0, 4 * VOCAB), max_size=2))
    warm = st.sampled_from([0.0, 1.0])
    sampling = Sampling.of(
        len(prompts), [draw(warm) for _ in prompts], seed=[draw(token) for _ in prompts]
    )
    ops = draw(st.sampled_from([eagle2_kernels, eagle2_kernels.reference]))
    target = ScriptedTarget(draw(st.integers(0, 2**32 - 1)), draw(st.booleans()), ops)
    tree = TreeConfig(1, draw(st.integers(1, 5)), draw(st.integers(1, 13)))

    def requests():
        made = Requests(prompts, 24, ends, context)
        made.limits = [*limits]
        return made

    plain = baseline.decode(target, requests(), sampling)
    committed = requests()
    play = Play(data, committed, plain.tokens)
    got = decode.decode(target, play, committed, sampling, tree, cycles=kind)
    assert got.tokens == plain.tokens
    assert got.finish_reasons == plain.finish_reasons
    assert got.statistics.cycles >= play.cycles
    for row, prompt in enumerate(prompts):  # and plain decoding is what the script says
        if sampling.temperature[row] == 0:
            assert script(target, prompt, limits[row], ends) == plain.tokens[row]


def script(target, prompt, limit, ends):
    said = []
    while len(said) < limit and not (said and said[-1] in ends):
        law = target.opinion(prompt + said)
        if law.isnan().any():
            break
        said.append(int(law.argmax()))
    return said


KINDS = pytest.mark.parametrize("kind", [ScriptedCycle, ScriptedStaticCycle])
SLOW = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}


@KINDS
@settings(max_examples=60, **SLOW)
@given(data=st.data())
def test_any_draft_gives_the_plain_text(kind, data):
    check_any_draft(kind, data)


@pytest.mark.full
@KINDS
@settings(max_examples=3000, **SLOW)
@given(data=st.data())
def test_any_draft_gives_the_plain_text_many_times(kind, data):
    check_any_draft(kind, data)
