"""tree_attention in every form, against attention over the listed slots in float64."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels
from eagle2_kernels.reference.words import pack

DTYPES = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NODES = [1, 2, 16, 31, 32, 33, 60, 63, 64, 65, 70, 128, 130]
DIMS, FEW = [8, 64, 72, 80, 96, 112, 128, 256], [1, 2, 5, 17, 60]
RATIOS = [(48, 2), (28, 4), (71, 1), (40, 2), (6, 6), (9, 3)]  # query heads, kv heads
WINDOWS = [1, 2, 3, 5, 8, 64, 1000]
GOLDEN = [-1, 0, 0, 1, 1, 2, 3]  # root; 1, 2; 3, 4 below 1; 5 below 2; 6 below 3


class Case(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    prefix_len: torch.Tensor
    ancestors: torch.Tensor
    num_nodes: torch.Tensor
    scale: float
    block_table: torch.Tensor | None = None
    window: int | None = None


def paired(*lists):
    """Every entry of the longest list, with those of the others in turn: for Triton's interpreter,
    to which every combination is too much."""
    longest = max(map(len, lists))
    return [tuple(x[i % len(x)] for x in lists) for i in range(longest)]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def words_of(parents):
    """Ancestor words [N, W] of one tree."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return pack(seen)


def random_parents(nodes):
    return [-1] + [int(torch.randint(max(0, node - 6), node, ())) for node in range(1, nodes)]


def make_case(nodes=7, heads=4, groups=2, dim=16, prefix=(5,), dtype=torch.float32, parents=None):
    batch, slots = len(prefix), max(prefix) + nodes + 3
    trees = [parents or random_parents(nodes) for _ in prefix]
    k_cache, v_cache = torch.randn(2, batch, slots, groups, dim).to(dtype)
    return Case(
        torch.randn(batch, nodes, heads, dim).to(dtype),
        k_cache,
        v_cache,
        int32(*prefix),
        torch.stack([words_of(tree) for tree in trees]),
        int32(*[nodes] * batch),
        dim**-0.5,
    )


