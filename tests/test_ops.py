"""The contract of the operators: checks, schemas, fake kernels, compilation."""

import copy

import pytest
import torch
from conftest import HAS_GPU, forms_with
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import eagle2_kernels
from eagle2_kernels import Candidates, ops, reference

LOOKED_UP = torch.ops.eagle2
INT32 = torch.int32
DTYPES = [torch.float32, torch.bfloat16]
B, N, V, K, S, H, G, E = 2, 5, 12, 3, 16, 4, 2, 8


def make_arguments(batch=B, dtype=torch.float32):
    """A dispatcher's arguments for every operator."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    rows = torch.ones(batch)
    candidates = Candidates(
        tokens=torch.arange(6).repeat(batch, 1),
        scores=-torch.arange(6.0).repeat(batch, 1),
        parents=torch.tensor([-1, -1, 0, 0, 1, 1], dtype=INT32).repeat(batch, 1),
    )
    sizes = torch.full((batch,), N, dtype=INT32)
    roots = torch.zeros(batch, dtype=torch.int64)
    tree = reference.rerank(candidates, roots, sizes, N)
    tokens = torch.full((batch, N), 1)
    cache = (randn(batch, S, G, E), randn(batch, S, G, E))
    prefix_len, path = sizes + 1, torch.tensor([0, 2, 4], dtype=INT32).repeat(batch, 1)
    sampling = (rows, sizes, rows * 0.9, rows * 0.1, roots + 3, tokens + torch.arange(N))
    caches = tuple(torch.stack((half, half + 1)) for half in cache)
    return {
        "expand": (randn(batch, 4, V), -torch.ones(batch, 4), K, torch.arange(V) + 2),
        "select_leaves": (candidates.scores, K),
        "enter_level": (
            *(*candidates, 2, torch.arange(4).repeat(batch, 1).view(batch, 2, 2)),
            *(-torch.arange(4.0).repeat(batch, 1).view(batch, 2, 2), candidates.parents[:, :2]),
            *(roots[:, None, None].expand(-1, 2, 1), 7, K, sizes),
        ),
        "rerank": (*candidates, roots, sizes, N),
        "tree_attention": (
            *(randn(batch, N, H, E), *cache, prefix_len, tree.ancestors, sizes, 0.3),
            *(None, 4),
        ),
        "sample": (randn(batch, N, V), *sampling),
        "verify": (*tree, tokens, 3),
        "accept": (*tree, randn(batch, N, V), *sampling, 3),
        "compact_kv": (*caches, path, sizes - 3, prefix_len, None),
    }


def call(name, arguments):
    """The public function with a dispatcher's arguments."""
    return getattr(eagle2_kernels, name)(*ops.packed(name, arguments))


def with_outs(name, arguments):
    """A dispatcher's arguments with the memory for the results behind them."""
    return *arguments, *map(torch.zeros_like, as_tuple(call(name, copy.deepcopy(arguments))))


def as_tuple(results):
    return results if isinstance(results, tuple) else () if results is None else (results,)


def test_every_operator_is_here():
    assert set(make_arguments()) == set(ops.OPERATORS) == set(reference.__all__)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("name", ops.OPERATORS)
def test_r35_opcheck(name, batch, dtype):
    arguments = with_outs(name, make_arguments(batch, dtype)[name])
    torch.library.opcheck(getattr(LOOKED_UP, name).default, arguments)


