import torch
from torch import Tensor

from .order import best
from .out import fills_out


@fills_out
def expand(
    logits: Tensor, leaf_scores: Tensor, k: int, draft_to_target: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    log_probs = log_softmax(logits)
    index = best(log_probs, k)
    scores = leaf_scores[..., None] + log_probs.gather(-1, index)
    tokens = index if draft_to_target is None else draft_to_target[index]
    return tokens, scores


def log_softmax(logits: Tensor) -> Tensor:
    """float32, never above 0, never NaN: a row without a live logit is -inf everywhere."""
    x = finite(logits)
    peak = x.amax(-1, keepdim=True)
    shifted = x - peak.clamp(min=torch.finfo(torch.float32).min)
    total = shifted.exp().sum(-1, keepdim=True)
    return torch.where(peak == -torch.inf, -torch.inf, shifted - total.log())


def finite(logits: Tensor) -> Tensor:
    """float32 with NaN as -inf and +inf as the largest finite float."""
    x = logits.float()
    return torch.where(x.isnan(), -torch.inf, x).clamp(max=torch.finfo(torch.float32).max)
