"""Static trees: the shape is the choices', whatever the scores; the text is the target's own."""

from types import SimpleNamespace

import pytest
import torch
from eagle2 import EAGLE1_CHOICES, TreeConfig, baseline, generate
from eagle2.cycle import State, StaticCycle
from eagle2.drafter import Drafter
from eagle2.requests import Requests, Sampling
from eagle2.target import Target, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from test_drafter import int32
from test_tree import VOCAB, Automaton
from tiny import PROMPTS, make_eagle3_pair, make_pair
from torch._subclasses.fake_tensor import FakeTensorMode

import eagle2_kernels
from eagle2_kernels import reference

ODD = [[2], [0], [0, 1], [0, 0], [2, 3], [0, 1, 0]]  # not in order, with gaps between ranks
TREES = [EAGLE1_CHOICES, ODD, [[1]], [[0], [1], [2]]]


@pytest.fixture(scope="module", params=[make_pair, make_eagle3_pair])
def pair(request):
    return request.param(context=3.0)


@st.composite
def choices(draw):
    """Prefix-closed sets of paths of up to four levels, with gaps, in any order."""
    level, paths = [()], []
    for _ in range(draw(st.integers(1, 4))):
        level = [
            (*path, rank)
            for path in level
            for rank in draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))
        ]
        paths += level
    return draw(st.permutations(paths)) if paths else [(0,)]


def drafted_tree(config, table, ops, num_nodes):
    """The tree of one row that drafts from rows of a table of logits."""
    target = SimpleNamespace(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        num_layers=1,
        lm_head=torch.nn.Identity(),
        embed=lambda tokens: tokens[..., None].expand(-1, -1, VOCAB).float(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    ops = SimpleNamespace(
        expand=lambda logits, *rest: reference.expand(table[logits[..., 0].long()], *rest),
        rerank=ops.rerank,
    )
    drafter = Drafter(Automaton(), target, config, 1, 40, ops)
    start, sizes = torch.ones(1, 1, VOCAB), int32([num_nodes])
    candidates = drafter.draft(start, int32([3]), 3, sizes, config.depth, lambda stage: None)
    return ops.rerank(candidates, torch.tensor([0]), sizes, config.num_nodes)


def paths_of(tree, table):
    """Path of child ranks of every node, found through its token."""
    paths, states = [()], [1]
    for node in range(1, int(tree.num_nodes[0])):
        parent, token = int(tree.parents[0, node]), int(tree.tokens[0, node])
        ranks = table[states[parent]].argsort(descending=True, stable=True).tolist()
        paths.append((*paths[parent], ranks.index(token)))
        states.append((3 * states[parent] + 2 * token + 1) % len(table))
    return paths[1:]


@given(choices(), st.integers(0, 10**6))
@settings(max_examples=60)
def test_the_shape_is_the_choices_whatever_the_scores(paths, seed):
    torch.manual_seed(seed)
    table, config = torch.randn(5, VOCAB) * 10, TreeConfig.static(paths)
    tree = drafted_tree(config, table, eagle2_kernels, config.num_nodes)
    assert sorted(paths_of(tree, table)) == sorted(map(tuple, paths))
    log_probs = table.log_softmax(-1)
    states = [1]
    for node in range(1, config.num_nodes):
        parent, token = int(tree.parents[0, node]), int(tree.tokens[0, node])
        wanted = tree.scores[0, parent] + log_probs[states[parent], token]
        torch.testing.assert_close(tree.scores[0, node], wanted)
        states.append((3 * states[parent] + 2 * token + 1) % 5)


@given(choices(), st.integers(0, 10**6), st.integers(1, 12))
@settings(max_examples=40)
def test_a_smaller_budget_keeps_the_likeliest(paths, seed, num_nodes):
    torch.manual_seed(seed)
    table, config = torch.randn(5, VOCAB) * 10, TreeConfig.static(paths)
    whole = drafted_tree(config, table, reference, config.num_nodes)
    tree = drafted_tree(config, table, reference, num_nodes)
    kept = min(num_nodes, config.num_nodes) - 1
    wanted = whole.scores[0, 1:].sort(descending=True).values[:kept]
    found = tree.scores[0, 1 : kept + 1].sort(descending=True).values
    assert torch.equal(found, wanted)


def test_a_dead_child_is_no_node():
    table = torch.tensor([2.0, 1.0, *[-torch.inf] * (VOCAB - 2)]).expand(5, -1)
    config = TreeConfig.static([[0], [1], [2], [0, 0], [0, 3], [2, 0]])
    tree = drafted_tree(config, table, eagle2_kernels, config.num_nodes)
    assert paths_of(tree, table) == [(0,), (1,), (0, 0)]


@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_is_plain_text(pair, tree):
    wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=30)
    result = generate(*pair, PROMPTS, max_new_tokens=30, tree=TreeConfig.static(tree))
    assert result.tokens == wanted.tokens
    if tree is EAGLE1_CHOICES:
        assert result.statistics.tau > 1.5


def test_sampled_text_is_plain_text(pair):
    law = {"temperature": [0.0, 1.0, 1.3], "top_p": 0.9, "seed": [1, 2, 3], "max_new_tokens": 30}
    wanted = baseline.generate(pair[0], PROMPTS, **law)
    for tree in (EAGLE1_CHOICES, ODD):
        result = generate(*pair, PROMPTS, tree=TreeConfig.static(tree), **law)
        assert result.tokens == wanted.tokens


def test_every_row_s_tree_has_the_shape(pair):
    config, trees = TreeConfig.static(EAGLE1_CHOICES), []
    generate(
        *pair,
        PROMPTS,
        max_new_tokens=12,
        tree=config,
        on_cycle=lambda tree, path: trees.append(tree),
    )
    wanted = [-1, *(EAGLE1_CHOICES.index(p[:-1]) + 1 if p[:-1] else 0 for p in EAGLE1_CHOICES)]
    for parents in trees[0].parents.tolist():
        assert parents == wanted
    assert trees[0].num_nodes.tolist() == [26] * 3


def test_a_path_of_best_children_is_a_chain(pair):
    chain = TreeConfig.static([[0], [0, 0], [0, 0, 0]])
    assert (chain.top_k, chain.depth, chain.num_nodes) == (1, 3, 4)
    seen = []
    for config in (chain, TreeConfig(1, 3, 4, early_stop=False)):
        cycles = []
        result = generate(
            *pair,
            PROMPTS[:1],
            max_new_tokens=30,
            tree=config,
            on_cycle=lambda *cycle, cycles=cycles: cycles.append(cycle),
        )
        seen.append((cycles, result))
    (ours, a), (chains, b) = seen
    assert a.statistics.accept_histogram == b.statistics.accept_histogram
    for (tree, path), (other, other_path) in zip(ours, chains, strict=True):
        assert torch.equal(path, other_path)
        assert all(map(torch.equal, tree, other))


def test_static_cycles_read_nothing_back(pair):
    config, target = TreeConfig.static(EAGLE1_CHOICES), Target(pair[0], eagle2_kernels)
    requests = Requests(PROMPTS, 20, [], target.context_limit)
    capacity, sampling = requests.capacity(config.num_nodes), Sampling.of(3, [0.0, 1.0, 1.0])
    with torch.inference_mode():
        cycle = StaticCycle(target, pair[1], config, sampling, 3, capacity, None)
        begun = prefill(target, requests, sampling, cycle.cache, cycle.drafter.feature_layers)
        hidden = cycle.drafter.prefill(begun.shifted, begun.features, begun.prefix_len)
        cycle.state = State(begun.first, hidden, begun.prefix_len)
        with FakeTensorMode(allow_non_fake_inputs=True):
            cycle.step()


def test_cycles_of_one_size_give_plain_text(pair, monkeypatch):
    monkeypatch.setattr(
        "eagle2.decode.make_cycle",
        lambda *shape: StaticCycle(*shape, capture=lambda step: step),
    )
    wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=20)
    tree = TreeConfig.static(EAGLE1_CHOICES)
    assert generate(*pair, PROMPTS, max_new_tokens=20, tree=tree).tokens == wanted.tokens