def paged(case, size=4):
    """The same caches in shuffled blocks, with NaN in all that is not used."""
    batch, slots = case.k_cache.shape[:2]
    columns = -(-slots // size) + 1
    table = torch.randperm(batch * columns + 2)[: batch * columns].view(batch, columns).int()
    caches = []
    for cache in (case.k_cache, case.v_cache):
        blocks = cache.new_full((batch * columns + 2, size, *cache.shape[2:]), math.nan)
        for b, slot in torch.cartesian_prod(torch.arange(batch), torch.arange(slots)).tolist():
            blocks[table[b, slot // size], slot % size] = cache[b, slot]
        caches.append(blocks)
    for b in range(batch):
        used = int(case.prefix_len[b] + case.num_nodes[b])
        table[b, -(-used // size) :] = -1
    return case._replace(k_cache=caches[0], v_cache=caches[1], block_table=table)


def brute_attention(case):
    batch, nodes, heads, _ = case.q.shape
    group = heads // case.k_cache.shape[2]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for b, n in torch.cartesian_prod(torch.arange(batch), torch.arange(nodes)).tolist():
        prefix = int(case.prefix_len[b])
        bits = sum((int(w) % 2**64) << 64 * i for i, w in enumerate(case.ancestors[b, n]))
        line = [t for t in range(int(case.num_nodes[b])) if bits >> t & 1]
        if not line:
            continue
        seen = [*range(prefix), *(prefix + t for t in line)]
        if case.window is not None:
            positions = [*range(prefix), *range(prefix, prefix + len(line))]
            last = prefix + len(line) - 1
            seen = [s for s, p in zip(seen, positions, strict=True) if p > last - case.window]
        for h in range(heads):
            k, v = (x[b, seen, h // group].double() for x in (case.k_cache, case.v_cache))
            weights = (k @ case.q[b, n, h].double() * case.scale).softmax(0)
            out[b, n, h] = weights @ v
    return out


def check(form, case, listed=None):
    """`listed`: the same case with contiguous caches."""
    out = form.tree_attention(*case)
    assert out.shape == case.q.shape
    assert out.dtype == case.q.dtype
    wanted = brute_attention(listed or case)
    tolerance = DTYPES[case.q.dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    return out


def test_golden_tree(form):
    seen = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]
    case = make_case(parents=GOLDEN, prefix=(2,), heads=1, groups=1, dim=16)
    case.k_cache.zero_()  # all weights equal: the output is the mean of what is seen
    case.v_cache.zero_()
    case.v_cache[0, 2:9, 0, :7] = torch.eye(7)
    seen = torch.tensor(seen, dtype=torch.float32)
    wanted = seen / (seen.sum(-1, keepdim=True) + 2)
    out = form.tree_attention(*case)[0, :, 0, :7]
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize(("nodes", "dtype"), [*itertools.product(NODES, DTYPES)])
def test_trees_of_any_size(fast_form, dtype, nodes):
    check(fast_form, make_case(nodes=nodes, prefix=(70, 3), dtype=dtype, heads=6))


@pytest.mark.parametrize(("nodes", "dtype"), paired(NODES, [*DTYPES]))
def test_any_size_of_tree(form, dtype, nodes):
    check(form, make_case(nodes=nodes, prefix=(70,), dtype=dtype, heads=3, groups=1))


@pytest.mark.parametrize(("dim", "nodes"), [*itertools.product(DIMS, FEW)])
def test_r36_head_dims_and_few_rows(fast_form, dim, nodes):
    check_r36(fast_form, dim, nodes)


@pytest.mark.parametrize(("dim", "nodes"), paired(DIMS, FEW))
def test_r36_head_dims(form, dim, nodes):
    check_r36(form, dim, nodes)


def check_r36(form, dim, nodes):
    case = make_case(nodes=nodes, heads=8, groups=2, dim=dim, prefix=(5,), dtype=torch.float16)
    wide = [torch.full((*x.shape[:-1], 272), math.nan, dtype=x.dtype) for x in case[:3]]
    for buffer, values in zip(wide, case[:3], strict=True):
        buffer[..., :dim] = values
    poisoned = case._replace(
        **{
            name: buffer[..., :dim]
            for name, buffer in zip(("q", "k_cache", "v_cache"), wide, strict=True)
        }
    )
    assert torch.equal(check(form, case), check(form, poisoned))


@pytest.mark.parametrize(("ratio", "nodes"), [*itertools.product(RATIOS, [1, 5])])
def test_r37_query_heads_read_their_own_kv_head(fast_form, ratio, nodes):
    check_r37(fast_form, *ratio, nodes)


@pytest.mark.parametrize(("ratio", "nodes"), paired(RATIOS, [5, 1]))
def test_r37_query_heads(form, ratio, nodes):
    check_r37(form, *ratio, nodes)


def check_r37(form, heads, groups, nodes):
    case = make_case(nodes=nodes, heads=heads, groups=groups, dim=8, prefix=(20,))
    check(form, case)
    case.v_cache[:] = torch.arange(groups)[:, None]
    out = form.tree_attention(*case)
    wanted = torch.arange(groups).repeat_interleave(heads // groups).float()
    torch.testing.assert_close(out, wanted[:, None].expand_as(out))


@pytest.mark.parametrize(("heads", "groups"), [(3, 2), (33, 2)])
def test_r37_heads_that_do_not_divide_are_an_error(heads, groups):
    case = make_case(heads=groups, groups=groups, dim=8)
    case = case._replace(q=torch.zeros(1, 7, heads, 8))
    with pytest.raises(ValueError, match="multiple of the cache's G=2"):
        eagle2_kernels.tree_attention(*case)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "heads"), [("k_cache", 2), ("v_cache", 12), ("v_cache", 2)])
def test_r31_a_bad_node_reaches_its_descendants_alone(form, bad, name, heads):
    case = make_case(parents=GOLDEN, heads=heads, groups=2)
    clean = form.tree_attention(*case)
    getattr(case, name)[0, 5 + 3, :, 9] = bad  # node 3, whose only child is 6
    out = form.tree_attention(*case)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(out[:, others], clean[:, others])
    if name == "v_cache":
        assert not out[0, [3, 6], :, 9].isfinite().any()
        channels = [e for e in range(16) if e != 9]
        assert torch.equal(out[..., channels], clean[..., channels])
    elif math.isnan(bad):
        assert out[0, [3, 6]].isnan().all()


def test_a_bad_query_spoils_its_own_row(form):
    case = make_case(nodes=5, prefix=(70,))
    clean = form.tree_attention(*case)
    case.q[0, 2, 1, 3] = math.nan
    out = form.tree_attention(*case)
    assert out[0, 2, 1].isnan().all()
    out[0, 2, 1] = clean[0, 2, 1]
    assert torch.equal(out, clean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache"])
def test_nothing_that_is_seen_is_finite(form, bad, name):
    """Scores of -inf alone are still scores: the weights are 0 / 0, as in plain attention."""
    case = make_case(nodes=3, prefix=(530, 0), dtype=torch.float16, heads=2, groups=1)
    case.q.abs_()
    case.k_cache.abs_()
    case.ancestors[:, 2] = 0
    getattr(case, name).fill_(bad)
    out = form.tree_attention(*case)
    assert (out[:, 2] == 0).all()
    assert not out[:, :2].isfinite().any()
    assert name == "v_cache" or out[:, :2].isnan().all()


@pytest.mark.parametrize(("window", "node"), [*itertools.product([None, 6], [0, 4, 6])])
def test_what_a_node_does_not_see_never_reaches_it(form, window, node):
    case = make_case(parents=GOLDEN, prefix=(70,), heads=2, groups=1)._replace(window=window)
    clean = form.tree_attention(*case)
    seen = torch.zeros(case.k_cache.shape[1], dtype=torch.bool)
    line = [node]
    while line[0]:
        line.insert(0, GOLDEN[line[0]])
    seen[0 if window is None else 70 + len(line) - window : 70] = True
    seen[[70 + ancestor for ancestor in line]] = True
    case.k_cache[:, ~seen] = case.v_cache[:, ~seen] = math.nan
    case.q[:, [other for other in range(7) if other != node]] = math.nan
    assert torch.equal(form.tree_attention(*case)[:, node], clean[:, node])


def test_stale_rows_are_never_read(form):
    case = make_case(nodes=9, prefix=(6, 11))
    case = case._replace(num_nodes=int32(9, 5))
    wanted = form.tree_attention(*case)
    for b in range(2):
        used = int(case.prefix_len[b] + case.num_nodes[b])
        case.k_cache[b, used:] = case.v_cache[b, used:] = math.nan
    assert torch.equal(form.tree_attention(*case), wanted)


def test_padding_rows_are_zero(form):
    case = make_case(nodes=9, prefix=(6, 0, 3))
    case.ancestors[:, 6:] = 0
    case = case._replace(num_nodes=int32(6, 4, 0))  # bits from there on are not looked at
    out = check(form, case)
    assert (out[:, 6:] == 0).all()
    assert (out[2] == 0).all()
    only_late_bits = torch.full_like(case.ancestors, -(2**63))
    out = form.tree_attention(*case._replace(ancestors=only_late_bits))
    assert (out == 0).all()


@pytest.mark.parametrize(("window", "nodes"), [*itertools.product(WINDOWS, [1, 7, 40])])
def test_window(fast_form, window, nodes):
    case = make_case(nodes=nodes, prefix=(5, 90))
    check(fast_form, case._replace(window=window))


@pytest.mark.parametrize(("window", "nodes"), paired(WINDOWS, [7, 40]))
def test_any_window(form, window, nodes):
    case = make_case(nodes=nodes, prefix=(5, 90), heads=2, groups=1)
    check(form, case._replace(window=window))


@pytest.mark.parametrize("window", [1, 63, 64, 65, 100, 129, 130, 140])
def test_window_across_the_words_of_a_chain(form, window):
    case = make_case(nodes=130, prefix=(20,), heads=1, groups=1, parents=[*range(-1, 129)])
    check(form, case._replace(window=window))


def test_r31_a_bad_value_at_the_edge_of_the_window(form):
    """Slot 87 is seen from depths 1..3 of the tree alone."""
    case = make_case(parents=GOLDEN, prefix=(90,), heads=2, groups=2)._replace(window=6)
    clean = check(form, case)
    case.v_cache[0, 87, :, 9] = math.nan
    out = form.tree_attention(*case)
    assert out[0, :6, :, 9].isnan().all()
    assert torch.equal(out[0, 6], clean[0, 6])
    channels = [e for e in range(16) if e != 9]
    assert torch.equal(out[..., channels], clean[..., channels])


@pytest.mark.parametrize("slot", [3, 66])  # in a whole block of slots, in the last one
def test_r31_a_bad_value_in_the_prefix_reaches_all_nodes(form, slot):
    case = make_case(nodes=5, prefix=(70,), heads=2)
    clean = form.tree_attention(*case)
    case.v_cache[0, slot, :, 9] = math.nan
    case.ancestors[0, 4] = 0
    out = form.tree_attention(*case)
    assert out[0, :4, :, 9].isnan().all()
    assert (out[0, 4] == 0).all()
    channels = [e for e in range(16) if e != 9]
    assert torch.equal(out[0, :4, :, channels], clean[0, :4, :, channels])


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 256)])
@pytest.mark.parametrize("window", [None, 700])
def test_long_prefixes(form, dtype, dim, window):
    """Those of a batch differ: what is split for the longest is not for the others."""
    case = make_case(nodes=9, prefix=(1100, 0, 300), heads=4, groups=1, dim=dim, dtype=dtype)
    case = case._replace(window=window, num_nodes=int32(9, 9, 0))
    check(form, case)
    check(form, paged(case, 16), listed=case)


@pytest.mark.parametrize(
    ("dtype", "size", "window"), [*itertools.product(DTYPES, [1, 4, 16], [None, 6])]
)
def test_paged(fast_form, dtype, size, window):
    case = make_case(nodes=9, prefix=(6, 33, 0), dtype=dtype)._replace(window=window)
    check(fast_form, paged(case, size), listed=case)


@pytest.mark.parametrize(("dtype", "size", "window"), paired([*DTYPES], [1, 4, 16], [None, 6]))
def test_pages_of_any_size(form, dtype, size, window):
    case = make_case(nodes=9, prefix=(6, 33, 0), dtype=dtype)._replace(window=window)
    check(form, paged(case, size), listed=case)


def test_leaves_of_a_draft_level(form):
    """Fewer queries than tail slots, and slots that no query sees."""
    case = make_case(nodes=80, prefix=(12,))
    leaves = [70, 71, 79]
    case = case._replace(q=case.q[:, leaves], ancestors=case.ancestors[:, leaves])
    check(form, case)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat((x, x), 2)[:, :, : x.shape[2]],
        lambda x: x[:1].expand(3, -1, -1, -1),
    ],
)
def test_r16_any_strides(form, view):
    case = make_case(nodes=5, heads=4, prefix=(9, 4, 7))
    strided = [view(x) for x in case[:3]]
    ancestors = case.ancestors.transpose(0, 1).contiguous().transpose(0, 1)
    lengths = torch.stack((case.prefix_len, case.num_nodes), 1)
    out = form.tree_attention(*strided, lengths[:, 0], ancestors, lengths[:, 1], case.scale)
    wanted = form.tree_attention(*(x.contiguous() for x in strided), *case[3:])
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)


def test_r14_slots_beyond_32_bits(form):
    # 4 GiB of which only the pages that are written come into being
    torch.utils.deterministic.fill_uninitialized_memory = False
    case = make_case(prefix=(5, 8, 6), dtype=torch.float16, groups=2, dim=16)
    caches = []
    for cache in case[1:3]:
        storage = torch.empty(2**31 + 2**20, dtype=torch.float16)
        far = storage.as_strided(cache.shape, (2**30, 32, 16, 1))
        caches.append(far.copy_(cache))
    check(form, case._replace(k_cache=caches[0], v_cache=caches[1]))


def test_r33_one_call_leaves_nothing_for_the_next(form):
    large = make_case(nodes=70, prefix=(20, 5), heads=2, groups=1, dim=16)
    small = make_case(nodes=3, prefix=(4, 0), heads=2, groups=1, dim=16)
    one = make_case(nodes=1, prefix=(150,), heads=2, dim=8)
    first = [form.tree_attention(*case) for case in (one, small, large)]
    again = [form.tree_attention(*case) for case in (large, small, one)]
    for got, wanted in zip(again, reversed(first), strict=True):
        assert torch.equal(got, wanted)
    row = Case(*(x[:1] if isinstance(x, torch.Tensor) else x for x in large))
    torch.testing.assert_close(form.tree_attention(*row), first[2][:1], atol=1e-6, rtol=1e-6)


def test_empty_batch_and_no_prefix(form):
    case = make_case(prefix=(0,))
    check(form, case)
    none = Case(*(x[:0] if isinstance(x, torch.Tensor) else x for x in case))
    assert form.tree_attention(*none).shape == (0, 7, 4, 16)


def test_scores_far_apart(form):
    case = make_case(prefix=(200,), nodes=3)
    # multiples of 2 up to 512, whole numbers in any order of summation: no rounding, no near-ties
    case.q.copy_(torch.randint(-8, 9, case.q.shape) * 8)
    case.k_cache.copy_(torch.randint(-2, 3, case.k_cache.shape))
    check(form, case)
    case.k_cache.fill_(-3e4)  # all scores equal and very low
    case.q.fill_(1e3)
    check(form, case)


@settings(max_examples=60)
@given(st.data())
def test_any_tree_any_row_count(fast_form, data):
    check_any_tree(fast_form, data)


@settings(max_examples=5)
@given(st.data())
def test_any_tree(form, data):
    check_any_tree(form, data)


def check_any_tree(form, data):
    nodes = data.draw(st.integers(1, 20))
    parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, nodes)]
    groups = data.draw(st.integers(1, 3))
    case = make_case(
        nodes=nodes,
        parents=parents,
        groups=groups,
        heads=groups * data.draw(st.integers(1, 5)),
        dim=8 * data.draw(st.integers(1, 10)),
        prefix=(data.draw(st.integers(0, 150)), data.draw(st.integers(0, 10))),
    )
    counts = int32(nodes, data.draw(st.integers(0, nodes)))
    window = data.draw(st.none() | st.integers(1, 30))
    check(form, case._replace(num_nodes=counts, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nodes", "heads"), [(1, 1), (1, 3), (1, 5), (2, 4), (9, 3), (60, 4)])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_every_instruction_set(level, dtype, nodes, heads, dim):
    case = make_case(nodes=nodes, heads=2 * heads, dim=dim, prefix=(150, 64), dtype=dtype)
    check(level, case)
    check(level, case._replace(window=9))
    check(level, paged(case), listed=case)


def test_r31_bad_node_in_every_instruction_set(level):
    for heads in (1, 12):
        test_r31_a_bad_node_reaches_its_descendants_alone(level, math.nan, "v_cache", 2 * heads)
        test_r31_a_bad_node_reaches_its_descendants_alone(level, math.nan, "k_cache", 2 * heads)
    for bad, name in itertools.product((math.nan, -math.inf), ("q", "k_cache", "v_cache")):
        test_nothing_that_is_seen_is_finite(level, bad, name)


def test_threads_do_not_change_the_result(fast_form):
    case = make_case(nodes=30, heads=9, groups=3, dim=64, prefix=(900,))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(fast_form.tree_attention(*case))
    torch.set_num_threads(threads)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=2e-6, rtol=2e-6)
