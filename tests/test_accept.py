"""accept in every form: one token of the target after another, whatever the tree holds."""

import math

import pytest
import torch

from eagle2_kernels import Candidates, Tree, reference

NAN = math.nan


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def tree_of(tokens, parents, num_nodes=None):
    nodes = len(tokens)
    return Tree(
        tokens=torch.tensor([tokens]),
        parents=int32(parents),
        depths=torch.zeros(1, nodes, dtype=torch.int32),
        ancestors=torch.zeros(1, nodes, 1, dtype=torch.int64),
        scores=torch.zeros(1, nodes),
        num_nodes=int32(nodes if num_nodes is None else num_nodes),
    )


def one_hot(*tokens, vocab):
    logits = torch.full((1, len(tokens), vocab), -math.inf)
    for node, token in enumerate(tokens):
        logits[0, node, token] = 0.0
    return logits


def law(tree, logits, temperature=1.0, top_p=1.0, seed=0, depths=None):
    batch, nodes, _ = logits.shape
    ones = torch.ones(batch)
    depths = torch.zeros(batch, nodes, dtype=torch.int64) if depths is None else depths
    seeds = torch.arange(batch) + seed
    return (
        *(tree, logits, ones * temperature, torch.zeros(batch, dtype=torch.int32)),
        *(ones * top_p, ones * 0, seeds, depths + 100),
    )


def emitted(tree, result):
    path, accept_length, bonus_token, path_tokens = result
    rows = []
    for row, length in enumerate(accept_length.tolist()):
        nodes = path[row, 1 : length + 1].tolist()
        rows.append([*tree.tokens[row, nodes].tolist(), bonus_token[row].item()])
        padding = [-1] * (path.shape[1] - length - 1)
        assert path_tokens[row].tolist() == rows[row] + padding
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_r28_a_child_is_judged_by_its_parents_row(form, seed):
    chain = tree_of([9, 1, 2], [-1, 0, 1])
    result = form.accept(*law(chain, one_hot(1, 2, 3, vocab=4), seed=seed), 2)
    assert emitted(chain, result) == [[1, 2, 3]]
    result = form.accept(*law(chain, one_hot(0, 2, 3, vocab=4), seed=seed), 2)
    assert emitted(chain, result) == [[0]]
    assert result[0].tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("seed", range(5))
def test_r42_placeholders_are_never_accepted(form, seed):
    tree = tree_of([0, 3, -1, -1], [-1, 0, -1, -1], num_nodes=2)
    logits = one_hot(3, 4, 4, 4, vocab=5)
    logits[:, 2:] = NAN
    result = form.accept(*law(tree, logits, seed=seed), 3)
    assert emitted(tree, result) == [[3, 4]]
    assert result[0].tolist() == [[0, 1, -1, -1]]


@pytest.mark.parametrize("children", [[0, 1], [1, 0], [2], [0, 1, 2], [], [1, 1]])
def test_r27_the_first_token_does_not_depend_on_the_children(fast_form, children):
    """EAGLE's children are no random draws: the law of the text is the target's, exactly."""
    batch = 20_000
    tree = tree_of([9, *children], [-1] + [0] * len(children))
    tree = Tree(*(x.expand(batch, *x.shape[1:]) for x in tree))
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(batch, 1 + len(children), 3)
    path, accept_length, bonus_token, _ = fast_form.accept(*law(tree, logits), 1)
    # all nodes draw at the same position here, so the bonus repeats the token that was accepted
    root = tree._replace(num_nodes=torch.ones_like(tree.num_nodes))
    alone = fast_form.accept(*law(root, logits), 1)
    assert torch.equal(bonus_token, alone[2])
    counts = torch.bincount(bonus_token, minlength=3) / batch
    torch.testing.assert_close(counts, torch.tensor([0.5, 0.3, 0.2]), atol=0.018, rtol=0)
    accepted = torch.isin(bonus_token, torch.tensor(children, dtype=torch.int64))
    assert torch.equal(accept_length, accepted.int())
    assert (path[:, 1] != 2).all() or children != [1, 1]


