import itertools

import numpy as np
import pytest
import torch

import eagle2_kernels
from eagle2_kernels import Tree, reference

P = [0.5, 0.3, 0.2]


def make_tree(tokens, parents, num_nodes=None, rows=1):
    """Rows of the same tree; the fields that verify does not read are empty."""
    count = len(tokens) if num_nodes is None else num_nodes
    return Tree(
        tokens=torch.tensor(tokens).expand(rows, -1),
        parents=torch.tensor(parents, dtype=torch.int32).expand(rows, -1),
        depths=torch.zeros(0),
        ancestors=torch.zeros(0),
        scores=torch.zeros(0),
        num_nodes=torch.full((rows,), count, dtype=torch.int32),
    )


def verify(form, tree, target_tokens, depth=None):
    depth = len(tree.tokens[0]) - 1 if depth is None else depth
    got = form.verify(tree, torch.as_tensor(target_tokens), depth)
    assert [field.dtype for field in got] == [torch.int32, torch.int32, torch.int64]
    return [field.tolist() for field in got]


def emitted(tokens, path, bonus):
    return [
        [tokens[node] for node in p[1:] if node >= 0] + [b]
        for p, b in zip(path, bonus, strict=True)
    ]


@pytest.mark.parametrize(
    ("target_tokens", "path", "bonus"),
    [
        ([0, 0, 0, 0, 0, 0], [0, -1, -1, -1], 0),
        ([3, 0, 0, 0, 0, 0], [0, 2, -1, -1], 0),
        ([4, 5, 0, 0, 0, 0], [0, 1, 3, -1], 0),
        ([4, 6, 0, 9, 7, 0], [0, 1, 4, 5], 0),
        ([4, 6, 0, 9, 7, 3], [0, 1, 4, 5], 3),
        ([4, 3, 0, 0, 0, 0], [0, 1, -1, -1], 3),  # a child of the root, not of node 1
    ],
)
def test_walk(form, target_tokens, path, bonus):
    tree = make_tree([9, 4, 3, 5, 6, 7], [-1, 0, 0, 1, 1, 4])
    accepted = sum(node > 0 for node in path)
    assert verify(form, tree, [target_tokens], 3) == [[path], [accepted], [bonus]]


def test_depth_bounds_the_walk(form):
    tree = make_tree([9, 1, 1, 1], [-1, 0, 1, 2])
    assert verify(form, tree, [[1, 1, 1, 1]], 0) == [[[0]], [0], [1]]
    assert verify(form, tree, [[1, 1, 1, 1]], 2) == [[[0, 1, 2]], [2], [1]]
    assert verify(form, tree, [[1, 1, 1, 1]], 5) == [[[0, 1, 2, 3, -1, -1]], [3], [1]]


def test_r28_the_parent_judges_its_child(form):
    tree = make_tree([9, 1, 2], [-1, 0, 1])
    path, _, bonus = verify(form, tree, [[1, 2, 3]])
    assert emitted([9, 1, 2], path, bonus) == [[1, 2, 3]]
    assert verify(form, tree, [[0, 2, 3]]) == [[[0, -1, -1]], [0], [0]]


def test_r42_padding_is_never_judged(form):
    tree = make_tree([9, 3, -1, -1], [-1, 0, 1, 1], num_nodes=2)
    assert verify(form, tree, [[3, 4, -1, -1]], 2) == [[[0, 1, -1]], [1], [4]]
    # a node without a live logit has target token -1, as padding has
    assert verify(form, tree, [[3, -1, -1, -1]], 2) == [[[0, 1, -1]], [1], [-1]]
    assert verify(form, tree._replace(num_nodes=torch.zeros(1).int()), [[3, 4, 0, 0]], 1) == [
        [[-1, -1]],
        [0],
        [-1],
    ]


