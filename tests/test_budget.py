"""Trees sized by what passes cost: the text stays, the sizes are the best by the profile."""

import numpy as np
import pytest
import torch
from eagle2 import Profile, TreeConfig, baseline, custom_generate, generate
from eagle2.budget import CostedGrowth, best_nodes, best_width
from eagle2.cycle import StaticCycle
from eagle2.drafter import check_head
from eagle2.target import Target
from hypothesis import given
from hypothesis import strategies as st
from tiny import PROMPTS, make_eagle3_pair, make_pair

import eagle2_kernels

LENGTHS = {"max_new_tokens": 24}
TOP_K, DEPTH, NODES = 4, 5, 24


def profile(row=0.02, step=0.05, **changes) -> Profile:
    """Plain passes of one second; each row more, and each draft step, take these shares of it."""
    rows = [1, 2, 4, 8, 64]
    ranks, levels = np.arange(1, NODES + 1), np.arange(1, DEPTH + 1)[:, None]
    fields = {
        "setting": {"model": "made up"},
        "versions": {},
        "rows": rows,
        "target_seconds": [1 + row * (n - 1) for n in rows],
        "draft_seconds": [step * (1 + row * (n - 1)) for n in rows],
        "trust": [1.0] * DEPTH,
        "offspring": [[0.6, 0.2, 0.1, 0.05]] * DEPTH,
        "gains": (levels * (1 - 0.8 ** (ranks - 1)) * 0.5).tolist(),
    }
    return Profile(**{**fields, **changes})


def sizes_of(pair, known, prompts=PROMPTS[:1], **settings):
    """Nodes and levels of every tree, and the answer."""
    seen = []
    answer = generate(
        *pair,
        prompts,
        tree=TreeConfig.auto(known, num_nodes=NODES),
        on_cycle=lambda tree, path: seen.append((tree.tokens.shape[1], int(tree.depths.max()))),
        **{**LENGTHS, **settings},
    )
    return *zip(*seen, strict=True), answer


@pytest.fixture(scope="module", params=[make_pair, make_eagle3_pair])
def pair(request):
    return request.param(context=3.0)


@pytest.fixture(scope="module")
def dense():
    return make_pair(context=3.0)


@pytest.mark.parametrize(("row", "step"), [(0.0, 0.001), (0.05, 0.1), (2.0, 0.01), (0.0, 3.0)])
def test_the_text_is_the_same_whatever_passes_cost(pair, row, step):
    wanted = baseline.generate(pair[0], PROMPTS, **LENGTHS)
    assert sizes_of(pair, profile(row, step), PROMPTS)[2].tokens == wanted.tokens
    sampled = {"temperature": 1.0, "seed": 3, "prompts": PROMPTS[:1]}
    wanted = baseline.generate(pair[0], PROMPTS[:1], temperature=1.0, seed=3, **LENGTHS)
    assert sizes_of(pair, profile(row, step), **sampled)[2].tokens == wanted.tokens


def test_sampled_text_of_a_batch_is_the_same(dense):
    law = {"temperature": [0.0, 1.0, 1.3], "seed": [1, 2, 3], "top_p": 0.9}
    wanted = baseline.generate(dense[0], PROMPTS, **law, **LENGTHS)
    assert sizes_of(dense, profile(), PROMPTS, **law)[2].tokens == wanted.tokens


def test_rows_that_end_early_and_a_full_context():
    pair = make_pair(context=3.0, max_position_embeddings=31)
    plain = baseline.generate(pair[0], PROMPTS, max_new_tokens=100)
    ends = [plain.tokens[0][5], plain.tokens[2][9]]
    for settings in ({}, {"eos_token_id": ends}):
        wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=100, **settings)
        found = sizes_of(pair, profile(), PROMPTS, max_new_tokens=100, **settings)[2]
        assert found.tokens == wanted.tokens


