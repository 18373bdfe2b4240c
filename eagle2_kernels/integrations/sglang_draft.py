"""SGLang's two choices while it drafts, by the order rule and on sums of logarithms."""

import torch
from torch import Tensor

from .. import ops
from ..tree import Candidates


def select_top_k_tokens(
    i: int,
    topk_p: Tensor,
    topk_index: Tensor,
    hidden_states: Tensor | None,
    scores: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor | None, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """The leaves of draft step i and the candidates they are taken from."""
    log_p = log_probabilities(topk_p)
    if i == 0:
        if hidden_states is not None:
            hidden_states = hidden_states.repeat_interleave(topk, 0)
        parents = torch.arange(-1, topk, device=topk_index.device).expand(len(topk_p), -1)
        return topk_index.flatten(), hidden_states, log_p, (log_p[:, None], topk_index, parents)

    grown = scores[..., None] + log_p.reshape(-1, topk, topk)
    index = ops.select_leaves(grown.flatten(1), topk).long()
    topk_index = topk_index.reshape(-1, topk * topk)
    if hidden_states is not None and len(hidden_states) > 0:
        rows = torch.arange(len(index), device=index.device)[:, None]
        hidden_states = hidden_states[(rows * topk + index // topk).flatten()]
    flat = index + (topk + (i - 1) * topk * topk)
    scores = grown.flatten(1).gather(1, index)
    tokens = topk_index.gather(1, index).flatten()
    return tokens, hidden_states, scores, (grown, topk_index, flat)


def log_probabilities(p: Tensor) -> Tensor:
    """float32, at most 0: p above 1 counts as 1, NaN as 0."""
    return torch.nan_to_num(p.float(), nan=0.0).clamp(0, 1).log()


def organize_draft_results(
    score_list: list[Tensor],
    token_list: list[Tensor],
    parents_list: list[Tensor],
    num_draft_token: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidates, each with its parent, by ascending number.

    No candidate counts for more than its parent, and one without any score comes last instead of
    being left out, so there are always num_draft_token - 1.

    Raises:
        ValueError: fewer candidates than that.
    """
    scores = torch.cat([level.flatten(1) for level in score_list], 1).float()
    tokens = torch.cat([level.flatten(1) for level in token_list], 1)
    batch, count = tokens.shape
    if num_draft_token - 1 > count:
        raise ValueError(f"num_draft_token: wanted {count + 1} or fewer, got {num_draft_token}")
    parent_list = torch.cat([parents_list[0][:, :0], *parents_list[:-1]], 1)
    parents = flat_parents(parent_list, parents_list[0].shape[1] - 1, count)

    number = torch.arange(count, device=tokens.device)
    stray = (parents < -1) | (parents >= number)
    lowest = torch.finfo(torch.float32).min
    scores = torch.nan_to_num(scores, nan=lowest)
    drafted = Candidates(
        tokens=number.expand(batch, -1),
        scores=torch.where(stray, lowest, scores),
        parents=torch.where(stray, -1, parents).to(torch.int32),
    )
    roots = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    index = ops.rerank(drafted, roots, num_draft_token).tokens[:, 1:].contiguous()
    return parent_list, index, tokens.gather(1, index)


def flat_parents(parent_list: Tensor, topk: int, count: int) -> Tensor:
    """Flat number of every candidate's parent [bs, count]; -1 = the root."""
    level = parent_list[:, 1:].repeat_interleave(topk, 1)
    return torch.nn.functional.pad(level, (topk, 0), value=-1)[:, :count]