@pytest.mark.parametrize(
    "parents",
    [[-1, 2, 1], [-1, 0, 7], [0, 0, 0], [-1, 2, 0], [-1, -9, 2**31 - 1], [1, 2, 0]],
)
def test_r44_malformed_tree_ends_and_leaves_neighbours_alone(form, parents):
    tree = make_tree([5, 5, 5], [-1, 0, 1], rows=3)
    tree = tree._replace(parents=tree.parents.clone())
    tree.parents[1] = torch.tensor(parents, dtype=torch.int32)
    path, accepted, bonus = verify(form, tree, [[5, 5, 5]] * 3, 4)
    assert path[0] == path[2] == [0, 1, 2, -1, -1]
    assert accepted[0] == accepted[2] == 2
    assert 0 <= accepted[1] <= 2
    assert bonus == [5, 5, 5]


def test_r43_more_nodes_never_accept_less(form):
    rng = np.random.default_rng(0)
    rows, sizes = 8, 20
    parents = [-1, *rng.integers(0, np.arange(1, sizes))]
    tree = make_tree(rng.integers(0, 2, sizes).tolist(), parents, rows=rows * sizes)
    tree = tree._replace(num_nodes=torch.arange(1, sizes + 1).repeat_interleave(rows).int())
    target_tokens = torch.from_numpy(rng.integers(0, 2, (rows, sizes))).repeat(sizes, 1)
    path, accepted, _ = form.verify(tree, target_tokens, 8)
    fewer, more = path[:-rows], path[rows:]
    assert torch.equal(torch.where(fewer >= 0, more, -1), fewer)
    assert (accepted[rows:] >= accepted[:-rows]).all()
    assert accepted.max() > 2


@pytest.mark.parametrize("nodes", [1, 2, 31, 32, 33, 60, 64, 65, 255, 256, 257, 600])
def test_every_size_as_in_the_reference(form, nodes):
    """Trees and nonsense of two tokens, so walks are long and go from one block to the next."""
    rng = np.random.default_rng(nodes)
    parents = rng.integers(-1, np.maximum(np.arange(nodes), 1), (4, nodes))
    parents[1] = np.arange(nodes) - 1
    parents[3, rng.random(nodes) < 0.3] = nodes
    tree = make_tree([0], [-1], rows=4)._replace(
        tokens=torch.from_numpy(rng.choice([4, 5], (4, nodes), p=[0.9, 0.1])),
        parents=torch.from_numpy(parents.astype(np.int32)),
        num_nodes=torch.tensor([nodes, nodes, 0, max(nodes - 1, 1)]).int(),
    )
    target_tokens = torch.from_numpy(rng.choice([4, 5], (4, nodes), p=[0.9, 0.1]))
    for depth in (0, 1, 7, 20):
        wanted = reference.verify(tree, target_tokens, depth)
        for got, field in zip(form.verify(tree, target_tokens, depth), wanted, strict=True):
            assert torch.equal(got, field)


def test_r16_any_strides(form):
    rng = np.random.default_rng(5)
    tree = make_tree([9, *rng.integers(0, 3, 19)], [-1, *rng.integers(0, np.arange(1, 20))], rows=8)
    target_tokens = torch.from_numpy(rng.integers(0, 3, (20, 8))).t()
    plain = tree._replace(tokens=tree.tokens.contiguous(), parents=tree.parents.contiguous())
    strided = tree._replace(
        tokens=plain.tokens.t().contiguous().t(),
        parents=plain.parents.repeat_interleave(2, 1)[:, ::2],
    )
    wanted = verify(form, plain, target_tokens.contiguous(), 5)
    assert verify(form, tree, target_tokens, 5) == wanted
    assert verify(form, strided, target_tokens, 5) == wanted


def test_no_rows(form):
    assert verify(form, make_tree([9, 1], [-1, 0], rows=0), torch.zeros(0, 2).long(), 3) == [[]] * 3
    assert form.verify(make_tree([9], [-1], rows=0), torch.zeros(0, 1).long(), 3)[0].shape == (0, 4)


