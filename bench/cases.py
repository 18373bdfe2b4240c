"""The operators' cases for `tree_ops.py`: inputs, how a form is called, what torch has instead.

Letters: B batch, K top_k, N nodes, V vocabulary, H query heads, G kv heads, E head dim.
"""

import itertools

import eagle_steps
import torch
from eagle2.requests import Sampling
from timing import SIGMA, Case, Shape, rotate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eagle2_kernels import Candidates, Tree, reference
from eagle2_kernels.reference.words import unpack

ACCEPTED, LAYERS, PREFIX = 3, 32, 256
DRAW = {
    "greedy": "argmax",
    "sampled": "softmax + multinomial",
    "filtered": "topk + sort + softmax + cumsum + multinomial",
}


def sampling(shape: Shape) -> Sampling:
    heat, filters = float(shape.law != "greedy"), {}
    if shape.law == "filtered":
        filters = {"top_k": 50, "top_p": 0.9}
    return Sampling.of(shape.batch, heat, seed=1, device=torch.device(shape.device), **filters)


def draft(shape: Shape) -> Candidates:
    """Candidates of random logits, over 1000 tokens at most."""
    scores, levels = torch.zeros(shape.batch, 1, device=shape.device), []
    parents = scores.new_full(scores.shape, -1, dtype=torch.int32)
    for _ in range(shape.depth):
        logits = shape._replace(dtype="float32").normal(*scores.shape, min(shape.vocab, 1000))
        fields = reference.expand(logits, scores, shape.top_k)
        tokens, children = (field.flatten(1) for field in fields)
        begin = sum(level[0].shape[1] for level in levels)
        levels.append((tokens, children, parents.repeat_interleave(shape.top_k, 1)))
        index = reference.select_leaves(children, shape.top_k).long()
        scores, parents = children.gather(1, index), (begin + index).to(torch.int32)
    return Candidates(*(torch.cat(fields, 1) for fields in zip(*levels, strict=True)))


def draft_tree(shape: Shape) -> tuple[Tree, list[eagle_steps.Buffers]]:
    """A tree, and each of its rows as the public reference lays it out."""
    candidates = draft(shape)
    tree = reference.rerank(
        candidates, shape.row(7, torch.int64), shape.row(shape.nodes), shape.nodes
    )
    return tree, lay_out(shape, candidates)


def lay_out(shape: Shape, candidates: Candidates) -> list[eagle_steps.Buffers]:
    blocks = candidates.parents[:, :: shape.top_k].long() + 1
    root = blocks.new_full((1,), 7)
    rows = map(eagle_steps.Drafted, candidates.scores, candidates.tokens, blocks)
    return [eagle_steps.lay_out(row, root, shape.top_k, shape.nodes, False) for row in rows]


def path_of(tree: Tree, row: int) -> list[int]:
    """Nodes from the root to the likeliest of those ACCEPTED levels below it."""
    depths = tree.depths[row]
    at = depths == min(ACCEPTED, int(depths.max()))
    path = [int(torch.where(at, tree.scores[row], -torch.inf).argmax())]
    while path[0] > 0:
        path.insert(0, int(tree.parents[row, path[0]]))
    return path


def arrange(tree: Tree, logits: Tensor) -> None:
    """Let the target's logits [B, N, V] accept `path_of` of every row and nothing more."""
    for row in range(len(logits)):
        path = path_of(tree, row)
        for node, child in itertools.pairwise(path):
            logits[row, node, tree.tokens[row, child]] = logits[row, node].max() + 30
        logits[row, path[-1], tree.tokens[row][tree.parents[row] == path[-1]]] = -60


def walk(buffers: list[eagle_steps.Buffers], target_tokens: Tensor) -> list[Tensor]:
    """The row of retrieve_indices that agrees longest with target_tokens [B, N]."""
    best = []
    for tree, wanted in zip(buffers, target_tokens, strict=True):
        tokens, paths = (
            torch.cat((tree.tokens[0], wanted.new_full((1,), -1))),
            tree.retrieve_indices,
        )
        match = (tokens[paths][:, 1:] == wanted[paths][:, :-1]).int()
        best.append(paths[int(match.cumprod(1).sum(1).argmax())])
    return best