def test_trees_grow_while_rows_and_steps_are_cheap(dense):
    def means(row, step):
        nodes, depths, _ = sizes_of(dense, profile(row, step))
        return np.mean(nodes), np.mean(depths)

    free, dear_rows, dear_steps = means(0.0, 0.001), means(0.3, 0.001), means(0.0, 0.4)
    assert free[0] > NODES / 2
    assert dear_rows[0] < free[0] / 2
    assert dear_steps[1] < free[1]


def test_rows_that_cost_whole_passes_leave_the_root_alone(dense):
    nodes, _, answer = sizes_of(dense, profile(row=3.0))
    assert set(nodes) == {1}
    assert answer.statistics.tau == 1


def test_transformers_own_generate(dense):
    ids = torch.tensor(PROMPTS[:1])
    wanted = dense[0].generate(ids, **LENGTHS, do_sample=False)
    method = custom_generate(dense[1], TreeConfig.auto(profile()))
    found = dense[0].generate(ids, **LENGTHS, do_sample=False, custom_generate=method)
    assert torch.equal(found, wanted)


def test_a_row_of_a_batch_costs_the_batch(dense):
    eight = profile(target_seconds=[1, 1, 1, 1, 1000])
    assert max(sizes_of(dense, eight)[0]) == 8
    assert max(sizes_of(dense, eight, PROMPTS)[0]) == 8 // 3


probabilities = st.lists(st.floats(0, 1), max_size=12).map(lambda x: sorted(x, reverse=True))
costs = st.lists(st.floats(1e-3, 5), min_size=5, max_size=5).map(sorted)
paces = st.floats(0.01, 10)


@given(probabilities, costs, costs, paces, st.integers(1, 14), st.integers(1, 3))
def test_the_number_of_nodes_is_the_best_one(values, target, draft, pace, most, batch):
    known = profile(target_seconds=target, draft_seconds=draft)
    rows = np.array([values] * batch)
    prices = pace * known.target(batch * np.arange(1, most + 1))
    found, profit = best_nodes(rows, prices)

    def worth(nodes):
        return batch * sum(values[: nodes - 1]) - pace * float(known.target(batch * nodes))

    profits = [worth(nodes) for nodes in range(1, min(most, len(values) + 1) + 1)]
    assert profits[found - 1] == pytest.approx(max(profits), abs=1e-9)
    assert profit == pytest.approx(max(profits), abs=1e-9)


@given(probabilities, st.lists(probabilities, min_size=1, max_size=4), costs, costs, paces)
def test_the_number_of_leaves_is_the_best_one(values, families, target, draft, pace):
    known = profile(target_seconds=target, draft_seconds=draft)
    children = np.array([family[:3] + [0.0] * (3 - len(family[:3])) for family in families])
    prices, widths = pace * known.target(np.arange(1, 11)), np.arange(len(families) + 1)
    steps = pace * known.draft(widths) * (widths > 0)
    found = best_width(np.array([values]), children[None], prices, steps)
    profits = []
    for width in range(len(families) + 1):
        nodes = sorted([*values, *children[:width].ravel()], reverse=True)
        step = float(known.draft(width)) if width else 0.0
        profits.append(
            max(
                sum(nodes[: n - 1]) - pace * (float(known.target(n)) + step)
                for n in range(1, min(10, len(nodes) + 1) + 1)
            )
        )
    assert profits[found] == pytest.approx(max(profits), abs=1e-9)


