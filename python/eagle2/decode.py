"""EAGLE-2 decoding: draft a tree, verify it in one pass of the target, commit the accepted path."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle2_kernels import Tree
from eagle2_kernels.device import on_its_device

from .checks import function
from .cycle import Cycle, State, StaticCycle, cuda_graph
from .drafter import TreeConfig, check_pair
from .networks import Head
from .prompts import end_tokens, token_rows
from .requests import Generation, OnCommit, Requests, Sampling, Statistics
from .stopwatch import Stopwatch
from .target import Operators, Target, prefill

OnCycle = Callable[[Tree, Tensor], None]


def generate(
    model: PreTrainedModel,
    head: Head,
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
    ops: Operators | None = None,
) -> Generation:
    """Continue the prompts as `model` alone would, faster (EAGLE-2, arXiv 2406.16858).

    Greedy or sampled, the text is the target's own: with the same seed it is the text that
    `baseline.generate` gives, whatever the tree and the batch. Only where the two best tokens of
    the target are as close as two passes of different shape round apart can the texts part.

    Args:
        model: a Llama-family causal LM of transformers; left as found.
        head: an EAGLE-1/2 or EAGLE-3 head of that model, of its dtype and device.
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
        ops: where the operators come from, e.g. `eagle2_kernels.reference`; None = the form of
            the model's device. `enter_level` is handed memory as `out`, which the level after
            next overwrites; in a compiled decoder the attention is the public operator.

    Returns:
        Generation: new ids and finish reason per row, and the statistics.

    Raises:
        ValueError: an argument out of range, a prompt that leaves no room, a head that does not
            fit the model. Raised before any pass of the model.
    """
    check_pair(head, tree)
    if on_cycle is not None:
        function("on_cycle", on_cycle)
    target = Target(model, ops)
    rows = token_rows(input_ids, attention_mask, target.embed.num_embeddings)
    requests = Requests(
        rows, max_new_tokens, end_tokens(model, eos_token_id), target.context_limit, on_commit
    )
    sampling = Sampling.of(len(rows), temperature, top_k, top_p, min_p, seed, target.device)
    return decode(target, head, requests, sampling, tree, on_cycle)


@on_its_device
@torch.inference_mode()
def decode(
    target: Target,
    head: Head,
    requests: Requests,
    sampling: Sampling,
    config: TreeConfig | None,
    on_cycle: OnCycle | None = None,
    cycles: Callable[..., Cycle] | None = None,
) -> Generation:
    """The loop. Arguments as `generate` makes them; cycles, if any, in place of `make_cycle`."""
    config = TreeConfig() if config is None else config
    clock, statistics = Stopwatch(), Statistics()
    capacity = requests.capacity(config.num_nodes)
    cycle = (cycles or make_cycle)(target, head, config, sampling, len(requests), capacity)
    config, layers = cycle.config, cycle.drafter.feature_layers
    start = prefill(target, requests, sampling, cycle.cache, layers)
    hidden = cycle.drafter.prefill(start.shifted, start.features, start.prefix_len)
    state, prefix = State(start.first, hidden, start.prefix_len), start.prefix
    clock.lap("prefill")

    while not requests.done:
        sizes, depth = budgets(requests, prefix, capacity, config)
        longest = max(prefix)
        outcome = cycle.run(state, sizes, depth, longest, clock.lap)
        accepted = outcome.accept_length.tolist()
        counts = commit(requests, statistics, outcome.tokens.tolist(), accepted, sizes)
        if on_cycle:
            on_cycle(outcome.tree, outcome.path)
        clock.lap("commit")
        if requests.done:
            break
        state = cycle.advance(state, outcome, counts, longest)
        prefix = [length + grown for length, grown in zip(prefix, counts, strict=True)]
        clock.lap("draft")

    statistics.stage_seconds = clock.seconds
    return requests.generation(statistics)


def make_cycle(
    target: Target, head: Head, config: TreeConfig, sampling: Sampling, batch: int, capacity: int
) -> Cycle:
    """Cycles for the device: one CUDA graph on a GPU, sizes that follow the rows elsewhere."""
    if target.device.type == "cuda" and target.group is None:
        return StaticCycle(target, head, config, sampling, batch, capacity, cuda_graph)
    return Cycle(target, head, config, sampling, batch, capacity)


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
