"""The text of speculative decoding is the target's own, whatever the head and the trees."""

import copy
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from tiny import PROMPTS, VOCAB, make_head, make_pair, make_target, plain_pass, run_head

import eagle2_kernels

TREES = [(1, 4, 4), (2, 3, 6), (4, 3, 10), (8, 5, 59), (10, 6, 60), (1, 1, 2), (2, 2, 1)]


@pytest.fixture(scope="module")
def pair():
    return make_pair(context=3.0)


@pytest.fixture(scope="module")
def plain(pair):
    return baseline.generate(pair[0], PROMPTS, max_new_tokens=40)


@pytest.mark.parametrize("tree", TREES)
def test_r43_greedy_equals_plain_whatever_the_tree(pair, plain, tree):
    result = generate(*pair, PROMPTS, max_new_tokens=40, tree=TreeConfig(*tree))
    assert result.tokens == plain.tokens
    assert result.finish_reasons == ["length"] * 3


def test_greedy_equals_transformers(pair, plain):
    for prompt, tokens in zip(PROMPTS, plain.tokens, strict=True):
        whole = pair[0].generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert whole[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize(("context", "seen"), [(0.0, {3}), (3.0, {0, 1, 2, 3}), (12.0, {0, 1})])
def test_rounds_that_accept_all_some_and_none(context, seen):
    target, head = make_pair(context)
    wanted = baseline.generate(target, PROMPTS, max_new_tokens=33)
    tree = TreeConfig(3, 3, 40, early_stop=False)
    result = generate(target, head, PROMPTS, max_new_tokens=33, tree=tree)
    assert result.tokens == wanted.tokens
    accepted = {n for n, count in enumerate(result.statistics.accept_histogram) if count}
    assert accepted == seen


@pytest.mark.parametrize("tree", TREES[2:5])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.05},
    ],
)
def test_sampled_equals_plain_with_the_same_seed(pair, sampling, tree):
    settings = {"max_new_tokens": 30, "seed": [1, 2, 3], **sampling}
    wanted = baseline.generate(pair[0], PROMPTS, **settings)
    result = generate(*pair, PROMPTS, tree=TreeConfig(*tree), **settings)
    assert result.tokens == wanted.tokens
    assert result.statistics.tau > 1.2


def test_r29_mixed_temperatures(pair, plain):
    settings = {"max_new_tokens": 40, "temperature": [0.0, 1.0, 0.0], "top_p": [0.9, 1.0, 1.0]}
    result = generate(*pair, PROMPTS, **settings)
    assert [result.tokens[0], result.tokens[2]] == [plain.tokens[0], plain.tokens[2]]
    alone = generate(*pair, PROMPTS[1:2], max_new_tokens=40, temperature=1.0)
    assert result.tokens[1] == alone.tokens[0] != plain.tokens[1]


def test_r24_each_row_is_as_alone_and_rows_permute(pair):
    settings = {"max_new_tokens": 24, "temperature": 1.0}
    together = generate(*pair, PROMPTS, seed=[4, 5, 6], **settings).tokens
    for prompt, seed, tokens in zip(PROMPTS, [4, 5, 6], together, strict=True):
        assert generate(*pair, [prompt], seed=seed, **settings).tokens == [tokens]
    order = [2, 0, 1]
    permuted = generate(
        *pair, [PROMPTS[i] for i in order], seed=[(4, 5, 6)[i] for i in order], **settings
    )
    assert permuted.tokens == [together[i] for i in order]


def test_r48_a_seed_is_one_row_s_affair(pair):
    settings = {"max_new_tokens": 24, "temperature": 1.0}
    alone = generate(*pair, PROMPTS[:1], seed=42, **settings).tokens[0]
    for others in ([1, 2], [7, 42]):
        rows = generate(*pair, PROMPTS, seed=[42, *others], **settings).tokens
        assert rows[0] == alone
    assert generate(*pair, PROMPTS[:1], seed=43, **settings).tokens[0] != alone


