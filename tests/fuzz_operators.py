"""The C++ form on random rows, against the reference: python tests/fuzz_operators.py --cases N

A case is one row of one operator: a leaf, a tree, a draw, a query, a sequence's cache. A batch of
cases has sizes, types, strides, threads and an instruction set of its own. A failure prints the
options that repeat it.
"""

import argparse
import time
from collections import Counter

import numpy as np
import torch

import eagle2_kernels as ek
from eagle2_kernels import Candidates, Tree, reference
from eagle2_kernels.reference.accept import accepted
from eagle2_kernels.reference.expand import finite
from eagle2_kernels.reference.order import best, order_key
from eagle2_kernels.reference.sample import gumbel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NAN, INF = float("nan"), float("inf")
SPECIAL = [0.0, -0.0, NAN, INF, -INF, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, 1.0, -200.0]
CHECKS = {}


def check(function):
    """Register what draws a batch of cases from (rng, rows) and returns how many it checked."""
    CHECKS[function.__name__] = function
    return function


def integers(rng, low, high, shape, dtype=torch.int64):
    """Whole numbers in low..high, ends included; high may be an array."""
    return torch.from_numpy(rng.integers(low, high, shape, endpoint=True)).to(dtype)


def floats(rng, *shape):
    """float32 rows of many kinds, one kind each."""
    kind = rng.integers(0, 6, shape[:-1])[..., None]
    normal = rng.normal(0, 10.0 ** rng.integers(-2, 3), shape).astype(np.float32)
    # neighbours in floating point, so that subtracting a peak makes ties
    middle = np.broadcast_to(normal[..., :1], shape).copy()
    near = (middle.view(np.int32) + rng.integers(-9, 10, shape)).astype(np.int32).view(np.float32)
    far = rng.choice(np.array([1.0, 30.0, 1e4, 1e30], np.float32), shape[:-1])
    peaked = np.where(rng.random(shape) < 0.1, np.abs(near) + far[..., None], near)
    few = rng.choice(np.array([0.0, 1.0, -1.0, 2.5], np.float32), shape)
    odd = rng.choice(np.array(SPECIAL, np.float32), shape)
    spotted = np.where(rng.random(shape) < 0.2, odd, normal)
    values = np.select([kind == i for i in range(5)], [normal, near, peaked, few, odd], spotted)
    return torch.from_numpy(values.astype(np.float32))


def strided(rng, x):
    """The same numbers, laid out in one of several ways."""
    way = rng.integers(0, 4)
    if way == 1 and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 2:
        return torch.stack((x, x), -1)[..., 0]
    if way == 3:
        return torch.cat((x, x), 0)[: len(x)]
    return x


