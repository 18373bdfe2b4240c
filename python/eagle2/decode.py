"""EAGLE-2 decoding: draft a tree, verify it in one pass of the target, commit the accepted path."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor
from transformers import PreTrainedModel

import eagle2_kernels
from eagle2_kernels import Tree

from .drafter import Drafter, TreeConfig
from .heads import Eagle2Head
from .prompts import end_tokens, token_rows
from .requests import Generation, OnCommit, Requests, Sampling, Statistics
from .rows import take_rows
from .stopwatch import Stopwatch
from .target import Target, prefill

OnCycle = Callable[[Tree, Tensor], None]


def generate(
    model: PreTrainedModel,
    head: Eagle2Head,
    input_ids: Tensor | Sequence[Sequence[int]],
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 128,
    eos_token_id: int | Sequence[int] | None = None,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    tree: TreeConfig | None = None,
    on_commit: OnCommit | None = None,
    on_cycle: OnCycle | None = None,
    ops: ModuleType = eagle2_kernels,
) -> Generation:
    """Continue the prompts as `model` alone would, faster (EAGLE-2, arXiv 2406.16858).

    Greedy or sampled, the text is the target's own: with the same seed it is the text that
    `baseline.generate` gives, whatever the tree and the batch. Only where the two best tokens of
    the target are as close as two passes of different shape round apart can the texts part.

    Args:
        model: a Llama-family causal LM of transformers; left as found.
        head: an EAGLE-2 head of that model, of its dtype and device.
        input_ids: prompts, lists of ids of any lengths, or a tensor [B, T].
        attention_mask: [B, T] for a padded tensor, 0 where there is padding.
        max_new_tokens: most new tokens per row.
        eos_token_id: one or several ids that end a row; None = those of model.generation_config.
        temperature: 0 = greedy; this and the next four: one value, or one per row.
        top_k: keep the k likeliest; 0 = off.
        top_p: keep the likeliest that together reach this probability; 1 = off.
        min_p: keep those with this share of the likeliest's probability; 0 = off.
        seed: of the noise, which depends on it and the position alone.
        tree: size of the trees; None = the defaults.
        on_commit: called with (row, new ids) as soon as a row grows.
        on_cycle: called with (tree, path) of every cycle.
        ops: where the operators come from; `eagle2_kernels.reference` for the plain form.

    Returns:
        Generation: new ids and finish reason per row, and the statistics.

    Raises:
        ValueError: an argument out of range, a prompt that leaves no room, a head that does not
            fit the model. Raised before any pass of the model.
    """
    target = Target(model, ops)
    rows = token_rows(input_ids, attention_mask)
    requests = Requests(
        rows, max_new_tokens, end_tokens(model, eos_token_id), target.context_limit, on_commit
    )
    sampling = Sampling.of(len(rows), temperature, top_k, top_p, min_p, seed, target.device)
    return decode(target, head, requests, sampling, tree or TreeConfig(), on_cycle)


@torch.inference_mode()
def decode(
    target: Target,
    head: Eagle2Head,
    requests: Requests,
    sampling: Sampling,
    config: TreeConfig,
    on_cycle: OnCycle | None = None,
) -> Generation:
    """The loop. Arguments as `generate` makes them."""
    ops, clock, statistics = target.ops, Stopwatch(), Statistics()
    capacity = requests.capacity(config.num_nodes)
    drafter = Drafter(head, target, config, len(requests), capacity, ops)
    cache = target.new_cache(len(requests), capacity)
    start = prefill(target, requests, sampling, cache)
    prefix = start.prefix
    hidden = drafter.prefill(start.shifted, start.features, start.prefix_len)
    prefix_len, root_tokens = start.prefix_len, start.first
    clock.lap("prefill")

    while not requests.done:
        sizes, depth = budgets(requests, prefix, capacity, config)
        num_nodes = torch.tensor(sizes, dtype=torch.int32, device=target.device)
        longest = max(prefix)

        candidates = drafter.draft(hidden, prefix_len, longest, num_nodes, depth, clock.lap)
        tree = ops.rerank(candidates, root_tokens, num_nodes, max(sizes))
        clock.lap("tree")

        features = target.tree_pass(tree, prefix_len, longest, cache)
        logits = target.logits(features)
        clock.lap("target")

        positions = prefix_len[:, None] + tree.depths.long() + 1
        path, accept_length, bonus = ops.accept(tree, logits, *sampling, positions, depth)
        clock.lap("verify")

        ops.compact_kv(cache.k, cache.v, path, accept_length, prefix_len)
        tokens = path_tokens(tree, path, accept_length, bonus)
        counts = commit(requests, statistics, tokens.tolist(), accept_length.tolist(), sizes)
        if on_cycle:
            on_cycle(tree, path)
        clock.lap("commit")
        if requests.done:
            break

        width = max(counts)
        count = torch.tensor(counts, dtype=torch.int32, device=target.device)
        confirmed = take_rows(features, path[:, :width].clamp(min=0).long())
        hidden = drafter.extend(
            tokens[:, :width].clamp(min=0), confirmed, prefix_len, count, longest
        )
        prefix_len = prefix_len + count
        prefix = [length + grown for length, grown in zip(prefix, counts, strict=True)]
        root_tokens = bonus
        clock.lap("draft")

    statistics.stage_seconds = clock.seconds
    return requests.generation(statistics)


def budgets(
    requests: Requests, prefix: list[int], capacity: int, config: TreeConfig
) -> tuple[list[int], int]:
    """Nodes for each row, 0 for one that has ended, and the depth that can still be of use."""
    remaining = [requests.remaining(row) for row in range(len(requests))]
    sizes = [
        0 if left == 0 else 1 if left == 1 else min(config.num_nodes, capacity - length)
        for left, length in zip(remaining, prefix, strict=True)
    ]
    depth = min(config.depth, max(remaining) - 1) if max(sizes) > 1 else 0
    return sizes, depth


def path_tokens(tree: Tree, path: Tensor, accept_length: Tensor, bonus: Tensor) -> Tensor:
    """Accepted drafts, then the bonus token: [B, D + 1], accept_length + 1 of them of use."""
    tokens = tree.tokens.gather(1, path.clamp(min=0).long()).roll(-1, 1)
    return tokens.scatter_(1, accept_length.long()[:, None], bonus[:, None])


def commit(
    requests: Requests,
    statistics: Statistics,
    tokens: list[list[int]],
    accepted: list[int],
    sizes: list[int],
) -> list[int]:
    """Hand every row its tokens; return by how many slots each row that goes on has grown."""
    counts = []
    for row, size in enumerate(sizes):
        if size == 0:
            counts.append(0)
            continue
        kept = requests.commit(row, tokens[row][: accepted[row] + 1])
        statistics.count(accepted[row], kept)
        counts.append(accepted[row] + 1 if requests.remaining(row) else 0)
    return counts
