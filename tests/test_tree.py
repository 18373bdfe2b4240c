"""Trees as they come out of expand, select_leaves and rerank together."""

import math
from types import SimpleNamespace

import pytest
import torch
from eagle2.drafter import Drafter, TreeConfig
from eagle2.heads import HeadConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2_kernels import Candidates, Tree, reference

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NODES = [1, 2, 31, 32, 33, 60, 63, 64, 65, 128]
STATES, VOCAB = 5, 6
LOGITS = [0.0, -0.0, 1.0, 1.0, 1.25, -2.0, 9.0, 80.0, -3e4, 6e4, 3e38, -3e38, 1e-30]
LOGITS += [math.inf, -math.inf, math.nan]
tables = st.lists(st.sampled_from(LOGITS), min_size=STATES * VOCAB, max_size=STATES * VOCAB)
sizes = st.integers(1, 4)


class Automaton:
    """A head whose logits are rows of a table: state' = f(state, token)."""

    draft_to_target = embed_tokens = None
    config = HeadConfig(VOCAB, VOCAB, VOCAB, 1, 1)
    fc = SimpleNamespace(weight=torch.zeros(1))

    def __call__(self, embeddings, features, positions, attend):
        return (3 * features + 2 * embeddings + 1) % STATES

    def to_logits(self, lm_head):
        return lm_head


