"""The operators in data-flow order: what each means, what it accepts, and where it is dispatched.

Shapes: B batch, L leaves, K top_k, C candidates, N nodes, W = ceil(N / 64) words, D depth,
V vocabulary, S cache capacity, H query heads, G kv heads, E head dim. Inputs are checked here and
nowhere else. No operator reads anything back to the host or allocates by the data.

`out`: contiguous tensors of the shapes and dtypes that are returned, sharing no memory with each
other or an argument; they are filled and returned. None = new ones.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import reference, results
from .checks import FLOATS, check_heads, memory_for, own_memory, wanted
from .tree import Candidates, Tree

OPERATORS = tuple(reference.__all__)
_library = torch.library.Library("eagle2", "DEF")
_ops = torch.ops.eagle2
INT32, INT64, FLOAT32 = (torch.int32,), (torch.int64,), (torch.float32,)


def _define(name: str, arguments: str, outs: int) -> None:
    """An operator of the library that fills the last `outs` of its arguments."""
    written = [f"Tensor({chr(ord('p') + number)}!) out{number}" for number in range(outs)]
    _library.define(f"{name}({', '.join([arguments, *written])}) -> ()")
    torch.library.register_fake(f"eagle2::{name}", lambda *arguments: None)
    _OUTS[name] = outs


_OUTS: dict[str, int] = {}


def expand(
    logits: Tensor,
    leaf_scores: Tensor,
    k: int,
    draft_to_target: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest children of every leaf and their path scores (EAGLE-2, section 4.1).

    score = leaf score + log-softmax(logits), in float32. A NaN logit counts as -inf, +inf as the
    largest finite float. Order: higher log-probability first, then lower id. Where fewer than k
    logits are live, the rest have score -inf.

    Args:
        logits: [B, L, V] float32, float16 or bfloat16, any strides.
        leaf_scores: [B, L] float32, path scores of the leaves; 0 for the root.
        k: children per leaf, 1..V.
        draft_to_target: [V] int64, the target id of each draft id; None = the same ids.

    Returns:
        tokens [B, L, k] int64 (target ids) and scores [B, L, k] float32, best first.

    Raises:
        ValueError: a wrong shape, dtype or device, or k outside 1..V.
    """
    wanted("logits", logits, (None, None, None), FLOATS)
    wanted("leaf_scores", leaf_scores, logits.shape[:2], FLOAT32, logits.device)
    if not 1 <= k <= logits.shape[-1]:
        raise ValueError(f"k: wanted 1..V={logits.shape[-1]}, got {k}")
    if draft_to_target is not None:
        wanted("draft_to_target", draft_to_target, logits.shape[-1:], INT64, logits.device)
    out = memory_for(out, logits.device, results.expand, logits, leaf_scores, k)
    _ops.expand(logits, leaf_scores, k, draft_to_target, *out)
    return out


_define("expand", "Tensor logits, Tensor leaf_scores, int k, Tensor? draft_to_target", 2)


def select_leaves(scores: Tensor, k: int, *, out: Tensor | None = None) -> Tensor:
    """The k best of each row, best first: higher score, then lower index (EAGLE-2, section 4.1).

    NaN counts as -inf; -0.0 equals 0.0.

    Args:
        scores: [B, M] float32, path scores of one level; M = leaves x children.
        k: how many, 1..M.

    Returns:
        index [B, k] int32 into the row; index // K is the parent's leaf rank.

    Raises:
        ValueError: a wrong shape or dtype, or k outside 1..M.
    """
    wanted("scores", scores, (None, None), FLOAT32)
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"k: wanted 1..M={scores.shape[1]}, got {k}")
    out = memory_for(out, scores.device, results.select_leaves, scores, k)
    _ops.select_leaves(scores, k, out)
    return out


_define("select_leaves", "Tensor scores, int k", 1)