@pytest.mark.parametrize("limit", [24, 25, 31])
def test_up_to_the_context_limit(limit):
    pair = make_pair(context=3.0, max_position_embeddings=limit)
    wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=100)
    tree = TreeConfig.static(EAGLE1_CHOICES)
    assert generate(*pair, PROMPTS, max_new_tokens=100, tree=tree).tokens == wanted.tokens


def test_eagle_1_s_tree():
    """25 nodes, 4, 8, 8, 3 and 2 of them on five levels, drafted in five steps of 1-4-4-1-1."""
    config = TreeConfig.static(EAGLE1_CHOICES)
    assert (config.num_nodes, config.depth, config.top_k) == (26, 5, 4)
    assert [sum(len(p) == level for p in EAGLE1_CHOICES) for level in range(1, 6)] == [
        4,
        8,
        8,
        3,
        2,
    ]
    parents = {path[:-1] for path in EAGLE1_CHOICES}
    assert [sum(len(p) == level for p in parents) for level in range(5)] == [1, 4, 4, 1, 1]
    assert {(3, 0), (1, 0, 0), (0, 2, 1), (0, 0, 0, 2), (0, 0, 0, 0, 1)} <= {*EAGLE1_CHOICES}
    assert not {(4,), (3, 1), (1, 0, 1), (0, 0, 1, 0)} & {*EAGLE1_CHOICES}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "wanted one path or more, got none"),
        ([[0], [1, 0]], r"wanted \[1\] too, the parent of \[1, 0\]"),
        ([[0], [0, 0, 0]], r"wanted \[0, 0\] too"),
        ([[0], [1], [0]], r"got \[0\] twice"),
        ([[0], [-1]], r"ranks 0, 1, .*got \[-1\]"),
        ([[0], []], r"got \[\]"),
        ([0, 1], "got 0"),
        ([["a"]], r"got \['a'\]"),
        ([[0.0]], r"got \[0.0\]"),
    ],
)
def test_choices_that_are_no_tree_are_refused(bad, message):
    with pytest.raises(ValueError, match=f"^choices: .*{message}"):
        TreeConfig.static(bad)


def test_more_children_than_draft_ids_are_refused():
    target, head = make_eagle3_pair(draft_ids=5)
    with pytest.raises(ValueError, match="^top_k: wanted at most the head's 5 draft ids, got 6"):
        generate(target, head, PROMPTS, tree=TreeConfig.static([[5]]))