TREES = {
    "children 1 0": ([9, 1, 0], [-1, 0, 0]),
    "children 0 1": ([9, 0, 1], [-1, 0, 0]),
    "child 2": ([9, 2], [-1, 0]),
    "children 0 1 2": ([9, 0, 1, 2], [-1, 0, 0, 0]),
    "children 2 1 0": ([9, 2, 1, 0], [-1, 0, 0, 0]),
    "no child": ([9], [-1]),
    "the same child twice": ([9, 1, 1, 0], [-1, 0, 0, 0]),
    "twice, and below each": ([9, 1, 1, 0, 2], [-1, 0, 0, 1, 2]),
    "chain": ([9, 0, 0, 0], [-1, 0, 1, 2]),
    "two levels": ([9, 2, 0, 1, 0, 2], [-1, 0, 0, 1, 1, 2]),
}


def law_after(context):
    """Some law of the next token after each context."""
    weights = np.random.default_rng([3, *context]).random(3) + 0.05
    return np.array(P) if not context else weights / weights.sum()


def contexts(tokens, parents):
    found = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


@pytest.mark.parametrize("name", TREES)
def test_r27_exact_law_by_enumeration(fast_form, name):
    tokens, parents = TREES[name]
    laws = np.array([law_after(context) for context in contexts(tokens, parents)])
    drawn = np.array([*itertools.product(range(3), repeat=len(tokens))])
    weights = laws[np.arange(len(tokens)), drawn].prod(1)
    path, _, bonus = verify(fast_form, make_tree(tokens, parents, rows=len(drawn)), drawn)

    starts = {}  # probability that what is emitted starts with these tokens
    for text, weight in zip(emitted(tokens, path, bonus), weights, strict=True):
        for end in range(len(text) + 1):
            start = tuple(text[:end])
            starts[start] = starts.get(start, 0) + weight
    for start, probability in starts.items():
        nexts = [starts.get((*start, token), 0) for token in range(3)]
        if sum(nexts):
            assert sum(nexts) == pytest.approx(probability)
            assert np.array(nexts) / probability == pytest.approx(law_after(start))
    if name == "the same child twice":
        assert not any(node == 2 for p in path for node in p)


@pytest.fixture(scope="module")
def draws():
    """Tokens drawn at the root and after tokens 0, 1 and 2, for 200,000 seeds."""
    laws = torch.tensor(np.array([law_after(context) for context in [(), (0,), (1,), (2,)]]))
    rows = 200_000
    setting = torch.ones(rows)
    return eagle2_kernels.sample(
        laws.log().float().expand(rows, -1, -1),
        setting,
        setting.int() * 0,
        setting,
        setting * 0,
        torch.arange(rows),
        torch.tensor([7, 8, 8, 8]).expand(rows, -1),
    )


def chi_square(tokens, law):
    counts = np.bincount(tokens, minlength=3)
    return float(((counts - len(tokens) * law) ** 2 / (len(tokens) * law)).sum())


@pytest.mark.parametrize("children", [[1, 0], [0, 1], [2], [0, 1, 2], []])
def test_r27_law_over_many_seeds(fast_form, draws, children):
    tree = make_tree([9, *children], [-1] + [0] * len(children), rows=len(draws))
    path, accepted, bonus = fast_form.verify(tree, draws[:, [0, *(1 + c for c in children)]], 1)
    first = torch.where(accepted > 0, tree.tokens.gather(1, path.clamp(min=0).long())[:, 1], bonus)
    assert torch.equal(first, draws[:, 0])  # whatever the children are and their order
    assert chi_square(first.numpy(), np.array(P)) < 18.4  # 0.9999 quantile, 2 degrees of freedom
    for child in children:
        second = bonus[(accepted > 0) & (first == child)]
        assert chi_square(second.numpy(), law_after((child,))) < 18.4


def test_operator_dispatches_to_the_same_result(form):
    rng = np.random.default_rng(1)
    tree = make_tree(rng.integers(0, 3, 20), [-1, *rng.integers(0, np.arange(1, 20))], rows=9)
    tree = tree._replace(depths=tree.parents, ancestors=tree.tokens, scores=tree.tokens.float())
    target_tokens = torch.from_numpy(rng.integers(0, 3, (9, 20)))
    wanted = form.verify(tree, target_tokens, 19)
    for got, field in zip(eagle2_kernels.verify(tree, target_tokens), wanted, strict=True):
        assert torch.equal(got, field)