def test_nodes_are_counted_in_the_order_of_the_rerank():
    """Which goes by scores, whatever the levels turned out to be worth."""
    trust = np.array([0.2, 2.0, 1.0, 1.0, 1.0])
    known = profile(row=0.25, trust=trust.tolist())
    growth = CostedGrowth(known, TOP_K, DEPTH, eagle2_kernels, 1, torch.device("cpu"))
    wanted, law = torch.tensor([NODES]).int(), torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    leaves = growth.root(2)
    for level in (1, 2):
        scores = leaves.scores[..., None] + law
        leaves = growth.enter(level, torch.zeros_like(scores).long(), scores, leaves, wanted)
    found = growth.candidates.scores[0, : growth.end].double().exp().numpy()
    values = found * trust[np.repeat([0, 1], [TOP_K, growth.end - TOP_K])]
    prices = known.fixed(1)[2] * known.target(np.arange(1, NODES + 1))
    nodes = [
        int(best_nodes(values[order][None], prices)[0])
        for order in (np.argsort(-found, kind="stable"), np.argsort(-values, kind="stable"))
    ]
    assert growth.afford(wanted, NODES)[1] == nodes[0] != nodes[1]


def test_a_level_that_no_row_has_use_for():
    growth = CostedGrowth(profile(), TOP_K, DEPTH, eagle2_kernels, 2, torch.device("cpu"))
    leaves, wanted = growth.root(2), torch.tensor([1, 0]).int()
    scores = leaves.scores[..., None] + torch.zeros(TOP_K)
    leaves = growth.enter(1, torch.zeros_like(scores).long(), scores, leaves, wanted)
    assert leaves.tokens.shape == (2, 0)
    assert growth.afford(wanted, 1)[1] == 1


@given(costs, costs, st.integers(1, 70), st.integers(1, 70))
def test_more_rows_never_cost_less(target, draft, few, more):
    known = profile(target_seconds=target, draft_seconds=draft)
    few, more = sorted((few, more))
    assert known.target(few) <= known.target(more) + 1e-12
    assert known.draft(few) <= known.draft(more) + 1e-12
    assert [known.target(n) for n in known.rows] == pytest.approx(target)


def test_trees_of_one_size_are_the_best_of_the_profile():
    known = profile()
    for batch in (1, 4):
        pace = {
            (depth, nodes): batch
            * (1 + known.gains[depth - 1][nodes - 1])
            / (
                known.draft(batch)
                + (depth - 1) * known.draft(batch * TOP_K)
                + known.target(batch * nodes)
            )
            for depth in range(1, DEPTH + 1)
            for nodes in range(1, NODES + 1)
        }
        depth, nodes, best = known.fixed(batch)
        assert best == pytest.approx(max(pace.values()))
        assert pace[depth, nodes] == pytest.approx(best)


def test_no_pass_is_larger_than_was_measured(dense):
    free = {"row": 0.0, "step": 0.001}
    assert max(sizes_of(dense, profile(**free), PROMPTS)[0]) == 64 // 3
    assert profile(**free).fixed(16)[1] <= 4
    few = profile(rows=[1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="wanted 6 rows .* batch of 3, got 5.*tune --rows 192"):
        sizes_of(dense, few, PROMPTS)
    with pytest.raises(ValueError, match="wanted 6 rows"):
        few.fixed(3)


def test_cycles_of_one_size_take_the_fixed_one(dense, monkeypatch):
    made = []

    def make_cycle(*arguments):
        made.append(StaticCycle(*arguments, capture=lambda step: step))
        return made[-1]

    monkeypatch.setattr("eagle2.decode.make_cycle", make_cycle)
    wanted = baseline.generate(dense[0], PROMPTS, **LENGTHS)
    nodes, _, found = sizes_of(dense, profile(), PROMPTS)
    assert found.tokens == wanted.tokens
    depth, size, _ = profile().fixed(len(PROMPTS))
    assert (made[0].config.depth, made[0].config.num_nodes) == (depth, size)
    assert set(nodes) == {size}


def test_ranks_are_refused(dense):
    target = Target(dense[0])
    target.group = object()
    with pytest.raises(ValueError, match="tree: wanted trees of one size .* spread over ranks"):
        check_head(dense[1], target, TreeConfig.auto(profile()))


def test_trees_beyond_the_profile_are_refused():
    with pytest.raises(ValueError, match="profile: wanted top_k and depth within its 4 and 5"):
        TreeConfig(top_k=5, depth=5, profile=profile())