@pytest.mark.parametrize("name", ["expand", "tree_attention", "compact_kv"])
def test_r35_opcheck_of_options(name):
    arguments = make_arguments(2)[name]
    table = torch.tensor([[0, 1], [2, 3]], dtype=INT32)
    if name == "expand":
        arguments = (*arguments[:3], None)
    elif name == "tree_attention":
        blocks = [cache.reshape(4, S // 2, G, E) for cache in arguments[1:3]]
        arguments = (arguments[0], *blocks, *arguments[3:7], table, None)
    else:
        blocks = [cache.reshape(2, 4, S // 2, G, E) for cache in arguments[:2]]
        arguments = (*blocks, *arguments[2:5], table)
    torch.library.opcheck(getattr(LOOKED_UP, name).default, with_outs(name, arguments))


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_r34_shapes_depend_on_sizes_only(name):
    arguments = make_arguments()[name]
    wanted = call(name, make_arguments()[name])
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        got = call(name, fake)
        plain = getattr(reference, name)(*ops.packed(name, fake))
    if name == "compact_kv":
        assert got is plain is None
        return
    for outputs in (got, plain):
        for one, other in zip(as_tuple(outputs), as_tuple(wanted), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_dispatched_result_is_the_reference_s(name):
    ours, theirs = make_arguments()[name], make_arguments()[name]
    got = call(name, ours)
    wanted = getattr(reference, name)(*ops.packed(name, theirs))
    torch.testing.assert_close((got, ours), (wanted, theirs))


WITH_OUT = [name for name in ops.OPERATORS if name != "compact_kv"]


@pytest.mark.parametrize(("one_form", "name"), forms_with(*WITH_OUT))
def test_results_go_where_they_are_wanted(one_form, name):
    arguments = make_arguments()[name]
    wanted = getattr(one_form, name)(*ops.packed(name, arguments))
    out = tree_map(torch.zeros_like, wanted)
    addresses = [memory.data_ptr() for memory in as_tuple(out)]
    got = getattr(one_form, name)(*ops.packed(name, arguments), out=out)
    torch.testing.assert_close((out, got), (wanted, wanted), rtol=0, atol=0, equal_nan=True)
    if not HAS_GPU:  # there, results are copies of what lies on the device
        assert [memory.data_ptr() for memory in as_tuple(got)] == addresses


@pytest.mark.parametrize("name", WITH_OUT)
def test_out_of_the_public_operators(name):
    arguments = ops.packed(name, make_arguments()[name])
    function = getattr(eagle2_kernels, name)
    wanted = function(*arguments)
    out = tree_map(torch.zeros_like, wanted)
    got = function(*arguments, out=out)
    assert type(got) is type(wanted)
    torch.testing.assert_close((out, got), (wanted, wanted), rtol=0, atol=0)
    assert all(x is y for x, y in zip(as_tuple(got), as_tuple(out), strict=True))

    first, *others = as_tuple(out)
    several, place = isinstance(out, tuple), r"out\[0\]" if isinstance(out, tuple) else "out"
    unfit = {
        "wanted shape": first.new_zeros(*first.shape, 2),
        "wanted (int|float)": first.to(torch.float64),
        "wanted contiguous memory": torch.stack((first, first), -1)[..., 0],
        "wanted it on cpu": first.to("meta"),
        "wanted a tensor, got list": [],
    }
    for message, memory in unfit.items():
        with pytest.raises(ValueError, match=f"^{place}: {message}"):
            function(*arguments, out=(memory, *others) if several else memory)
    if several:
        with pytest.raises(ValueError, match=rf"^out: wanted a tuple of {len(out)} tensors, got"):
            function(*arguments, out=tuple(others))


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_r35_compiled_verify_equals_eager(backend):
    if backend == "inductor":
        torch.use_deterministic_algorithms(False)
    compiled = torch.compile(
        lambda tree, tokens, out=None: eagle2_kernels.verify(tree, tokens, 3, out=out),
        fullgraph=True,
        backend=backend,
    )
    tree, tokens, _ = ops.packed("verify", make_arguments()["verify"])
    wanted = eagle2_kernels.verify(tree, tokens, 3)
    torch.testing.assert_close(compiled(tree, tokens), wanted)
    out = tuple(torch.zeros_like(field) for field in wanted)
    compiled(tree, tokens, out)
    torch.testing.assert_close(out, wanted)


def test_r35_compaction_of_two_views_of_one_buffer():
    *caches, path, accepted, prefix_len, _ = make_arguments()["compact_kv"]
    eager = torch.stack(caches)
    compiled = eager.clone()

    def compact(buffer):
        eagle2_kernels.compact_kv(buffer[0], buffer[1], path, accepted, prefix_len)
        return buffer.sum()

    compact(eager)
    torch.compile(compact, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(eager, compiled)
    assert not torch.equal(eager, torch.stack(caches))


WRONG = [
    ("expand", 0, torch.zeros(2, V), "logits: wanted shape [any, any, any], got [2, 12]"),
    ("expand", 0, torch.zeros(2, 4, V, dtype=torch.int64), "logits: wanted float32 or float16"),
    ("expand", 0, [1], "logits: wanted a tensor, got list"),
    ("expand", 1, torch.zeros(2, 3), "leaf_scores: wanted shape [2, 4], got [2, 3]"),
    ("expand", 1, torch.zeros(2, 4).half(), "leaf_scores: wanted float32, got float16"),
    ("expand", 1, torch.zeros(2, 4, device="meta"), "leaf_scores: wanted it on cpu, got meta"),
    ("expand", 2, 13, "k: wanted 1..V=12, got 13"),
    ("expand", 2, 0, "k: wanted 1..V=12, got 0"),
    ("expand", 3, torch.arange(V - 1), "draft_to_target: wanted shape [12], got [11]"),
    ("expand", 3, torch.arange(V).int(), "draft_to_target: wanted int64, got int32"),
    ("select_leaves", 0, torch.zeros(6), "scores: wanted shape [any, any], got [6]"),
    ("select_leaves", 0, torch.zeros(2, 6).bfloat16(), "scores: wanted float32, got bfloat16"),
    ("select_leaves", 1, 7, "k: wanted 1..M=6, got 7"),
    ("rerank", 0, torch.zeros(2, 6).int(), "candidates.tokens: wanted int64, got int32"),
    ("rerank", 1, torch.zeros(2, 5), "candidates.scores: wanted shape [2, 6], got [2, 5]"),
    ("rerank", 2, torch.zeros(2, 6).long(), "candidates.parents: wanted int32, got int64"),
    ("rerank", 3, torch.zeros(3).long(), "root_tokens: wanted shape [2], got [3]"),
    ("rerank", 4, torch.zeros(2).long(), "num_nodes: wanted int32, got int64"),
    ("rerank", 4, 0, "num_nodes: wanted 1 or more, got 0"),
    ("rerank", 5, 0, "max_nodes: wanted 1 or more, got 0"),
    ("tree_attention", 0, torch.zeros(2, N, 3, E), "q: wanted heads H a multiple of the cache's"),
    ("tree_attention", 1, torch.zeros(2, S, G, 16), "k_cache: wanted shape [2, any, any, 8]"),
    ("tree_attention", 1, torch.zeros(2, S, G, E).half(), "k_cache: wanted float32, got float16"),
    ("tree_attention", 2, torch.zeros(2, 1, G, E), "v_cache: wanted shape [2, 16, 2, 8]"),
    ("tree_attention", 3, torch.zeros(2).long(), "prefix_len: wanted int32, got int64"),
    ("tree_attention", 4, torch.zeros(2, 4, 1).long(), "ancestors: wanted shape [2, 5, any]"),
    ("tree_attention", 5, torch.zeros(1).int(), "num_nodes: wanted shape [2], got [1]"),
    ("tree_attention", 8, 0, "window: wanted 1 or more, got 0"),
    ("sample", 0, torch.zeros(2, N, 0), "logits: wanted a vocabulary of 1 or more"),
    ("sample", 1, torch.zeros(2).double(), "temperature: wanted float32, got float64"),
    ("sample", 2, torch.zeros(2), "top_k: wanted int32, got float32"),
    ("sample", 3, torch.zeros(1), "top_p: wanted shape [2], got [1]"),
    ("sample", 4, torch.zeros(2, 1), "min_p: wanted shape [2], got [2, 1]"),
    ("sample", 5, torch.zeros(2).int(), "seed: wanted int64, got int32"),
    ("sample", 6, torch.zeros(2, 4).long(), "positions: wanted shape [2, 5], got [2, 4]"),
    ("verify", 0, torch.zeros(2, N).int(), "tree.tokens: wanted int64, got int32"),
    ("verify", 1, torch.zeros(2, 4).int(), "tree.parents: wanted shape [2, 5], got [2, 4]"),
    ("verify", 5, torch.zeros(2).long(), "tree.num_nodes: wanted int32, got int64"),
    ("verify", 6, torch.zeros(2, 4).long(), "target_tokens: wanted shape [2, 5], got [2, 4]"),
    ("verify", 7, -1, "depth: wanted 0 or more, got -1"),
    ("accept", 6, torch.zeros(2, 4, V), "positions: wanted shape [2, 4], got [2, 5]"),
    ("accept", 13, -1, "depth: wanted 0 or more, got -1"),
    ("compact_kv", 0, torch.zeros(2, 3, S, G, E), "k_cache: wanted shape [any, 2, any, any, any]"),
    ("compact_kv", 1, torch.zeros(1, 2, S, G, E), "v_cache: wanted shape [2, 2, 16, 2, 8]"),
    ("compact_kv", 1, torch.zeros(2, 2, S, G, E).half(), "v_cache: wanted float32, got float16"),
    ("compact_kv", 2, torch.zeros(2, 3).long(), "path: wanted int32, got int64"),
    ("compact_kv", 3, torch.zeros(2).long(), "accept_length: wanted int32, got int64"),
    ("compact_kv", 4, torch.zeros(3).int(), "prefix_len: wanted shape [2], got [3]"),
    ("compact_kv", 5, torch.zeros(3, 1).int(), "block_table: wanted shape [2, any], got [3, 1]"),
]


@pytest.mark.parametrize(("name", "place", "value", "message"), WRONG)
def test_r49_wrong_argument_is_named(name, place, value, message):
    arguments = [*make_arguments()[name]]
    arguments[place] = value
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is compared below
        call(name, arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("dim", [4, 12, 264])
def test_head_dim_out_of_range_is_named(dim):
    arguments = [*make_arguments()["tree_attention"]]
    arguments[0], cache = torch.zeros(2, N, H, dim), torch.zeros(2, S, G, dim)
    with pytest.raises(ValueError, match=f"head dim E a multiple of 8 up to 256, got E={dim}"):
        call("tree_attention", [arguments[0], cache, cache, *arguments[3:]])