def draft(form, table, k, depth, num_nodes, early_stop):
    """Candidates of one row for each entry of num_nodes; row b starts in state b."""
    expand = getattr(form, "expand", reference.expand)
    shim = SimpleNamespace(
        expand=lambda logits, *rest: expand(table[logits[..., 0].long()], *rest),
        enter_level=getattr(form, "enter_level", reference.enter_level),
    )
    target = SimpleNamespace(
        hidden_size=VOCAB,
        vocab_size=VOCAB,
        num_layers=1,
        lm_head=torch.nn.Identity(),
        embed=lambda tokens: tokens[..., None].expand(-1, -1, VOCAB).float(),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    most = max(*num_nodes, 1)
    config = TreeConfig(k, depth, most, early_stop)
    drafter = Drafter(Automaton(), target, config, len(num_nodes), 40, shim)
    start = torch.arange(len(num_nodes)).float()[:, None, None] % STATES
    prefix_len, count = torch.full((len(num_nodes),), 3).int(), torch.tensor(num_nodes).int()
    hidden = start.expand(-1, 1, VOCAB).contiguous()
    drafted = drafter.draft(hidden, prefix_len, 3, count, depth, lambda stage: None)
    return Candidates(*(field.clone() for field in drafted)), count


def bits(words):
    return sum((int(word) & (2**64 - 1)) << 64 * w for w, word in enumerate(words))


def check_laws(tree, row):
    count, columns = int(tree.num_nodes[row]), tree.tokens.shape[1]
    tokens, parents, depths, scores = (field[row].tolist() for field in tree[:3] + tree[4:5])
    words = [bits(line) for line in tree.ancestors[row].tolist()]
    assert (parents[0], depths[0], words[0], scores[0]) == (-1, 0, 1, 0)
    for node in range(1, count):
        above = words[node] ^ (1 << node)
        assert parents[node] == above.bit_length() - 1 < node
        assert words[node] == words[parents[node]] | 1 << node
        assert depths[node] == words[node].bit_count() - 1
        assert -math.inf < scores[node] <= scores[parents[node]]
    born = list(zip(parents[:count], tokens[:count], strict=True))
    assert len(set(born)) == count  # no child twice
    assert depths[:count] == sorted(depths[:count])
    assert words[count:] == [0] * (columns - count)


def test_hand_drawn_tree(form):
    """A tree of 8 nodes out of 14 candidates; a to n are candidates 0 to 13.

        level 1         a -0.5      b -1.0
        level 2     c -0.75 d -2.0  e -1.0 f -3.0
        level 3   of e: g -1.5 h -1.5   of c: i -1.0 j -1.25
        level 4   of i: k -1.25 l -4.0  of j: m -1.5 n -1.5

    The best seven: a, c, b, e, i (three at -1.0, by index), j, k. Not g, h, m and n.
    """
    drafted = Candidates(
        torch.tensor([[*range(10, 24)]]),
        torch.tensor([[-0.5, -1, -0.75, -2, -1, -3, -1.5, -1.5, -1, -1.25, -1.25, -4, -1.5, -1.5]]),
        torch.tensor([[-1, -1, 0, 0, 1, 1, 4, 4, 2, 2, 8, 8, 9, 9]], dtype=torch.int32),
    )
    tree = form.rerank(drafted, torch.tensor([99]), torch.tensor([8]).int(), 10)
    wanted = Tree(
        #              root a   b   c   e   i   j   k
        tokens=[[99, 10, 11, 12, 14, 18, 19, 20, -1, -1]],
        parents=[[-1, 0, 0, 1, 2, 3, 3, 5, -1, -1]],
        depths=[[0, 1, 1, 2, 2, 3, 3, 4, 0, 0]],
        ancestors=[
            [
                [0b00000001],
                [0b00000011],
                [0b00000101],
                [0b00001011],
                [0b00010101],
                [0b00101011],
                [0b01001011],
                [0b10101011],
                [0],
                [0],
            ]
        ],
        scores=[[0, -0.5, -1, -0.75, -1, -1, -1.25, -1.25, -math.inf, -math.inf]],
        num_nodes=[8],
    )
    for name, field, values in zip(Tree._fields, tree, wanted, strict=True):
        assert field.tolist() == values, name
    # the target says 10, 12, 18, then 21: three accepted
    target_tokens = torch.tensor([[10, 12, 0, 18, 0, 21, 0, 0, 0, 0]])
    path, accepted, bonus = form.verify(tree, target_tokens, 4)
    assert (path.tolist(), accepted.tolist(), bonus.tolist()) == ([[0, 1, 3, 5, -1]], [3], [21])


def test_bit_63_is_the_sign(form):
    chain = Candidates(
        torch.arange(100)[None], torch.zeros(1, 100), torch.arange(-1, 99).int()[None]
    )
    tree = form.rerank(chain, torch.tensor([9]), torch.tensor([101]).int(), 101)
    assert tree.ancestors[0, 63].tolist() == [-1, 0]
    assert tree.ancestors[0, 64].tolist() == [-1, 1]
    assert tree.ancestors[0, 62].tolist() == [2**63 - 1, 0]
    check_laws(tree, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(table=tables, k=sizes, depth=sizes)
def test_connected_for_every_budget(form, dtype, table, k, depth):
    table = torch.tensor(table).reshape(STATES, VOCAB).to(dtype)
    drafted, _ = draft(form, table, k, depth, [1000, 1000], early_stop=False)
    assert not drafted.scores.isnan().any()
    assert (drafted.scores <= 0).all()
    count = drafted.tokens.shape[1]
    order = form.select_leaves(drafted.scores, count).tolist()
    for row in range(2):
        place = {candidate: i for i, candidate in enumerate(order[row])}
        for candidate, parent in enumerate(drafted.parents[row].tolist()):
            assert parent < candidate
            assert parent < 0 or place[parent] < place[candidate]
    roots, alive = torch.tensor([8, 9]), (drafted.scores > -math.inf).sum(1)
    for budget in range(1, count + 2):
        tree = form.rerank(drafted, roots, torch.full((2,), budget).int(), budget)
        assert tree.num_nodes.tolist() == [min(budget, 1 + int(n)) for n in alive]
        for row in range(2):
            check_laws(tree, row)
            kept = sorted(order[row][: tree.num_nodes[row] - 1])
            live = tree.tokens[row, : len(kept) + 1].tolist()
            assert live == [roots[row], *drafted.tokens[row, kept].tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(
    table=tables,
    k=sizes,
    depth=st.integers(1, 5),
    budgets=st.lists(st.integers(0, 40), min_size=3, max_size=3),
)
def test_early_stop_same_tree(form, dtype, table, k, depth, budgets):
    table = torch.tensor(table).reshape(STATES, VOCAB).to(dtype)
    trees = []
    for early_stop in (False, True):
        drafted, count = draft(form, table, k, depth, budgets, early_stop)
        trees.append(form.rerank(drafted, torch.tensor([7, 8, 9]), count, max(*budgets, 1)))
    for name, whole, stopped in zip(Tree._fields, *trees, strict=True):
        assert torch.equal(whole, stopped), name


def test_early_stop_stops(form):
    table = torch.full((STATES, VOCAB), -20.0)
    table[:, 0] = 20.0  # one sure chain, everything else hopeless
    drafted, _ = draft(form, table, 3, 4, [4], early_stop=True)
    # all of level 1 is among the best three, then the chain alone
    assert (drafted.scores > -math.inf).sum() == 3 + 9 + 3 + 3
    table[:] = 0.0  # shallow before deep
    drafted, _ = draft(form, table, 3, 4, [4], early_stop=True)
    assert drafted.tokens.shape[1] == 3 + 9


@pytest.mark.parametrize("num_nodes", NODES)
def test_word_laws(form, num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    table = torch.randn(STATES, VOCAB, generator=generator)
    budgets = [num_nodes, max(num_nodes - 1, 1), 1 + num_nodes // 2]
    drafted, count = draft(form, table, 5, 7, budgets, early_stop=True)
    tree = form.rerank(drafted, torch.tensor([7, 8, 9]), count, num_nodes)
    assert tree.ancestors.shape == (3, num_nodes, -(-num_nodes // 64))
    assert tree.num_nodes.tolist() == [min(n, num_nodes) for n in budgets]
    for row in range(3):
        check_laws(tree, row)


def test_r02_same_tree_of_all_ties(form):
    drafted, count = draft(form, torch.zeros(STATES, VOCAB), 3, 2, [7], early_stop=False)
    assert drafted.tokens.tolist() == [[0, 1, 2] * 4]
    assert drafted.parents.tolist() == [[-1, -1, -1, 0, 0, 0, 1, 1, 1, 2, 2, 2]]
    tree = form.rerank(drafted, torch.tensor([7]), count, 7)
    assert tree.parents.tolist() == [[-1, 0, 0, 0, 1, 1, 1]]