def same(got, wanted):
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@check
def expand(rng, rows):
    """Exactly right, given the sum of exponentials; and that sum to a few parts in a million."""
    leaves, vocab = int(rng.integers(1, 5)), int(rng.choice([1, 7, 16, 33, 64, 65, 150, 1025]))
    batch, k = max(rows // leaves, 1), int(rng.integers(1, min(vocab, 70) + 1))
    logits = floats(rng, batch, leaves, vocab).to(DTYPES[rng.integers(0, 3)])
    zero = torch.zeros(batch, leaves)
    ids = integers(rng, 0, 2**40, vocab) if rng.integers(0, 2) else None
    logits = strided(rng, logits)
    tokens, scores = ek.expand(logits, zero, k, ids)
    x = finite(logits)
    peak = x.amax(-1, keepdim=True)
    dead = peak == -INF
    log_total = torch.where(dead, 0, -scores[..., :1])
    assert (log_total >= 0).all()
    log_probs = torch.where(dead, -INF, (x - peak) - log_total)
    index = best(log_probs, k)
    same((tokens, scores), (index if ids is None else ids[index], log_probs.gather(-1, index)))
    total = (x.double() - peak.double()).exp().sum(-1, keepdim=True).log()
    torch.testing.assert_close(
        log_total.double(), torch.where(dead, 0, total), rtol=1e-6, atol=3e-6
    )
    leaf_scores = floats(rng, batch, leaves)
    again = ek.expand(logits, strided(rng, leaf_scores), k, ids)
    same(again, (tokens, leaf_scores[..., None] + scores))
    return batch * leaves


@check
def select_leaves(rng, rows):
    columns = int(rng.choice([1, 5, 16, 63, 100, 300]))
    scores, k = floats(rng, rows, columns), int(rng.integers(1, columns + 1))
    same([ek.select_leaves(strided(rng, scores), k)], [reference.select_leaves(scores, k)])
    return rows


def parents_of(rng, rows, columns):
    """Parents before children, but for some entries that are wrong."""
    sound = rng.integers(-1, np.maximum(np.arange(columns), 0), (rows, columns))
    wrong = rng.integers(-3, columns + 3, (rows, columns))
    chosen = np.where(rng.random((rows, columns)) < rng.choice([0, 0.1]), wrong, sound)
    return torch.from_numpy(chosen.astype(np.int32))


def candidates_of(rng, rows, columns):
    return Candidates(
        integers(rng, 0, 9, (rows, columns)),
        floats(rng, rows, columns),
        parents_of(rng, rows, columns),
    )


@check
def enter_level(rng, rows):
    leaves, children, words = (int(rng.integers(1, most)) for most in (7, 7, 4))
    size, begin = leaves * children, int(rng.integers(0, 30))
    columns, k = begin + size + int(rng.integers(0, 9)), int(rng.integers(1, size + 1))
    ours, theirs = ([x.clone() for x in drawn] for drawn in [candidates_of(rng, rows, columns)] * 2)
    rest = (
        integers(rng, 0, 99, (rows, leaves, children)),
        floats(rng, rows, leaves, children),
        integers(rng, -1, max(begin - 1, 0), (rows, leaves), torch.int32),
        integers(rng, -(2**63), 2**63 - 1, (rows, leaves, words)),
    )
    last = (int(rng.integers(0, 64 * words - k + 1)), k)
    num_nodes = integers(rng, -1, columns + 2, rows, torch.int32)
    got = ek.enter_level(
        Candidates(*ours), begin, *(strided(rng, x) for x in rest), *last, num_nodes
    )
    wanted = reference.enter_level(Candidates(*theirs), begin, *rest, *last, num_nodes)
    same([*got, *ours], [*wanted, *theirs])
    return rows


@check
def rerank(rng, rows):
    columns, nodes = int(rng.integers(0, 90)), int(rng.choice([1, 2, 8, 30, 64, 65]))
    candidates, roots = candidates_of(rng, rows, columns), integers(rng, 0, 9, rows)
    wanted = integers(rng, -2, nodes + 3, rows, torch.int32)
    drawn = Candidates(*(strided(rng, x) for x in candidates))
    tree = ek.rerank(drawn, strided(rng, roots), wanted, nodes)
    same(tree, reference.rerank(candidates, roots, wanted, nodes))
    return rows


def tree_of(rng, rows, nodes):
    nothing = torch.zeros(0)
    return Tree(
        integers(rng, 0, 3, (rows, nodes)),
        parents_of(rng, rows, nodes),
        *[nothing] * 3,
        integers(rng, -1, nodes + 2, rows, torch.int32),
    )


@check
def verify(rng, rows):
    nodes = int(rng.integers(1, 70))
    tree, tokens = tree_of(rng, rows, nodes), integers(rng, -1, 3, (rows, nodes))
    depth = int(rng.integers(0, nodes + 3))
    same(ek.verify(tree, strided(rng, tokens), depth), reference.verify(tree, tokens, depth))
    return rows


def law_of(rng, batch, nodes):
    def each(choices, dtype):
        return torch.from_numpy(rng.choice(choices, batch)).to(dtype)

    return (
        each([0.0, 1.0, 0.7, 2.3, 1e-30, -1.0], torch.float32),
        each([0, 0, 1, 3, 20, 5000], torch.int32),
        each([1.0, 1.0, 0.9, 0.3, 0.0], torch.float32),
        each([0.0, 0.0, 0.1, 1.0], torch.float32),
        integers(rng, -(2**63), 2**63 - 1, batch),
        integers(rng, 0, 2**40, (batch, nodes)),
    )


@check
def sample(rng, rows):
    nodes, vocab = int(rng.integers(1, 9)), int(rng.choice([1, 2, 15, 64, 65, 200]))
    batch = max(rows // nodes, 1)
    logits = floats(rng, batch, nodes, vocab).to(DTYPES[rng.integers(0, 3)])
    law = law_of(rng, batch, nodes)
    tokens = ek.sample(strided(rng, logits), *law)
    wanted = reference.sample(logits, *law)
    row, node = torch.where(tokens != wanted)
    if len(row):
        some = [x[row] for x in law[:-1]] + [law[-1][row, node][:, None]]
        check_near_ties(logits[row, node], *some, tokens[row, node])
    return batch * nodes


def check_near_ties(logits, temperature, top_k, top_p, min_p, seed, positions, tokens):
    """Each token is within rounding of the best that some filter, moved by rounding, lets pass."""
    x = finite(logits)
    assert (temperature > 0).all()
    x = (x - x.amax(-1, keepdim=True)) / temperature[:, None]
    size = x.shape[-1]
    order = order_key(x).argsort(-1, descending=True)  # top-p settles ties by id
    k = torch.where(top_k > 0, top_k, size).clamp(max=size).long()[:, None]
    last = x.gather(-1, order).gather(-1, k - 1)
    slack = 2e-5
    ambiguous = ((x - last).abs() <= slack * (1 + last.abs())) & (x != last)
    x = torch.where(x < last, -INF, x)
    probs = x.softmax(-1)
    before = torch.empty_like(probs)
    sorted_probs = probs.gather(-1, order)
    before.scatter_(-1, order, sorted_probs.cumsum(-1) - sorted_probs)
    peak = probs.amax(-1, keepdim=True)

    def passing(slack):
        by_mass = (before < top_p[:, None] + slack) | (top_p >= 1)[:, None]
        held = torch.where(by_mass | (before == 0), probs, 0)
        return (held > 0) & (held >= min_p[:, None].clamp(max=1) * peak * (1 - slack))

    worth = x + gumbel(seed, positions, size)[:, 0]
    bound = torch.where(passing(-slack), worth, -INF).amax(-1)
    got = torch.where(passing(slack), worth, -INF).gather(-1, tokens[:, None])[:, 0]
    near = got >= bound - slack * (1 + bound.abs())
    assert (near | ambiguous.any(-1)).all()


@check
def accept(rng, rows):
    """What `sample` and `verify` give, by whichever rows are drawn."""
    nodes, vocab = int(rng.integers(1, 30)), int(rng.choice([2, 4, 64, 130]))
    batch = max(rows // 4, 1)
    logits, law = floats(rng, batch, nodes, vocab), law_of(rng, batch, nodes)
    tree, depth = tree_of(rng, batch, nodes), int(rng.integers(0, nodes + 2))
    got = ek.accept(tree, strided(rng, logits), *law, depth)
    same(got, accepted(tree, ek.sample(logits, *law), depth))
    return batch


@check
def tree_attention(rng, rows):
    nodes, groups, per_group = (int(rng.integers(1, most)) for most in (20, 3, 5))
    batch, dim = max(rows // nodes, 1), 8 * int(rng.integers(1, 9))
    capacity, words = nodes + int(rng.integers(0, 40)), int(rng.integers(1, 3))
    dtype = DTYPES[rng.integers(0, 3)]

    def normal(*shape):
        return torch.from_numpy(rng.normal(size=shape).astype(np.float32)).to(dtype)

    q = normal(batch, nodes, groups * per_group, dim)
    caches = [normal(batch, capacity, groups, dim) for _ in range(2)]
    prefix = integers(rng, 0, capacity - nodes, batch, torch.int32)
    ancestors = integers(rng, -(2**63), 2**63 - 1, (batch, nodes, words))
    ancestors &= integers(rng, -(2**63), 2**63 - 1, (batch, nodes, words))
    ancestors[..., 0] |= integers(rng, 0, 1, (batch, nodes))
    num_nodes = integers(rng, 0, nodes, batch, torch.int32)
    unused = torch.arange(capacity) >= (prefix + num_nodes)[:, None]
    for cache in caches:
        cache[unused] = NAN
    window = int(rng.integers(1, 30)) if rng.integers(0, 2) else None
    rest = (prefix, strided(rng, ancestors), num_nodes, dim**-0.5)
    views = [strided(rng, x) for x in (q, *caches)]
    size = int(rng.choice([0, 1, 3]))
    if size and capacity % size == 0:
        table = torch.arange(batch * capacity // size, dtype=torch.int32).view(batch, -1).flip(0)
        blocks = [x.flip(0).reshape(-1, size, groups, dim) for x in caches]
        got = ek.tree_attention(views[0], *blocks, *rest, table, window)
    else:
        got = ek.tree_attention(*views, *rest, None, window)
    wanted = reference.tree_attention(q, *caches, *rest, None, window)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got, wanted, rtol=bound, atol=bound)
    return batch * nodes


@check
def compact_kv(rng, rows):
    layers, groups, depth = (int(rng.integers(1, most)) for most in (4, 3, 8))
    nodes, dim = depth + int(rng.integers(1, 9)), int(rng.integers(1, 9))
    batch, capacity = max(rows // 4, 1), nodes + int(rng.integers(0, 12))
    dtype = [torch.float32, torch.bfloat16, torch.int8, torch.float64][rng.integers(0, 4)]
    cache = integers(rng, -128, 127, (layers, batch, capacity, groups, dim)).to(dtype)
    order = rng.random((batch, nodes - 1)).argsort(1)[:, :depth]
    path = torch.from_numpy(np.sort(order, 1) + 1).int()
    path = torch.cat((torch.zeros(batch, 1, dtype=torch.int32), path), 1)
    accepted = integers(rng, 0, depth, batch, torch.int32)
    path[torch.arange(depth + 1) > accepted[:, None]] = -1
    prefix = integers(rng, 0, capacity - nodes, batch, torch.int32)
    ours, theirs = [strided(rng, cache.clone()), cache + 1], [cache.clone(), cache + 1]
    ek.compact_kv(*ours, strided(rng, path), accepted, prefix)
    reference.compact_kv(*theirs, path, accepted, prefix)
    same(ours, theirs)
    return batch


def batch_of(name: str, seed: int, number: int, rows: int) -> int:
    """Check one batch of cases; how many they were."""
    try:
        return run(name, np.random.default_rng([seed, number, list(CHECKS).index(name)]), rows)
    except Exception:
        print(f"--op {name} --seed {seed} --first {number} --rows {rows}")
        raise


def run(name: str, rng: np.random.Generator, rows: int) -> int:
    """Check cases drawn from rng, with any instruction set; how many they were."""
    ek.cpu._C.cap_level(int(rng.integers(0, 3)))
    try:
        return CHECKS[name](rng, rows)
    finally:
        ek.cpu._C.cap_level(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100_000, help="in all, the operators alike")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", choices=CHECKS, action="append", help="default: all of them")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--rows", type=int, default=512, help="about how many cases in a batch")
    options = parser.parse_args()
    names, done, number = options.op or list(CHECKS), Counter(), options.first
    start = time.monotonic()
    while any(done[name] * len(names) < options.cases for name in names):
        for name in names:
            if done[name] * len(names) < options.cases:
                done[name] += batch_of(name, options.seed, number, options.rows)
        number += 1
        if number % 200 == 0:
            print(f"{done.total()} cases, {time.monotonic() - start:.0f} s", flush=True)
    print(f"no failure in {done.total()} cases: {dict(done)}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
