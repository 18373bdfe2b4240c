import torch
from torch import Tensor

from .expand import finite
from .order import order_key
from .out import fills_out
from .philox import philox


@fills_out
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    scores = score(logits, temperature, top_k, top_p, min_p, seed, positions)
    dead = finite(logits).amax(-1) == -torch.inf
    return torch.where(dead, -1, scores.argmax(-1))


def score(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    positions: Tensor,
) -> Tensor:
    """What the drawn token has most of, [B, N, V] float32: its logit, or its law plus noise."""
    x = finite(logits)
    sampled = (temperature > 0)[:, None, None]
    shifted = (x - x.amax(-1, keepdim=True)) / torch.where(sampled, temperature[:, None, None], 1.0)
    kept = keep_min_p(keep_top_p(keep_top_k(shifted, top_k), top_p), min_p)
    return torch.where(sampled, kept + gumbel(seed, positions, x.shape[-1]), x)


def keep_top_k(x: Tensor, top_k: Tensor) -> Tensor:
    """The top_k largest, and what ties with the last of them; 0 = all. As transformers does."""
    size = x.shape[-1]
    k = torch.where(top_k > 0, top_k, size).clamp(max=size).long()
    last = x.sort(-1, descending=True).values.gather(
        -1, (k - 1)[:, None, None].expand(*x.shape[:-1], 1)
    )
    return torch.where(x < last, -torch.inf, x)


def keep_top_p(x: Tensor, top_p: Tensor) -> Tensor:
    """The shortest head of the order whose probability reaches top_p; never empty."""
    order = order_key(x).argsort(-1, descending=True)
    probs = x.softmax(-1).gather(-1, order)
    before = probs.cumsum(-1) - probs
    drop = (before >= top_p[:, None, None]) & (top_p < 1)[:, None, None]
    drop[..., 0] = False
    return torch.where(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf, x)


def keep_min_p(x: Tensor, min_p: Tensor) -> Tensor:
    """Those with at least min_p times the probability of the likeliest, which always stays."""
    probs = x.softmax(-1)
    least = min_p[:, None, None].clamp(max=1) * probs.amax(-1, keepdim=True)
    return torch.where(probs < least, -torch.inf, x)


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [B, N, V] float32, a function of (seed, position, token id) alone.

    Token id v takes word v % 4 of the Philox block v // 4. -log(-log(1 - u)) with u = word / 2^32:
    the smallest u, which decide unlikely tokens, keep their full precision.
    """
    block = torch.arange(-(-vocab // 4), device=seed.device)
    words = philox(seed[:, None, None], positions[..., None], block).flatten(-2)[..., :vocab]
    u = (words.float() + 0.5) * 2.0**-32
    return -(-torch.log1p(-u.clamp(max=1 - 2.0**-24))).log()
