"""SGLang's three walks over a tree on CPU tensors, and the meaning of the Triton form.

All write their results into the caller's tensors. Shapes in SGLang's letters: bs rows, n nodes,
S = depth + 1, V vocabulary, k = topk. A candidate's flat number f says its parent: f // k = 0 is a
child of the root, else parent_list[f // k] is the parent's flat number.
"""

import numpy as np
import torch
from torch import Tensor


def link_tree(
    parent_list: Tensor,
    selected: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    depth: int,
    mask_mode: int,
) -> None:
    batch, nodes = retrieve_index.shape
    flat = torch.nn.functional.pad(selected, (1, 0), value=-1)
    parent = node_parents(flat, parent_list, topk)
    seen, depths = climb(parent, depth)

    node = torch.arange(nodes)
    child = parent[:, None] == node[:, None]  # [bs, n parents, n]
    known = (parent >= 0)[..., None]
    sibling = known & (parent[:, None] == parent[..., None]) & (node > node[:, None])
    next_token.copy_(first(child))
    next_sibling.copy_(first(sibling))
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    positions.copy_((seq_lens[:, None] + depths).flatten())
    write_mask(tree_mask, seen, seq_lens.long(), mask_mode)


def node_parents(flat: Tensor, parent_list: Tensor, topk: int) -> Tensor:
    """Node number of each node's parent [bs, n]; -1 for the root and where it was not selected."""
    block = flat // topk
    width = parent_list.shape[1]
    above = torch.nn.functional.pad(parent_list, (0, 1), value=-2)  # what lies outside the list
    above = above.gather(1, torch.where((block > 0) & (block < width), block, width))
    match = (flat[:, None] == above[..., None]) & (above >= 0)[..., None]
    return torch.where(block == 0, 0, first(match))


def climb(parent: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Who sees whom [bs, n, n], and depths [bs, n]; the climb ends after `depth` steps."""
    nodes = torch.arange(parent.shape[1])
    seen = (nodes[:, None] == nodes).repeat(len(parent), 1, 1)
    seen[..., :1] = True
    node = nodes.expand_as(parent)
    depths = torch.zeros_like(parent)
    climbing = nodes > 0
    for _ in range(depth):
        depths += climbing
        node = torch.where(climbing, parent.gather(1, node.clamp(min=0)), 0)
        climbing = climbing & (node > 0)
        seen.scatter_(2, node.clamp(min=0)[..., None], True)
    return seen, depths


def write_mask(tree_mask: Tensor, seen: Tensor, seq_lens: Tensor, mask_mode: int) -> None:
    """The cells of the tree; those of the prefix are the caller's."""
    batch, nodes, _ = seen.shape
    if mask_mode == 1:
        tree_mask[: seen.numel()] = seen.flatten()
    elif mask_mode == 2:
        size = item_size(nodes)
        packed = np.packbits(seen.numpy(), axis=-1, bitorder="little")
        items = np.zeros((batch * nodes, size), np.uint8)
        items[:, : packed.shape[-1]] = packed.reshape(batch * nodes, -1)
        tree_mask[: items.size] = torch.from_numpy(items).flatten()
    else:
        start = 0
        for row, length in enumerate(seq_lens.tolist()):
            end = start + nodes * (length + nodes)
            tree_mask[start:end].view(nodes, -1)[:, length:] = seen[row]
            start = end


def item_size(nodes: int) -> int:
    """Bytes of a packed row of the mask."""
    return 1 if nodes <= 8 else 2 if nodes <= 16 else 4


def first(marked: Tensor) -> Tensor:
    return torch.where(marked.any(-1), marked.to(torch.int8).argmax(-1), -1)


def walk_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    wanted = target_predict.flatten()
    for row in range(len(candidates)):
        tree = (candidates[row].tolist(), next_token[row].tolist(), next_sibling[row].tolist())
        where = retrieve_index[row].tolist()

        def accepts(at, node, where=where, tokens=tree[0]):
            return tokens[node] == int(wanted[where[at]])

        path, _ = walk(tree, accept_index.shape[1], accepts)
        commit(row, path, tree[0], where, predicts, accept_index, accept_token_num)
        last = where[path[-1]]
        predicts[last] = wanted[last]


def walk(tree: tuple[list, list, list], longest: int, accepts) -> tuple[list[int], bool]:
    """The path of node numbers from the root on, and whether it ended at a choice of none.

    `accepts(at, node)` is asked of the children of `at` in the order of their links. At most n
    nodes are looked at, so that links in a circle end too.
    """
    tokens, next_token, next_sibling = tree
    path, node = [0], next_token[0]
    for _ in range(len(tokens)):
        if len(path) == longest or not 0 <= node < len(tokens):
            break
        if accepts(path[-1], node):
            path.append(node)
            node = next_token[node]
        else:
            node = next_sibling[node]
    return path, len(path) < longest


def commit(row, path, tokens, where, predicts, accept_index, accept_token_num) -> None:
    places = [where[node] for node in path]
    accept_index[row, : len(path)] = torch.tensor(places)
    accept_token_num[row] = len(path) - 1
    for place, node in zip(places, path[1:], strict=False):
        predicts[place] = tokens[node]


def walk_sampled(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    # sums, quotients and comparisons in float32, as on the GPU
    single, accumulated = np.float32(threshold_single), np.float32(max(threshold_acc, 1e-9))
    for row in range(len(candidates)):
        tree = (candidates[row].tolist(), next_token[row].tolist(), next_sibling[row].tolist())
        tokens, where = tree[0], retrieve_index[row].tolist()
        coins, probs = uniform_samples[row].numpy(), target_probs[row].numpy()
        mass = np.zeros(len(tokens), np.float32)  # of the children tried so far, by parent

        def accepts(at, node, tokens=tokens, coins=coins, probs=probs, mass=mass):
            p = probs[at, tokens[node]]
            mass[at] += p
            return p > 0 and (coins[at] < mass[at] / accumulated or p >= single)

        path, ended = walk(tree, accept_index.shape[1], accepts)
        commit(row, path, tokens, where, predicts, accept_index, accept_token_num)
        law = target_probs[row, path[-1]].clone()
        if ended:
            if draft_probs is not None:
                law -= draft_probs[row, path[-1]]
            law[[tokens[node] for node in children(tree, path[-1])]] = 0
        predicts[where[path[-1]]] = draw(law, float(uniform_samples_for_final_sampling[row]))


def children(tree: tuple[list, list, list], node: int) -> list[int]:
    tokens, next_token, next_sibling = tree
    found, child = [], next_token[node]
    while 0 <= child < len(tokens) and len(found) < len(tokens):
        found.append(child)
        child = next_sibling[child]
    return found


def draw(law: Tensor, coin: float) -> int:
    """The first token of positive weight whose running sum exceeds coin * sum.

    Else the last one of positive weight, else the last token.
    """
    weights = law.clamp(min=0)
    sums = weights.cumsum(0)
    within = (weights > 0) & (sums > coin * sums[-1])
    if within.any():
        return int(within.to(torch.int8).argmax())
    return int(weights.nonzero()[-1]) if weights.any() else len(weights) - 1
