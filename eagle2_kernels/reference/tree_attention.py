import torch
from torch import Tensor

from .out import fills_out
from .words import unpack


@fills_out
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
) -> Tensor:
    k, v = (
        slots(cache, block_table).transpose(1, 2) for cache in (k_cache, v_cache)
    )  # [B, G, S, E]
    capacity, groups = k.shape[2], k.shape[1]
    # the query heads of a kv head side by side: [B, G, H/G, N, E]; K and V are never repeated
    rows = q.float().unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4) * scale

    slot = torch.arange(capacity, device=q.device)
    in_prefix = slot < prefix_len[:, None]  # [B, S]
    tail = torch.arange(min(64 * ancestors.shape[-1], capacity), device=q.device)
    seen = unpack(ancestors, len(tail)) & (tail < num_nodes[:, None])[:, None]  # [B, N, T]
    rank = seen.cumsum(-1)  # ancestors come in order of depth, so this is depth + 1
    live = seen.any(-1)
    prefix_seen = in_prefix[:, None] & live[..., None]  # [B, N, S]
    if window is not None:
        depth = rank[..., -1:]
        prefix_seen = prefix_seen & (prefix_len[:, None, None] + depth - slot <= window)
        seen = seen & (depth - rank < window)

    tail_slot = (prefix_len[:, None] + tail).clamp(max=capacity - 1)[:, None, :, None].long()
    k_tail, v_tail = (x.gather(2, tail_slot.expand(-1, groups, -1, x.shape[-1])) for x in (k, v))
    prefix_scores = masked_scores(rows, k, prefix_seen)
    tail_scores = masked_scores(rows, k_tail, seen)

    # the two parts are merged by their common maximum and sum
    peak = torch.maximum(prefix_scores.amax(-1, True), tail_scores.amax(-1, True))
    peak = peak.clamp(min=torch.finfo(torch.float32).min)
    prefix_weights, tail_weights = (prefix_scores - peak).exp(), (tail_scores - peak).exp()
    total = prefix_weights.sum(-1, True) + tail_weights.sum(-1, True)
    mixed = mix_seen(prefix_weights, v, prefix_seen) + mix_seen(tail_weights, v_tail, seen)
    out = torch.where(live[:, None, None, :, None], mixed / total, 0)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype).contiguous()


def slots(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """The cache as [B, S, G, E], whether contiguous or in blocks [blocks, size, G, E]."""
    return cache if block_table is None else cache[block_table.long().clamp(min=0)].flatten(1, 2)


def masked_scores(rows: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    scores = mix(rows, k.transpose(-1, -2))
    return torch.where(seen[:, None, None], scores, -torch.inf)


def mix(left: Tensor, right: Tensor) -> Tensor:
    """left [B, G, R, N, M] @ right [B, G, M, E], without repeating `right` R times."""
    return (left.flatten(2, 3) @ right.float()).unflatten(2, left.shape[2:4])


def mix_seen(weights: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """As `mix`, but a value that is not finite reaches only the nodes that see it."""
    bad = ~v.isfinite()
    spoiled = (seen[:, None].float() @ bad.float() > 0)[:, :, None]
    return torch.where(spoiled, torch.nan, mix(weights, torch.where(bad, 0, v)))


def cache_rows(slot: Tensor, size: int, block_table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where the slots [B, T] of each batch row lie: the block of `size` slots, the row in it."""
    if block_table is None:
        return torch.arange(len(slot), device=slot.device)[:, None], slot.long()
    return block_table.long().gather(-1, slot.long() // size), slot.long() % size