def test_padded_tensor_equals_lists(pair, plain):
    width = max(map(len, PROMPTS))
    ids = torch.full((3, width), 60)
    mask = torch.zeros(3, width, dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    assert generate(*pair, ids, attention_mask=mask, max_new_tokens=40).tokens == plain.tokens


def test_r43_chain_equals_a_straight_loop():
    """Tokens and accepted counts of a loop without caches, trees and operators."""
    target, head = make_pair(context=1.0, max_position_embeddings=256)
    text, counts = list(PROMPTS[0]), []
    features, logits = plain_pass(target, text)
    root = int(logits[-1].argmax())
    while len(counts) < 50:
        known = features
        chain = [root]
        for _ in range(4):
            hidden = run_head(head, target, [*text[1:], *chain], known)
            known = torch.cat((known, hidden[-1:]))
            chain.append(int(target.lm_head(hidden[-1]).argmax()))
        _, logits = plain_pass(target, [*text, *chain])
        choices = logits[len(text) :].argmax(-1).tolist()
        accepted = 0
        while accepted < 4 and chain[1 + accepted] == choices[accepted]:
            accepted += 1
        counts.append(accepted)
        text += chain[: accepted + 1]
        root = choices[accepted]
        features, _ = plain_pass(target, text)
    seen = []
    result = generate(
        target,
        head,
        PROMPTS[:1],
        max_new_tokens=len(text) - len(PROMPTS[0]) + 1,
        tree=TreeConfig(1, 4, 5),
        on_cycle=lambda tree, path: seen.append(int((path[0] > 0).sum())),
    )
    assert PROMPTS[0] + result.tokens[0] == [*text, root]
    assert seen == counts
    assert set(counts) >= {0, 1, 2, 4}


def test_r43_more_nodes_never_accept_less(pair, plain):
    for start in (4, 11, 18):
        prompts = [p + t[:start] for p, t in zip(PROMPTS, plain.tokens, strict=True)]
        accepted = []
        for num_nodes in (2, 3, 5, 8, 13, 21, 34):
            cycles = []
            generate(
                *pair,
                prompts,
                max_new_tokens=8,
                tree=TreeConfig(4, 5, num_nodes),
                on_cycle=lambda tree, path, cycles=cycles: cycles.append((path > 0).sum(1)),
            )
            accepted.append(cycles[0])
        assert all((later >= earlier).all() for earlier, later in pairwise(accepted))


def test_r10_nan_in_the_draft_changes_nothing(plain):
    for value in (float("nan"), float("inf"), 1e38):
        target, head = make_pair(context=3.0)
        head.fc.bias.data[3] = value
        result = generate(target, head, PROMPTS, max_new_tokens=40, tree=TreeConfig(4, 3, 10))
        assert result.tokens == plain.tokens


def test_r31_half_precision_draft_overflows_on_some_branches():
    target, head = make_pair(context=3.0, dtype=torch.float16)
    target.model.embed_tokens.weight.data[::3] *= 200  # these tokens blow the head up
    head.layers[0].mlp.down_proj.weight.data.mul_(400)
    wanted = baseline.generate(target, PROMPTS, max_new_tokens=20, temperature=1.0)
    result = generate(target, head, PROMPTS, max_new_tokens=20, temperature=1.0)
    assert result.tokens == wanted.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_r10_bad_logits_end_a_row_and_no_other(temperature):
    settings = {"max_new_tokens": 30, "temperature": temperature}
    target, head = make_pair(context=3.0)
    sound = baseline.generate(target, PROMPTS, **settings).tokens
    said = [(row, token) for row in range(3) for token in {*sound[row][2:-1]}]
    used = [{*prompt, *tokens} for prompt, tokens in zip(PROMPTS, sound, strict=True)]
    bad, poison = next(p for p in said if sum(p[1] in tokens for tokens in used) == 1)
    target.model.embed_tokens.weight.data[poison] = torch.nan
    wanted = baseline.generate(target, PROMPTS, **settings)
    result = generate(target, head, PROMPTS, tree=TreeConfig(8, 4, 40), **settings)
    assert result.tokens == wanted.tokens
    for row in range(3):
        assert result.finish_reasons[row] == ("bad_logits" if row == bad else "length")
        until = sound[row].index(poison) + 1 if row == bad else None
        assert result.tokens[row] == sound[row][:until]


def test_r32_long_positions():
    target, head = make_pair(context=3.0, max_position_embeddings=4096)
    prompt = [torch.randint(1, VOCAB, (2100,)).tolist(), [5, 6, 7]]
    wanted = baseline.generate(target, prompt, max_new_tokens=16)
    result = generate(target, head, prompt, max_new_tokens=16, tree=TreeConfig(4, 3, 10))
    assert result.tokens == wanted.tokens
    assert result.statistics.tau > 1.2


def test_r40_one_row_with_filters():
    target = make_target(vocab_size=8)
    head = make_head(target)
    for sampling in ({"temperature": 0.1, "top_p": 0.9}, {"temperature": 0.7, "top_k": 50}):
        settings = {"max_new_tokens": 8, **sampling}
        wanted = baseline.generate(target, [[1, 2]], **settings)
        tree = TreeConfig(8, 3, 20)
        assert generate(target, head, [[1, 2]], tree=tree, **settings).tokens == wanted.tokens


def test_reference_operators_give_the_same(pair, plain):
    tree = TreeConfig(4, 3, 10)
    ops = eagle2_kernels.reference
    assert generate(*pair, PROMPTS, max_new_tokens=40, tree=tree, ops=ops).tokens == plain.tokens


@pytest.mark.filterwarnings("error:Dynamo does not know how to trace")
def test_a_compiled_decoder_gives_the_same(pair, plain):
    target = copy.deepcopy(pair[0])
    target.base_model.compile(backend="eager")
    tree = TreeConfig(4, 3, 10)
    found = generate(target, pair[1], PROMPTS, max_new_tokens=40, tree=tree)
    assert found.tokens == plain.tokens


def test_operators_are_those_that_were_given(pair):
    used = set()

    def spy(name):
        return lambda *args, **more: used.add(name) or getattr(eagle2_kernels, name)(*args, **more)

    ops = SimpleNamespace(**{name: spy(name) for name in eagle2_kernels.ops.OPERATORS})
    generate(*pair, PROMPTS, max_new_tokens=8, ops=ops)
    assert used == {*eagle2_kernels.ops.OPERATORS} - {"verify", "select_leaves"}