def enter_level(
    candidates: Candidates,
    begin: int,
    tokens: Tensor,
    scores: Tensor,
    parents: Tensor,
    words: Tensor,
    first_slot: int,
    k: int,
    num_nodes: Tensor,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Enter one level, as `expand` gives it, among the candidates, and take its k best as leaves.

    All the bookkeeping between two draft steps (EAGLE-2, section 4.1): the leaves are those of
    `select_leaves`, with what the next step needs to know of each.

    Args:
        candidates: [B, C] buffers; columns begin .. begin + L * K are written.
        begin: how many candidates there are.
        tokens: [B, L, K] int64, the children of L leaves.
        scores: [B, L, K] float32, path scores.
        parents: [B, L] int32, candidate index of each of the L leaves; -1 = the root.
        words: [B, L, W] int64, drafted slots on the path of each of them, itself included.
        first_slot: slot of the first leaf; leaf r has slot first_slot + r < 64 * W.
        k: how many leaves, 1..L * K.
        num_nodes: [B] int32, nodes to be verified.

    Returns:
        leaf_tokens [B, k] int64; leaf_scores [B, k] float32; leaf_parents [B, k] int32, the
        leaves' own candidate indices; ranks [B, k] int64, which of the L each descends from;
        leaf_words [B, k, W] int64, slots on the path with the own one; live [B] int32: how many
        leaves are among the best num_nodes - 1 candidates so far. They come first, and what is
        below the others can never reach the tree.

    Raises:
        ValueError: a wrong shape, dtype or device; begin, first_slot or k out of range; candidates
            whose elements share memory.
    """
    wanted("candidates.tokens", candidates.tokens, (None, None), INT64)
    device, (batch, columns) = candidates.tokens.device, candidates.tokens.shape
    wanted("candidates.scores", candidates.scores, (batch, columns), FLOAT32, device)
    wanted("candidates.parents", candidates.parents, (batch, columns), INT32, device)
    own_memory("candidates.tokens", candidates.tokens)
    own_memory("candidates.scores", candidates.scores)
    own_memory("candidates.parents", candidates.parents)
    wanted("tokens", tokens, (batch, None, None), INT64, device)
    wanted("scores", scores, tokens.shape, FLOAT32, device)
    wanted("parents", parents, tokens.shape[:2], INT32, device)
    wanted("words", words, (*tokens.shape[:2], None), INT64, device)
    wanted("num_nodes", num_nodes, (batch,), INT32, device)
    size = tokens.shape[1] * tokens.shape[2]
    if not 0 <= begin <= columns - size:
        raise ValueError(f"begin: wanted 0..C - L * K = {columns - size}, got {begin}")
    if not 1 <= k <= size:
        raise ValueError(f"k: wanted 1..L * K={size}, got {k}")
    if not 0 <= first_slot <= 64 * words.shape[2] - k:
        raise ValueError(
            f"first_slot: wanted 0..64 * W - k = {64 * words.shape[2] - k}, got {first_slot}"
        )
    out = memory_for(out, device, results.enter_level, words, k)
    _ops.enter_level(
        *candidates, begin, tokens, scores, parents, words, first_slot, k, num_nodes, *out
    )
    return out


_define(
    "enter_level",
    "Tensor(a!) all_tokens, Tensor(b!) all_scores, Tensor(c!) all_parents, int begin, "
    "Tensor tokens, Tensor scores, Tensor parents, Tensor words, int first_slot, int k, "
    "Tensor num_nodes",
    6,
)


def rerank(
    candidates: Candidates,
    root_tokens: Tensor,
    num_nodes: int | Tensor,
    max_nodes: int | None = None,
    *,
    out: Tree | None = None,
) -> Tree:
    """The best candidates of all levels as a tree to verify (EAGLE-2, section 4.2).

    Takes the root and the first num_nodes - 1 candidates of the order (higher score, then lower
    index), laid out by ascending candidate index. A candidate counts for no more than its parent,
    so a node's parent is always there. A candidate at -inf or NaN never becomes a node.

    Args:
        candidates: tokens [B, C] int64, scores [B, C] float32, parents [B, C] int32.
        root_tokens: [B] int64, the last committed tokens.
        num_nodes: nodes wanted, root included: one number, or int32 [B]; 0 = no tree in that row.
        max_nodes: columns N of the tree. None: num_nodes where it is a number, else C + 1.

    Returns:
        Tree of N columns; where a row has fewer candidates than wanted it holds all of them.

    Raises:
        ValueError: a wrong shape, dtype or device; num_nodes or max_nodes below 1.
    """
    tokens, scores, parents = candidates
    wanted("candidates.tokens", tokens, (None, None), INT64)
    wanted("candidates.scores", scores, tokens.shape, FLOAT32, tokens.device)
    wanted("candidates.parents", parents, tokens.shape, INT32, tokens.device)
    wanted("root_tokens", root_tokens, tokens.shape[:1], INT64, tokens.device)
    if isinstance(num_nodes, int):
        if num_nodes < 1:
            raise ValueError(f"num_nodes: wanted 1 or more, got {num_nodes}")
        max_nodes = num_nodes if max_nodes is None else max_nodes
        num_nodes = torch.full_like(root_tokens, num_nodes, dtype=torch.int32)
    wanted("num_nodes", num_nodes, tokens.shape[:1], INT32, tokens.device)
    max_nodes = tokens.shape[1] + 1 if max_nodes is None else max_nodes
    if max_nodes < 1:
        raise ValueError(f"max_nodes: wanted 1 or more, got {max_nodes}")
    out = memory_for(out, tokens.device, results.rerank, candidates, max_nodes)
    _ops.rerank(tokens, scores, parents, root_tokens, num_nodes, max_nodes, *out)
    return Tree(*out)


_define(
    "rerank",
    "Tensor tokens, Tensor scores, Tensor parents, Tensor root_tokens, Tensor num_nodes, "
    "int max_nodes",
    6,
)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    prefix_len: Tensor,
    ancestors: Tensor,
    num_nodes: Tensor,
    scale: float,
    block_table: Tensor | None = None,
    window: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of query rows to the committed prefix and to their own ancestors, nothing else.

    Row b of the cache holds prefix_len[b] committed slots; tail slot t (bit t of the ancestor
    words) is slot prefix_len[b] + t. For a target pass the queries are the N nodes of a tree; for
    a draft level they are its leaves, whose words name the drafted rows on their path. Rows
    without a bit are padding and give 0. Sums are taken in float32. What a row does not
    see never reaches it, NaN included. A NaN that it sees makes it NaN, as scores of -inf alone
    do; an infinite value makes it infinite or NaN.

    Args:
        q: [B, N, H, E] float32, float16 or bfloat16; E a multiple of 8, up to 256.
        k_cache, v_cache: [B, S, G, E], or [blocks, block size, G, E] with a block_table; q's dtype;
            H a multiple of G: query head h reads kv head h // (H / G).
        prefix_len: [B] int32.
        ancestors: [B, N, W] int64.
        num_nodes: [B] int32, tail slots in use: bits from there on are not looked at.
        scale: factor of the dot products, usually E ** -0.5.
        block_table: [B, blocks per row] int32, the block of each run of slots.
        window: a query at position p sees positions above p - window only; None = all.

    Returns:
        [B, N, H, E] in q's dtype.

    Raises:
        ValueError: a wrong shape, dtype or device; H no multiple of G; window below 1.
    """
    wanted("q", q, (None, None, None, None), FLOATS)
    batch, nodes, _, dim = q.shape
    blocks = batch if block_table is None else None
    wanted("k_cache", k_cache, (blocks, None, None, dim), (q.dtype,), q.device)
    wanted("v_cache", v_cache, k_cache.shape, (q.dtype,), q.device)
    wanted("prefix_len", prefix_len, (batch,), INT32, q.device)
    wanted("ancestors", ancestors, (batch, nodes, None), INT64, q.device)
    wanted("num_nodes", num_nodes, (batch,), INT32, q.device)
    if block_table is not None:
        wanted("block_table", block_table, (batch, None), INT32, q.device)
    check_heads(q, k_cache)
    if window is not None and window < 1:
        raise ValueError(f"window: wanted 1 or more, got {window}")
    out = memory_for(out, q.device, results.tree_attention, q)
    _ops.tree_attention(
        q, k_cache, v_cache, prefix_len, ancestors, num_nodes, scale, block_table, window, out
    )
    return out


_define(
    "tree_attention",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor prefix_len, Tensor ancestors, "
    "Tensor num_nodes, float scale, Tensor? block_table, int? window",
    1,
)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw one token from every row of logits, as a function of (law, seed, position) alone.

    Gumbel-max with Philox-4x32-10 noise keyed by (seed, position, token id): the token of an
    output position does not depend on the batch, the tree or the device. Filters in the order of
    transformers: temperature, top-k (ties with the last one stay), top-p, min-p.

    Args:
        logits: [B, N, V] float32, float16 or bfloat16; NaN counts as -inf.
        temperature: [B] float32; 0 or below = argmax, lowest id on ties.
        top_k: [B] int32; 0 = off.
        top_p: [B] float32; 1 = off.
        min_p: [B] float32; 0 = off.
        seed: [B] int64.
        positions: [B, N] int64, the sequence position of the token to be drawn.

    Returns:
        tokens [B, N] int64; -1 where a row has no live logit, which no node ever matches.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check_sampling(logits, temperature, top_k, top_p, min_p, seed, positions)
    out = memory_for(out, logits.device, results.sample, positions)
    _ops.sample(logits, temperature, top_k, top_p, min_p, seed, positions, out)
    return out


def _check_sampling(logits, temperature, top_k, top_p, min_p, seed, positions):
    wanted("logits", logits, (None, None, None), FLOATS)
    batch, device = logits.shape[:1], logits.device
    wanted("temperature", temperature, batch, FLOAT32, device)
    wanted("top_k", top_k, batch, INT32, device)
    wanted("top_p", top_p, batch, FLOAT32, device)
    wanted("min_p", min_p, batch, FLOAT32, device)
    wanted("seed", seed, batch, INT64, device)
    wanted("positions", positions, logits.shape[:2], INT64, device)
    if logits.shape[2] < 1:
        raise ValueError(f"logits: wanted a vocabulary of 1 or more, got shape {[*logits.shape]}")


_LAW = (
    "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, "
    "Tensor positions"
)
_define("sample", _LAW, 1)


def verify(
    tree: Tree,
    target_tokens: Tensor,
    depth: int | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk from the root along the target's own tokens (EAGLE, section 4.3; exactly lossless).

    At each node, step to the child that carries the target's token there; of children with the
    same token the lowest-numbered. At most `depth` steps, whatever the tree holds.

    Args:
        tree: what is to be verified.
        target_tokens: [B, N] int64, the target's choice after each node.
        depth: longest path, in accepted drafts; None = N - 1.

    Returns:
        path [B, depth + 1] int32, node numbers from the root's 0 on, padded with -1;
        accept_length [B] int32, accepted drafts; bonus_token [B] int64, the target's token after
        the path. A row without a tree gives -1, 0 and -1.

    Raises:
        ValueError: a wrong shape, dtype or device; a negative depth.
    """
    depth = _check_walk(tree, target_tokens, depth)
    out = memory_for(out, target_tokens.device, results.verify, target_tokens, depth)
    _ops.verify(*tree, target_tokens, depth, *out)
    return out


def _check_walk(tree, target_tokens, depth):
    wanted("tree.tokens", tree.tokens, (None, None), INT64)
    shape, device = tree.tokens.shape, tree.tokens.device
    wanted("tree.parents", tree.parents, shape, INT32, device)
    wanted("tree.num_nodes", tree.num_nodes, shape[:1], INT32, device)
    wanted("target_tokens", target_tokens, shape, INT64, device)
    depth = max(shape[1] - 1, 0) if depth is None else depth
    if depth < 0:
        raise ValueError(f"depth: wanted 0 or more, got {depth}")
    return depth


_TREE = (
    "Tensor tokens, Tensor parents, Tensor depths, Tensor ancestors, Tensor scores, "
    "Tensor num_nodes"
)
_define("verify", f"{_TREE}, Tensor target_tokens, int depth", 3)


def accept(
    tree: Tree,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
    depth: int | None = None,
    *,
    out: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`sample` followed by `verify`; a form may draw for the rows on the path alone.

    Args:
        tree: what is to be verified.
        logits: [B, N, V], the target's logits after each node.
        temperature, top_k, top_p, min_p, seed, positions: as in `sample`.
        depth: as in `verify`.

    Returns:
        path, accept_length and bonus_token, as in `verify`; path_tokens [B, depth + 1] int64, the
        accepted drafts, then the bonus token, padded with -1.

    Raises:
        ValueError: a wrong shape, dtype or device; a negative depth.
    """
    _check_sampling(logits, temperature, top_k, top_p, min_p, seed, positions)
    depth = _check_walk(tree, positions, depth)
    out = memory_for(out, logits.device, results.accept, positions, depth)
    law = (logits, temperature, top_k, top_p, min_p, seed, positions)
    _ops.accept(*tree, *law, depth, *out)
    return out


_define("accept", f"{_TREE}, {_LAW}, int depth", 4)


def compact_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    path: Tensor,
    accept_length: Tensor,
    prefix_len: Tensor,
    block_table: Tensor | None = None,
) -> None:
    """Move the accepted rows of all layers to slots prefix_len, prefix_len + 1, ..., in place.

    Destination <= source and ascending order, so no row is overwritten before it is read. Every
    other row keeps its bits.

    Args:
        k_cache, v_cache: [layers, B, S, G, E], or [layers, blocks, block size, G, E] with a
            block_table; any dtype, any strides but 0. Written.
        path: [B, D + 1] int32, node numbers of the accepted path, as `verify` returns it.
        accept_length: [B] int32, accepted drafts.
        prefix_len: [B] int32.
        block_table: [B, blocks per row] int32.

    Raises:
        ValueError: a wrong shape, dtype or device; a cache whose elements share memory.
    """
    wanted("path", path, (None, None), INT32)
    batch, device = path.shape[0], path.device
    blocks = batch if block_table is None else None
    wanted("k_cache", k_cache, (None, blocks, None, None, None), None, device)
    wanted("v_cache", v_cache, k_cache.shape, (k_cache.dtype,), device)
    own_memory("k_cache", k_cache)
    own_memory("v_cache", v_cache)
    if k_cache is v_cache:
        raise ValueError("v_cache: wanted memory of its own, since it is written, got k_cache")
    wanted("accept_length", accept_length, (batch,), INT32, device)
    wanted("prefix_len", prefix_len, (batch,), INT32, device)
    if block_table is not None:
        wanted("block_table", block_table, (batch, None), INT32, device)
    _ops.compact_kv(k_cache, v_cache, path, accept_length, prefix_len, block_table)


_define(
    "compact_kv",
    "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor path, Tensor accept_length, "
    "Tensor prefix_len, Tensor? block_table",
    0,
)


def dispatch(form, key: str) -> None:
    """Put the operators that a form has behind PyTorch's dispatcher, for one dispatch key."""
    for name in OPERATORS:
        if function := getattr(form, name, None):
            _library.impl(name, _flat(name, function), key)


def _flat(name: str, function: Callable) -> Callable:
    """A form's operator as the library calls it."""
    outs = _OUTS[name]
    if not outs:
        return function

    def fill(*arguments):
        split = len(arguments) - outs
        out = arguments[split:] if outs > 1 else arguments[split]
        function(*packed(name, arguments[:split]), out=out)

    return fill


def packed(name: str, arguments: Sequence) -> Sequence:
    """An operator's arguments as the forms take them, from tensors alone as in the schemas."""
    return _PACK[name](*arguments) if name in _PACK else arguments


_PACK = {
    "enter_level": lambda t, s, p, *rest: (Candidates(t, s, p), *rest),
    "rerank": lambda t, s, p, *rest: (Candidates(t, s, p), *rest),
    "verify": lambda *arguments: (Tree(*arguments[:6]), *arguments[6:]),
    "accept": lambda *arguments: (Tree(*arguments[:6]), *arguments[6:]),
}

dispatch(reference, "CompositeExplicitAutograd")