def check_against_sample_and_verify(form, temperature, batch, nodes, depths):
    generator = torch.Generator().manual_seed(3)
    vocab, drafted = 4, nodes - 1
    level_parents = torch.arange(drafted)[None].expand(batch, drafted) // 3 - 1
    candidates = Candidates(
        torch.randint(0, vocab, (batch, drafted), generator=generator),
        -torch.rand(batch, drafted, generator=generator).cumsum(-1),
        level_parents.clamp(min=-1).int(),
    )
    num_nodes = torch.randint(0, nodes + 1, (batch,), generator=generator).int()
    tree = reference.rerank(candidates, torch.zeros(batch, dtype=torch.int64), num_nodes, nodes)
    logits = torch.randn(batch, nodes, vocab, generator=generator)
    arguments = law(tree, logits, temperature, depths=tree.depths.long())
    for depth in depths:
        wanted = reference.verify(tree, reference.sample(*arguments[1:]), depth)
        *_, path_tokens = result = form.accept(*arguments, depth)
        emitted(tree, result)
        assert path_tokens.dtype == torch.int64
        for got, value in zip(result[:3], wanted, strict=True):
            assert torch.equal(got, value)
            assert got.dtype == value.dtype
    return wanted[1].max()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_same_as_sample_and_verify(form, temperature):
    longest = check_against_sample_and_verify(form, temperature, 3, 10, [3])
    assert longest >= 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_same_as_sample_and_verify_in_many_rows(fast_form, temperature):
    longest = check_against_sample_and_verify(fast_form, temperature, 40, 30, [0, 1, 3, 6])
    assert longest >= 2


def test_r43_a_chain_and_a_tree_give_the_same_text(form):
    """More nodes never lower what is accepted, and never change it."""
    text = [3, 1, 2, 0]
    logits = one_hot(*text, 1, 1, 1, vocab=4)
    chain = tree_of([9, 3, 1, 2], [-1, 0, 1, 2])
    bushy = tree_of([9, 0, 3, 1, 1, 2, 3], [-1, 0, 0, 2, 1, 3, 3])
    order = [0, 4, 1, 2, 4, 3, 4]  # the row of the text that judges each node of the bushy tree
    assert emitted(chain, form.accept(*law(chain, logits[:, :4]), 3)) == [text]
    assert emitted(bushy, form.accept(*law(bushy, logits[:, order]), 3)) == [text]


def test_r10_a_row_without_live_logits_accepts_nothing(form):
    tree = tree_of([9, 1, -1], [-1, 0, 0])
    tree = Tree(*(torch.cat((x, x)) for x in tree))
    logits = one_hot(1, 2, 3, vocab=5).repeat(2, 1, 1)
    logits[1] = NAN
    whole = form.accept(*law(tree, logits), 2)
    path, accept_length, bonus_token, path_tokens = whole
    assert path[0].tolist() == [0, 1, -1]
    assert bonus_token.tolist()[0] == 2
    assert accept_length[0] == 1
    good = law(Tree(*(x[:1] for x in tree)), logits[:1])
    assert path_tokens.tolist() == [[1, 2, -1], [-1, -1, -1]]
    for got, wanted in zip(form.accept(*good, 2), whole, strict=True):
        assert torch.equal(got, wanted[:1])


def test_rows_without_a_tree(form):
    tree = tree_of([9, 1], [-1, 0], num_nodes=0)
    path, accept_length, bonus_token, path_tokens = form.accept(
        *law(tree, one_hot(1, 1, vocab=3)), 2
    )
    assert (path.tolist(), accept_length.item(), bonus_token.item()) == ([[-1] * 3], 0, -1)
    assert path_tokens.tolist() == [[-1] * 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_r16_any_strides(form, dtype):
    tree = tree_of([9, 1, 2, 0], [-1, 0, 1, 1])
    tree = Tree(*(x.expand(3, *x.shape[1:]) for x in tree))
    logits = torch.randn(4, 300, 3).to(dtype).permute(2, 0, 1)
    strided = form.accept(*law(tree, logits), 3)
    packed = Tree(*(x.contiguous() for x in tree))
    for got, wanted in zip(strided, form.accept(*law(packed, logits.contiguous()), 3), strict=True):
        assert torch.equal(got, wanted)


def test_r48_a_row_alone_is_the_row_in_its_batch(form):
    tree = tree_of([9, 1, 2, 0], [-1, 0, 0, 1])
    tree = Tree(*(x.repeat(3, *[1] * (x.dim() - 1)) for x in tree))
    arguments = law(tree, torch.randn(3, 4, 3), seed=42)
    whole = form.accept(*arguments, 2)
    for row in range(3):
        alone = [x[row : row + 1] for x in arguments[1:]]
        result = form.accept(Tree(*(x[row : row + 1] for x in tree)), *alone, 2)
        for got, wanted in zip(result, whole, strict=True):
            assert torch.equal(got, wanted[row : row + 1])