def draw(logits: Tensor, law: str) -> Tensor:
    """Tokens [B, N] with torch's own means."""
    if law == "greedy":
        return logits.argmax(-1)
    if law == "filtered":
        top = logits.topk(50).values[..., -1:]
        ordered, index = logits.masked_fill(logits < top, -torch.inf).sort(-1, descending=True)
        probs = ordered.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= 0.9, 0)
        return (
            index.flatten(0, 1).gather(1, probs.flatten(0, 1).multinomial(1)).view(logits.shape[:2])
        )
    return logits.softmax(-1).flatten(0, 1).multinomial(1).view(logits.shape[:2])


def expand(shape: Shape) -> Case:
    rows, k = (shape.batch, shape.top_k), shape.top_k

    def baseline(logits, leaf_scores):
        top = logits.log_softmax(-1).topk(k)
        return top.indices, top.values + leaf_scores[..., None]

    return Case(
        rotate(lambda: (shape.normal(*rows, shape.vocab), -torch.rand(rows, device=shape.device))),
        lambda form, logits, leaf_scores: form.expand(logits, leaf_scores, k),
        "log_softmax + topk",
        baseline,
        lambda logits, _: logits.sum(),
        goal=8,
    )


def select_leaves(shape: Shape) -> Case:
    size, k = (shape.batch, shape.top_k**2), shape.top_k
    return Case(
        rotate(lambda: (-torch.rand(size, device=shape.device),)),
        lambda form, scores: form.select_leaves(scores, k),
        "topk",
        lambda scores: scores.topk(k),
    )


def enter_level(shape: Shape) -> Case:
    """The second level among the candidates of the first."""
    k, batch = shape.top_k, shape.batch
    nodes, columns = shape.row(shape.nodes), torch.arange(k, device=shape.device)
    parents = columns.to(torch.int32).repeat(batch, 1)
    words = (1 << columns.clamp(max=62)).repeat(batch, 1)[..., None]

    def make():
        first = draft(shape._replace(depth=1))
        fields = [torch.cat((x, x.new_zeros(batch, k * k)), 1) for x in first]
        scores = -torch.rand(batch, k, k, device=shape.device) + first.scores[..., None]
        return *fields, torch.randint(999, (batch, k, k), device=shape.device), scores

    def run(form, all_tokens, all_scores, all_parents, tokens, scores):
        candidates = Candidates(all_tokens, all_scores, all_parents)
        return form.enter_level(candidates, k, tokens, scores, parents, words, 0, k, nodes)

    def baseline(all_tokens, all_scores, all_parents, tokens, scores):
        all_tokens[:, k:], all_scores[:, k:] = tokens.flatten(1), scores.flatten(1)
        all_parents[:, k:] = parents.repeat_interleave(k, 1)
        top = scores.flatten(1).topk(k)
        leaf_tokens, rank = tokens.flatten(1).gather(1, top.indices), top.indices // k
        own = words.gather(1, rank[..., None]) | words
        return leaf_tokens, top.values, k + top.indices, rank, own

    return Case(rotate(make), run, "copies + topk + gathers", baseline)


def rerank(shape: Shape) -> Case:
    root, wanted, nodes = shape.row(7, torch.int64), shape.row(shape.nodes), shape.nodes
    return Case(
        rotate(lambda: (draft(shape),), 8),
        lambda form, candidates: form.rerank(candidates, root, wanted, nodes),
        "topk + sort + Python mask",
        lambda candidates: lay_out(shape, candidates),
    )


