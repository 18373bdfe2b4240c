"""Plain decoding, one token per pass: what `decode` must reproduce, and its yardstick."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle2_kernels import Tree
from eagle2_kernels.device import on_its_device

from .prompts import end_tokens, token_rows
from .requests import Generation, OnCommit, Requests, Sampling, Statistics
from .stopwatch import Stopwatch
from .target import Operators, Target, prefill


def generate(
    model: PreTrainedModel,
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
    on_commit: OnCommit | None = None,
    ops: Operators | None = None,
) -> Generation:
    """Continue the prompts token by token. Arguments and errors as in `decode.generate`.

    Returns:
        Generation, with tau = 1.
    """
    target = Target(model, ops)
    rows = token_rows(input_ids, attention_mask, target.embed.num_embeddings)
    requests = Requests(
        rows, max_new_tokens, end_tokens(model, eos_token_id), target.context_limit, on_commit
    )
    sampling = Sampling.of(len(rows), temperature, top_k, top_p, min_p, seed, target.device)
    return decode(target, requests, sampling)


@on_its_device
@torch.inference_mode()
def decode(target: Target, requests: Requests, sampling: Sampling) -> Generation:
    """The loop. Arguments as `generate` makes them."""
    ops, clock, statistics = target.ops, Stopwatch(), Statistics()
    cache = target.new_cache(len(requests), requests.capacity(1))
    start = prefill(target, requests, sampling, cache)
    tokens, prefix_len, longest = start.first, start.prefix_len, max(start.prefix)
    clock.lap("prefill")

    while not requests.done:
        going = [row for row in range(len(requests)) if requests.remaining(row)]
        live = torch.zeros_like(prefix_len)
        live[going] = 1
        # before the pass, as in `Cycle`: it pushes the code of small operations out of the caches
        positions = (prefix_len + 1).long()[:, None]
        features = target.tree_pass(one_node(tokens, live), prefix_len, longest, cache)
        logits = target.logits(features)
        clock.lap("target")

        tokens = ops.sample(logits, *sampling, positions)[:, 0]
        clock.lap("verify")

        drawn = tokens.tolist()
        for row in going:
            statistics.count(0, requests.commit(row, drawn[row : row + 1]))
        prefix_len, longest = prefix_len + live, longest + 1
        clock.lap("commit")

    statistics.stage_seconds = clock.seconds
    return requests.generation(statistics)


def one_node(tokens: Tensor, live: Tensor) -> Tree:
    """The tree that holds the root alone, or nothing where a row is not live."""
    column = live[:, None]
    return Tree(
        tokens=tokens[:, None],
        parents=torch.full_like(column, -1),
        depths=torch.zeros_like(column),
        ancestors=column.long()[..., None],
        scores=torch.zeros_like(column, dtype=torch.float32),
        num_nodes=live,
    )
