"""The tree management of the public EAGLE-2 reference, step by step in plain torch, one row.

What SafeAILab/EAGLE does between the passes of its networks, transcribed from a description of its
steps, not from its code: Python loops, host reads and materialised gathers included. It is the
price that `tree_ops.py` compares the operators with, and an independent check of their results.
Letters: V vocabulary, k top_k, N nodes (root included), C = k + (levels - 1) k^2 candidates,
F feature size, S cache slots, E head dim. All that is timed is what these functions do.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor


class Drafted(NamedTuple):
    """All candidates, level by level. Block b of k siblings has one parent."""

    scores: Tensor  # [C] sum of log-probabilities on the path
    tokens: Tensor  # [C] int64
    block_parents: Tensor  # [C / k] int64, 1 + candidate index; 0 = child of the root


class Buffers(NamedTuple):
    """What the reference hands to its target."""

    tokens: Tensor  # [1, N] int64, root first
    mask: Tensor  # [1, 1, N, N] float32, 1 = ancestor or self
    positions: Tensor  # [N] int64, depth below the root
    retrieve_indices: Tensor  # [leaves, deepest + 1] int64, root to leaf, padded with -1


class Committed(NamedTuple):
    """One cycle's outcome."""

    tree: Buffers
    path: Tensor  # [accepted + 1] int64, node numbers
    features: Tensor  # [1, accepted + 1, F]
    next_token: Tensor  # [1] int64


def draft(level_logits: list[Tensor], hidden: Tensor, top_k: int) -> Drafted:
    """Levels of candidates from the draft network's logits.

    Args:
        level_logits: [1, V] of the root's child level, then [k, V] of each further level.
        hidden: [1, k, F], what the draft network is taken to return.
        top_k: k.
    """
    top = level_logits[0].log_softmax(-1).topk(top_k)
    scores, tokens, parents = [top.values], [top.indices], [torch.zeros(1, dtype=torch.int64)]
    frontier_scores, chosen = top.values[0], torch.arange(top_k)
    mask = own = torch.eye(top_k)[None, None]
    base = 0
    for step, logits in enumerate(level_logits[1:]):
        parents.append(1 + base + chosen)
        base = top_k + step * top_k * top_k
        top = logits.log_softmax(-1).topk(top_k)
        path_scores = top.values + frontier_scores[:, None]
        frontier_scores, chosen = path_scores.flatten().topk(top_k)
        rows = chosen // top_k
        # inputs of the next draft pass: features, ids and mask of the chosen leaves
        hidden = hidden[:, rows]
        top.indices.flatten()[chosen][None]
        mask = torch.cat((mask[:, :, rows], own), 3)
        scores.append(path_scores)
        tokens.append(top.indices)
    return Drafted(
        torch.cat(scores).flatten(), torch.cat(tokens).flatten(), torch.cat(parents).flatten()
    )


