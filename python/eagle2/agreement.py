"""How often a head's first choice is the token that the target wrote."""

import numpy as np
import torch

from .heads import Eagle2Head
from .objective import Chains, Objective, answer_starts, make_batch, pick_chains, run_first, take


@torch.no_grad()
def agreement(head: Eagle2Head, objective: Objective, conversations, steps: int = 4) -> list[float]:
    """Share of held-out positions where the head's first choice is the target's, by drafting step.

    Counts a chain from every answer position, whatever its earlier steps chose; a token the head
    cannot draft counts against it.
    """
    right, seen = np.zeros(steps), np.zeros(steps)
    draw = np.random.default_rng(0)
    for conversation in conversations:
        batch = make_batch([conversation])
        starts, real = pick_chains(answer_starts(batch), 1.0, draw)
        features, keys, values = run_first(head, objective.embed, batch)
        features = take(features, starts)
        chains = Chains(head, objective.embed, batch, starts, keys, values)
        for step in range(steps):
            if step:
                features = chains.step(features)
            inside = real & (starts + step < batch.lengths[:, None] - 2)
            wanted = batch.ids.gather(1, (starts + step + 2).clamp(max=batch.ids.shape[1] - 1))
            guess = (features.to(objective.weight.dtype) @ objective.weight.T).argmax(-1)
            right[step] += int(((guess == objective.draft_ids[wanted]) & inside).sum())
            seen[step] += int(inside.sum())
    return [float(share) for share in right / np.maximum(seen, 1)]
