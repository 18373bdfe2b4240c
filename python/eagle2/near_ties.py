"""Where two texts of one target part: a near-tie within rounding, or an error."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from eagle2_kernels import Tree
from eagle2_kernels.reference.sample import score
from eagle2_kernels.reference.words import pack

from .requests import Sampling
from .target import Target


class Parting(NamedTuple):
    """The first place at which two answers differ."""

    index: int  # into the answers
    gap: float  # between the scores of the two tokens, in logits
    rounding: float  # largest difference of the logits of a one-row and a many-row pass

    @property
    def near_tie(self) -> bool:
        """Whether rounding alone can have swapped the two tokens (each score can move by it)."""
        return self.gap <= 2 * self.rounding


def part(
    target: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    sampling: Sampling | None = None,
) -> Parting | None:
    """Find where `other` parts from `plain` and measure how close the target's choice is there.

    Args:
        target: whose answers both are.
        prompt: the ids before them.
        plain, other: new ids of plain and of speculative decoding.
        sampling: of that one row; None = greedy.

    Returns:
        None where the answers are the same. An answer that only ends early has an infinite gap.
    """
    pairs = zip_longest(plain, other)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if index is None:
        return None
    if index >= min(len(plain), len(other)):
        return Parting(index, float("inf"), 0.0)
    sampling = sampling or Sampling.of(1, device=target.device)
    text = [*prompt, *plain[:index]]
    rows = torch.cat([last_logits(target, text, width) for width in (1, 4, 16, 60)])
    position = torch.tensor([[len(text)]], device=target.device)
    scores = score(rows[:1, None], *sampling, position)[0, 0]
    scale = float(sampling.temperature[0]) or 1.0
    gap = float(scores[plain[index]] - scores[other[index]]) * scale
    return Parting(index, abs(gap), float((rows - rows[:1]).abs().max()))


@torch.inference_mode()
def last_logits(target: Target, text: Sequence[int], width: int) -> Tensor:
    """Logits [1, V] after `text`, its last `width` tokens run in one pass over a chain."""
    width = min(width, len(text) - 1)
    prefix = len(text) - width
    cache = target.new_cache(1, len(text))
    tokens = torch.tensor([[*text]], device=target.device)
    target.prefill(tokens[:, :prefix], cache)
    chain = torch.ones(width, width, device=target.device).tril() > 0
    depths = torch.arange(width, device=target.device, dtype=torch.int32)[None]
    tree = Tree(
        tokens=tokens[:, prefix:],
        parents=depths - 1,
        depths=depths,
        ancestors=pack(chain)[None],
        scores=torch.zeros(1, width, device=target.device),
        num_nodes=torch.full((1,), width, dtype=torch.int32, device=target.device),
    )
    prefix_len = torch.full((1,), prefix, dtype=torch.int32, device=target.device)
    return target.logits(target.tree_pass(tree, prefix_len, prefix, cache))[:, -1].float()