def lay_out(drafted: Drafted, root: Tensor, top_k: int, num_nodes: int, sampled: bool) -> Buffers:
    """The best num_nodes - 1 candidates as a tree, mask and retrieve_indices built in Python.

    Args:
        drafted: all candidates.
        root: [1] int64, the last committed token.
        top_k: k.
        num_nodes: N, at most C + 1.
        sampled: whether the target samples: the reference then sorts the rows to the leaves.
    """
    kept = drafted.scores.topk(num_nodes - 1).indices.sort().values
    tokens = torch.cat((root, drafted.tokens[kept]))
    above = drafted.block_parents[kept // top_k]
    parents = torch.searchsorted(kept, above - 1)
    parents[above == 0] = -1
    parent_list = (parents + 1).tolist()

    mask = torch.eye(num_nodes, dtype=torch.bool)
    mask[:, 0] = True
    for node, parent in enumerate(parent_list, 1):
        mask[node] |= mask[parent]
    positions = mask.sum(1) - 1

    inner = set(parent_list)
    width = int(positions.max()) + 1
    depths = positions.tolist()
    rows = []
    for leaf in range(1, num_nodes):
        if leaf in inner:
            continue
        row, node = [-1] * width, leaf
        for place in range(depths[leaf], -1, -1):
            row[place] = node
            node = parent_list[node - 1] if node else 0
        rows.append(row)
    if sampled:
        rows.sort(key=lambda row: [node if node >= 0 else num_nodes + 5 for node in row])
    return Buffers(tokens[None], mask.float()[None, None], positions, torch.tensor(rows))


def accept_greedy(logits: Tensor, candidates: Tensor) -> tuple[int, int, Tensor]:
    """The longest path that the target's argmax agrees with.

    Args:
        logits: [leaves, D, V] of the target, gathered along every path.
        candidates: [leaves, D] tokens along every path, -1 = padding.

    Returns:
        the row, accepted drafts, and the logits [V] after them.
    """
    match = (candidates[:, 1:] == logits[:, :-1].argmax(-1)).int()
    lengths = match.cumprod(1).sum(1)
    accepted = int(lengths.max())
    best = 0 if accepted == 0 else int(lengths.argmax())
    return best, accepted, logits[best, accepted]


def accept_sampled(
    logits: Tensor, candidates: Tensor, temperature: float
) -> tuple[int, int, Tensor]:
    """Try the children of each node in turn, one uniform each; arguments as in `accept_greedy`.

    Returns:
        the row, accepted drafts, and the law [V] of the token after them.
    """
    best, taken, leaves = 0, candidates[0, :1], candidates.shape[1]
    while True:
        place = len(taken)
        fits = (candidates[:, :place] == taken).all(1)
        row = int(fits.nonzero()[0])
        scaled = (
            logits[row, place - 1] if temperature == 1 else logits[row, place - 1] / temperature
        )
        law = scaled.softmax(-1)
        if place == leaves:
            return best, place - 1, law
        tried, found = set(), False
        for row in range(len(candidates)):
            if not fits[row]:
                continue
            child = candidates[row, place].item()
            if child < 0 or child in tried:
                continue
            tried.add(child)
            if random.random() <= law[child]:
                best, taken, found = row, torch.cat((taken, candidates[row, place][None])), True
                break
            law[child] = 0
            law = law / law.sum()
        if not found:
            return best, place - 1, law


def commit(
    kv: Tensor, features: Tensor, retrieve_indices: Tensor, best: int, accepted: int, prefix: int
) -> Tensor:
    """Copy the accepted rows of all layers to the end of the prefix, in place.

    Args:
        kv: [2 * layers, 1, heads, S, E], the tree's rows from slot `prefix` on.
        features: [1, N, F] of the target.
        retrieve_indices: [leaves, D].
        best: the accepted row.
        accepted: drafts accepted in it.
        prefix: committed slots.

    Returns:
        features [1, accepted + 1, F] of the root and the accepted nodes.
    """
    select = retrieve_indices[best, : accepted + 1] + prefix
    rows = kv[..., select, :]
    kv[..., prefix : prefix + len(select), :].copy_(rows)
    return features[:, retrieve_indices][:, best, : accepted + 1]


def verify(tree: Buffers, tree_logits: Tensor, temperature: float) -> tuple[int, int, Tensor]:
    """Gather the target's logits [1, N, V] along every path, then accept.

    Returns:
        the row of retrieve_indices, accepted drafts, and the next token [1].
    """
    logits = tree_logits[0, tree.retrieve_indices]
    padded = torch.cat((tree.tokens, torch.full((1, 1), -1)), 1)
    candidates = padded[0, tree.retrieve_indices]
    if temperature == 0:
        best, accepted, last = accept_greedy(logits, candidates)
        return best, accepted, last.argmax()[None]
    best, accepted, law = accept_sampled(logits, candidates, temperature)
    return best, accepted, law.multinomial(1)


def cycle(
    level_logits: list[Tensor],
    tree_logits: Tensor,
    hidden: Tensor,
    features: Tensor,
    kv: Tensor,
    root: Tensor,
    prefix: int,
    top_k: int,
    num_nodes: int,
    temperature: float,
) -> Committed:
    """All steps of one cycle; the networks' outputs are arguments, as in the functions above."""
    drafted = draft(level_logits, hidden, top_k)
    tree = lay_out(drafted, root, top_k, num_nodes, temperature > 0)
    best, accepted, next_token = verify(tree, tree_logits, temperature)
    kept = commit(kv, features, tree.retrieve_indices, best, accepted, prefix)
    return Committed(tree, tree.retrieve_indices[best, : accepted + 1], kept, next_token)
