"""How often a head's first choice is the token that the target wrote."""

from typing import NamedTuple

import numpy as np
import torch

from .networks import Head
from .objective import Chains, Objective, answer_starts, make_batch, pick_chains, run_first, take


class Agreement(NamedTuple):
    """What a head's first choices are worth on held-out answers.

    Attributes:
        shares: by drafting step, of positions where the choice is the target's token, whatever the
            steps before chose. A token the head cannot draft counts against it.
        tau: tokens a cycle would commit with a chain of these steps and greedy decoding.
    """

    shares: list[float]
    tau: float


@torch.no_grad()
def agreement(head: Head, objective: Objective, conversations, steps: int = 4) -> Agreement:
    """Draft a chain from every answer position of the conversations, fed the target's tokens."""
    right, seen, unbroken = np.zeros(steps), np.zeros(steps), np.zeros(steps)
    draw = np.random.default_rng(0)
    for conversation in conversations:
        batch = make_batch([conversation]).to(objective.weight.device)
        starts, real = pick_chains(answer_starts(batch), 1.0, draw)
        whole = real
        features, keys, values = run_first(head, objective.embed, batch)
        features = take(features, starts)
        chains = Chains(head, objective.embed, batch, starts, keys, values)
        for step in range(steps):
            if step:
                features = chains.step(features)
            inside = real & (starts + step < batch.lengths[:, None] - 2)
            wanted = batch.ids.gather(1, (starts + step + 2).clamp(max=batch.ids.shape[1] - 1))
            guess = objective.logits(head, features).argmax(-1)
            hit = (guess == objective.draft_ids[wanted]) & inside
            whole = whole & hit
            right[step] += int(hit.sum())
            unbroken[step] += int(whole.sum())
            seen[step] += int(inside.sum())
    seen = np.maximum(seen, 1)
    return Agreement((right / seen).tolist(), 1 + float((unbroken / seen).sum()))
