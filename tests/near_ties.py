"""Tells a near-tie that rounding decides from an error, where two texts part (R05)."""

from typing import NamedTuple

import torch
from eagle2 import baseline, generate
from eagle2.requests import Sampling

import eagle2_kernels
from eagle2_kernels.reference.sample import score

# largest difference of two passes' logits, as a share of the largest logit, that is still rounding
ROUNDING = {torch.float32: 2**-13, torch.float16: 2**-7, torch.bfloat16: 2**-4}


class NearTie(NamedTuple):
    """The first token at which a tree's text parts from plain decoding's."""

    index: int  # into the answer
    gap: float  # by how much the one-row pass preferred its own token, in logits
    difference: float  # largest difference between the logits of the two passes


def near_tie(model, head, prompts, row, plain, tree_text, **settings) -> NearTie | None:
    """None for equal texts; else proves that rounding alone parted them, or fails.

    Both decoders run once more on the same batch, to get at the logits from which each of them
    drew the first token that differs.

    Args:
        model, head: as for `eagle2.generate`.
        prompts: the whole batch; `row` is the row that is looked at.
        plain, tree_text: new ids of that row, from `baseline.generate` and `eagle2.generate`.
        settings: of both calls; `tree` is of the second alone.
    """
    plain, tree_text = list(plain), list(tree_text)
    if plain == tree_text:
        return None
    shared = min(len(plain), len(tree_text))
    index = next((i for i in range(shared) if plain[i] != tree_text[i]), None)
    assert index is not None, f"one text ends early: {len(plain)} and {len(tree_text)} tokens"

    position = len(prompts[row]) + index
    one, many = Recorder(row, position), Recorder(row, position)
    tree = settings.pop("tree", None)
    again = baseline.generate(model, prompts, ops=one, **settings).tokens[row]
    assert again == plain, "plain decoding does not repeat itself"
    again = generate(model, head, prompts, ops=many, tree=tree, **settings).tokens[row]
    assert again == tree_text, "decoding with trees does not repeat itself"

    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = Sampling.of(
        len(prompts), **{name: settings[name] for name in names if name in settings}
    )
    sampling = [setting[row : row + 1] for setting in sampling]
    place = torch.tensor([[position]])
    worths = [score(logits[None, None], *sampling, place)[0, 0] for logits in (one.row, many.row)]
    ours, theirs = plain[index], tree_text[index]
    assert int(worths[0].argmax()) == ours, "plain decoding drew another token than its logits say"
    assert int(worths[1].argmax()) == theirs, "the tree's token is not what its logits say"

    difference = (one.row - many.row).abs().nan_to_num(0).max().item()
    bound = ROUNDING[model.dtype] * one.row[one.row.isfinite()].abs().max().item()
    assert difference <= bound, f"logits differ by {difference}, more than rounding: {bound}"
    # a token that a filter let pass in one of the two passes only is a tie at the filter's edge
    seen = torch.stack(worths)[:, [ours, theirs]].isfinite().all()
    warmth = sampling[0].item() or 1.0
    gap = (worths[0][ours] - worths[0][theirs]).item() * warmth if seen else 0.0
    assert gap <= 2 * difference, f"gap {gap} is more than twice the difference {difference}"
    return NearTie(index, gap, difference)


class Recorder:
    """The operators, keeping the logits from which one row drew the token of one position."""

    def __init__(self, row: int, position: int):
        self.number, self.position, self.row = row, position, None

    def __getattr__(self, name):
        return getattr(eagle2_kernels, name)

    def sample(self, logits, *sampling):
        if sampling[-1][self.number, 0] == self.position:
            self.row = logits[self.number, 0].float().clone()
        return eagle2_kernels.sample(logits, *sampling)

    def accept(self, tree, logits, *rest):
        path, *others = eagle2_kernels.accept(tree, logits, *rest)
        positions = rest[5]
        for node in path[self.number].tolist():
            if node >= 0 and positions[self.number, node] == self.position:
                self.row = logits[self.number, node].float().clone()
        return path, *others
