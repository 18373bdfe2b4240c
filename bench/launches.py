"""What the launchers can launch: on tensors without memory, every specialisation once."""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import eagle2_kernels.triton as form
from eagle2_kernels import Candidates, Tree, results
from eagle2_kernels.integrations import sglang_triton_link, sglang_triton_walk
from eagle2_kernels.triton.verify import walk

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32, INT64, FLOAT32 = torch.int32, torch.int64, torch.float32
# operator -> what it launches: (description, call) pairs
LAUNCHES: dict[str, Callable[[], Iterator[tuple[str, Callable]]]] = {}


def meta(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_tree(batch: int, nodes: int) -> Tree:
    words = -(-nodes // 64)
    return Tree(
        meta(batch, nodes, dtype=INT64),
        meta(batch, nodes, dtype=INT32),
        meta(batch, nodes, dtype=INT32),
        meta(batch, nodes, words, dtype=INT64),
        meta(batch, nodes),
        meta(batch, dtype=INT32),
    )


def launches(function):
    LAUNCHES[function.__name__] = function
    return function


def trials(operator: str, shape: str, call: Callable) -> Iterator[tuple[str, Callable]]:
    """A launch with each of the configurations that a search tries besides the usual one."""
    launcher = importlib.import_module(f"{form.__name__}.{operator}")

    def launch(number: int) -> None:
        def nth(kind, candidates, launch):
            return candidates[min(number, len(candidates) - 1)]

        with mock.patch.object(launcher, "choose", nth):
            call()

    for number in (1, 2, 3):
        yield f"{shape}, trial {number}", functools.partial(launch, number)


@launches
def expand():
    # the default, and the longest rows with the most children that a split keeps
    sizes = [(dtype, *size) for dtype in FLOATS for size in ((128256, 10), (262144, 64))]
    sizes += [(torch.bfloat16, *size) for size in ((100, 1), (4001, 20), (32000, 100))]
    for dtype, vocab, k in sizes:
        logits, leaf_scores, ids = meta(2, 10, vocab, dtype=dtype), meta(2, 10), None
        if k != 10:
            ids = meta(vocab, dtype=INT64)
        yield (
            f"{dtype} V={vocab} K={k}",
            lambda x=logits, s=leaf_scores, k=k, i=ids: form.expand(x, s, k, i),
        )
    logits = meta(32000, 10, 2).permute(2, 1, 0)
    yield "strided V=32000 K=10", lambda x=logits: form.expand(x, meta(10, 2).t(), 10)
    for vocab, k in ((128256, 10), (262144, 64)):
        logits = meta(2, 10, vocab, dtype=torch.bfloat16)
        call = functools.partial(form.expand, logits, meta(2, 10), k)
        yield from trials("expand", f"bfloat16 V={vocab} K={k}", call)


@launches
def select_leaves():
    for scores in (meta(2, 100), meta(100, 2).t(), meta(2, 4096)):
        yield f"M={scores.shape[1]}", lambda s=scores: form.select_leaves(s, 2)


@launches
def enter_level():
    sizes = meta(2, dtype=INT32)
    for leaves, words in ((1, 1), (10, 1), (64, 5)):
        size = leaves * leaves
        kinds = (INT64, FLOAT32, INT32)
        rows = Candidates(*(meta(2, 6 * size, dtype=kind) for kind in kinds))
        level = [meta(2, leaves, leaves, dtype=kind) for kind in kinds[:2]]
        level += [meta(2, leaves, dtype=INT32), meta(2, leaves, words, dtype=INT64)]
        yield (
            f"L={leaves} K={leaves} W={words}",
            lambda r=rows, x=level, k=leaves: form.enter_level(r, 3, *x, 1, k, sizes),
        )


@launches
def rerank():
    roots, wanted = meta(2, dtype=INT64), meta(2, dtype=INT32)
    sizes = ((10, 1), (256, 60), (510, 60), (1000, 64), (1810, 256), (4096, 100), (8192, 8193))
    for columns, nodes in sizes:
        rows = Candidates(*(meta(2, columns, dtype=kind) for kind in (INT64, FLOAT32, INT32)))
        for drafted in (rows, Candidates(*(x.new_empty(columns, 2).t() for x in rows))):
            yield (
                f"C={columns} N={nodes}",
                lambda d=drafted, n=nodes: form.rerank(d, roots, wanted, n),
            )


@launches
def tree_attention():
    sizes, table = meta(1, dtype=INT32), meta(1, 64, dtype=INT32)

    def launch(dtype, nodes, heads, groups, dim, layout):
        words = meta(1, nodes, 2, dtype=INT64)[..., : -(-nodes // 64)]
        q, options = meta(1, nodes, heads, dim, dtype=dtype), ()
        cache = meta(1, 4096, groups, dim, dtype=dtype)
        if "paged" in layout:
            cache, options = meta(64, 64, groups, dim, dtype=dtype), (table, 512)
        if "strided" in layout:
            q, cache = (x.new_empty(x.shape[::-1]).permute(3, 2, 1, 0) for x in (q, cache))
        shape = f"{dtype} N={nodes} H,G,E={heads},{groups},{dim} {layout}".replace("torch.", "")
        rest = sizes, words, sizes, 0.1, *options
        return shape, lambda: form.tree_attention(q, cache, cache, *rest)

    shapes = (60, 32, 8, 128), (10, 32, 8, 128), (60, 8, 1, 256), (1, 9, 3, 64), (5, 40, 8, 80)
    kinds = (torch.bfloat16, torch.float32), ("paged, window", "")
    for layout, shape, dtype in itertools.product(kinds[1], shapes, kinds[0]):
        yield launch(dtype, *shape, layout)
    for dtype in FLOATS:
        yield launch(dtype, *shapes[0], "paged, window, strided")
    for layout, shape in itertools.product(kinds[1], shapes):
        yield launch(torch.float16, *shape, layout)
    for layout, shape in itertools.product(kinds[1], shapes[:3]):
        yield from trials("tree_attention", *launch(torch.bfloat16, *shape, layout))


@launches
def sample():
    def law(batch, nodes):
        kinds = (FLOAT32, INT32, FLOAT32, FLOAT32, INT64)
        return *(meta(batch, dtype=kind) for kind in kinds), meta(batch, nodes, dtype=INT64)

    for dtype in FLOATS:
        logits = meta(2, 60, 128256, dtype=dtype)
        yield f"{dtype} V=128256", lambda x=logits: form.sample(x, *law(2, 60))
    logits = meta(32001, 60, 2).permute(2, 1, 0)
    yield "strided V=32001", lambda x=logits: form.sample(x, *law(2, 60))


@launches
def verify():
    for nodes, depth in ((1, 0), (60, 6), (256, 10), (8193, 10)):
        tree, wanted = meta_tree(2, nodes), meta(2, nodes, dtype=INT64)
        yield f"N={nodes} D={depth}", lambda t=tree, w=wanted, d=depth: form.verify(t, w, d)
        yield (
            f"N={nodes} D={depth}, with tokens",
            lambda t=tree, w=wanted, d=depth: walk(t, w, d, *results.accept(w, d)),
        )


@launches
def compact_kv():
    lengths = [meta(2, dtype=INT32), meta(2, dtype=INT32)]
    for dtype, heads, depth in (
        *((dtype, (8, 128), 6) for dtype in (torch.int8, torch.float16, torch.float32)),
        (torch.float64, (8, 128), 60),
        (torch.bfloat16, (3, 72), 6),  # no vectors of 16 bytes
    ):
        cache, path = meta(2, 2, 256, *heads, dtype=dtype), meta(2, depth + 1, dtype=INT32)
        strided = cache.new_empty(*heads, 2, 2, 256).permute(2, 3, 4, 0, 1)
        table = meta(2, 16, dtype=INT32)
        for layout, x, blocks in (
            ("", cache, None),
            ("paged", cache, table),
            ("strided", strided, None),
            ("strided, paged", strided, table),
        ):
            yield (
                f"{dtype} G={heads[0]} E={heads[1]} D={depth} {layout}",
                lambda x=x, p=path, b=blocks: form.compact_kv(x, x, p, *lengths, b),
            )


@launches
def sglang_link():
    for nodes, mode in ((8, 2), (16, 2), (32, 2), (60, 0), (60, 1)):
        lists = meta(2, 71, dtype=INT64), meta(2, nodes - 1, dtype=INT64), meta(2, dtype=INT64)
        mask, links = meta(65536, dtype=torch.uint8), [meta(2, nodes, dtype=INT64)] * 3
        written = mask, meta(2 * nodes, dtype=INT64), *links
        yield (
            f"n={nodes} mode={mode}",
            lambda x=(*lists, *written), m=mode: sglang_triton_link.link_tree(*x, 10, 7, m),
        )


@launches
def sglang_walk():
    nodes, steps = 60, 8
    out = meta(2 * nodes, dtype=INT32), meta(2, steps, dtype=INT32), meta(2, dtype=INT32)
    tree = [meta(2, nodes, dtype=INT64)] * 4
    yield "greedy", lambda: sglang_triton_walk.walk_greedy(*out, *tree, tree[0])
    coins = meta(2, nodes), meta(2)
    for vocab, drafted in ((128256, False), (128256, True), (32001, False), (32001, True)):
        probs = meta(2, nodes, vocab)
        laws = probs, probs if drafted else None
        yield (
            f"V={vocab} draft={drafted}",
            lambda x=laws: sglang_triton_walk.walk_sampled(*out, *tree, *coins, *x, 1.0, 1.0),
        )