def tree_attention(shape: Shape) -> Case:
    (heads, groups, dim), prefix, nodes = shape.heads, shape.prefix, shape.nodes
    tree, _ = draft_tree(shape)
    own = unpack(tree.ancestors, nodes)
    mask = torch.cat((own.new_ones(shape.batch, nodes, prefix), own), 2)[:, None]

    def baseline(q, k, v):
        k, v = (x.repeat_interleave(heads // groups, 2).transpose(1, 2) for x in (k, v))
        mixed = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        return mixed.transpose(1, 2)

    def make():
        sizes = ((nodes, heads), (prefix + nodes, groups), (prefix + nodes, groups))
        return tuple(shape.normal(shape.batch, *size, dim) / SIGMA for size in sizes)

    words = (shape.row(prefix), tree.ancestors, tree.num_nodes, dim**-0.5)
    return Case(
        rotate(make),
        lambda form, q, k, v: form.tree_attention(q, k, v, *words),
        "SDPA, dense mask, repeated heads",
        baseline,
        lambda q, k, v: (k.sum(), v.sum()),
        goal=1,
    )


def sample(shape: Shape) -> Case:
    place = torch.arange(shape.nodes, device=shape.device).repeat(shape.batch, 1)
    law = sampling(shape)
    return Case(
        rotate(lambda: (shape.normal(shape.batch, shape.nodes, shape.vocab),)),
        lambda form, logits: form.sample(logits, *law, place),
        DRAW[shape.law],
        lambda logits: draw(logits, shape.law),
        lambda logits: logits.sum(),
    )


def verify(shape: Shape) -> Case:
    def make():
        tree, buffers = draft_tree(shape)
        target_tokens = torch.full_like(tree.tokens, -2)
        for row in range(shape.batch):
            for node, child in itertools.pairwise(path_of(tree, row)):
                target_tokens[row, node] = tree.tokens[row, child]
        return tree, target_tokens, buffers

    return Case(
        rotate(make, 8),
        lambda form, tree, target_tokens, _: form.verify(tree, target_tokens, shape.depth),
        "longest match along retrieve_indices",
        lambda _, target_tokens, buffers: walk(buffers, target_tokens),
    )


def accept(shape: Shape) -> Case:
    law = sampling(shape)

    def make():
        tree, buffers = draft_tree(shape)
        logits = shape.normal(shape.batch, shape.nodes, shape.vocab)
        arrange(tree, logits)
        return logits, tree, buffers, tree.depths.long() + PREFIX

    return Case(
        rotate(make),
        lambda form, logits, tree, _, place: form.accept(tree, logits, *law, place, shape.depth),
        f"{DRAW[shape.law]}, then match",
        lambda logits, tree, buffers, place: walk(buffers, draw(logits, shape.law)),
        lambda logits, *_: logits.sum(),
    )


def compact_kv(shape: Shape) -> Case:
    tree, _ = draft_tree(shape)
    paths = [path_of(tree, row) for row in range(shape.batch)]
    _, groups, dim = shape.heads
    path = torch.full((shape.batch, shape.depth + 1), -1, dtype=torch.int32)
    for row, nodes in enumerate(paths):
        path[row, : len(nodes)] = torch.tensor(nodes)
    path = path.to(shape.device)
    accept_length = (path >= 0).sum(1, dtype=torch.int32) - 1
    size = (LAYERS, shape.batch, 6 * shape.nodes, groups, dim)
    k_cache, v_cache = shape.normal(*size), shape.normal(*size)
    rows = [torch.tensor(nodes, device=shape.device) for nodes in paths]

    def run(form, k, v, prefix):
        form.compact_kv(k, v, path, accept_length, shape.row(prefix))
        return k, v

    def baseline(k, v, prefix):
        for cache in (k, v):
            for row, nodes in enumerate(rows):
                cache[:, row, prefix : prefix + len(nodes)] = cache[:, row, prefix + nodes]

    return Case(
        [(k_cache, v_cache, shape.nodes * place) for place in range(5)],
        run,
        "gather + copy",
        baseline,
        fresh=lambda k, v, prefix: (k.clone(), v.clone(), prefix),
    )


def operators(shape: Shape) -> Case:
    """The operators of a cycle one after another, each on inputs of its own: no glue between."""
    level, leaves = expand(shape), enter_level(shape)
    parts = [*[level] * shape.depth, *[leaves] * shape.depth]
    parts += [rerank(shape), accept(shape), compact_kv(shape)]
    count = max(len(part.sets) for part in parts)
    sets = [
        tuple(part.sets[(number + place) % len(part.sets)] for place, part in enumerate(parts))
        for number in range(count)
    ]

    def each(call, arguments):
        return [call(part)(*some) for part, some in zip(parts, arguments, strict=True)]

    return Case(
        sets,
        lambda form, *some: each(lambda part: lambda *args: part.run(form, *args), some)[:-1],
        "their baselines",
        lambda *some: each(lambda part: part.run_baseline, some),
    )
