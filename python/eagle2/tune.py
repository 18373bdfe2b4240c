"""Measuring a profile: what passes cost on this device, then how drafts fare on a few prompts."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

import eagle2_kernels
from eagle2_kernels import Candidates, Tree
from eagle2_kernels.device import on_its_device

from .checks import function, whole_number
from .cycle import Step, cuda_graph, wait_for
from .decode import generate
from .drafter import Drafter, TreeConfig, check_pair
from .env import version
from .growth import Leaves
from .networks import Head
from .profile import Profile, setting_of
from .prompts import token_rows
from .target import Target

TOP_K, DEPTH = 8, 8  # 7 levels of 8 leaves: one word of drafted rows
WIDEST = 64  # nodes of one tree; more rows are several trees
PREFIX = 256  # committed tokens before the rows that are timed
PRIOR = 3.0  # accepted nodes assumed on a level, as the head has it, before any was seen

Progress = Callable[[str, int, int], None]


def tune(
    model: PreTrainedModel,
    head: Head,
    prompts: Sequence[Sequence[int]],
    *,
    rows: int = WIDEST,
    rounds: int = 15,
    max_new_tokens: int = 40,
    progress: Progress = lambda stage, done, of: None,
) -> Profile:
    """Measure a profile for `TreeConfig.auto`, in seconds.

    Times both networks over 1, 2, ... rows in turns, and takes medians; then answers the prompts
    with trees as large as a pass of twice the time of a plain one holds, to see how often the head
    is right. As CUDA graphs on a GPU.

    Args:
        model, head: as for `generate`, `packed` or not.
        prompts: token ids of a few prompts like those to come.
        rows: most rows that are timed; of use for batches, whose passes have rows x nodes.
        rounds: times each pass is timed.
        max_new_tokens: of each answer.
        progress: called with (stage, steps done, steps in all).

    Raises:
        ValueError: no prompts, a number below 1, a head that does not fit the model.
    """
    check_pair(head, None)
    prompts = token_rows(prompts, vocab_size=head.config.vocab_size, name="prompts")
    for name, value in (("rows", rows), ("rounds", rounds), ("max_new_tokens", max_new_tokens)):
        whole_number(name, value)
    function("progress", progress)
    costs = measure(model, head, rows, rounds, progress)
    affordable = [n for n, s in zip(*costs[:2], strict=True) if s <= 2 * costs.target_seconds[0]]
    nodes = max(2, min(affordable[-1], WIDEST))
    fates = []
    tree = TreeConfig(children_of(head), DEPTH, nodes)
    for number, prompt in enumerate(prompts):
        generate(
            model,
            head,
            [prompt],
            max_new_tokens=max_new_tokens,
            tree=tree,
            on_cycle=lambda tree, path: fates.append(fate(tree, path)),
        )
        progress("prompts", number + 1, len(prompts))
    fates = [found for found in fates if len(found.order)]
    if not fates:
        raise ValueError("prompts: wanted some whose answers have three tokens or more, got none")
    names = ("eagle2-kernels", "torch", "transformers")
    versions = {name: version(name) for name in names}
    return Profile(setting_of(model, head), versions, *costs, *expectations(fates, tree))


class Costs(NamedTuple):
    """The fields of a profile that are measured by the clock."""

    rows: list[int]
    target_seconds: list[float]
    draft_seconds: list[float]


@on_its_device
@torch.inference_mode()
def measure(
    model: PreTrainedModel, head: Head, rows: int, rounds: int, progress: Progress
) -> Costs:
    target = Target(model)
    counts = row_counts(rows)
    steps = [target_step(target, n) for n in counts]
    drafters = {batch: new_drafter(target, head, batch) for batch in {trees(n) for n in counts}}
    steps += [draft_step(target, drafters[trees(n)], n) for n in counts]
    if target.device.type == "cuda":
        steps = [cuda_graph(step) for step in steps]
    seconds = [[] for _ in steps]
    for number in range(rounds + 1):
        for step, found in zip(steps, seconds, strict=True):
            wait_for(target.device)
            started = time.perf_counter()
            step()
            wait_for(target.device)
            found.append(time.perf_counter() - started)
        progress("passes", number + 1, rounds + 1)
    medians = [statistics.median(found[1:]) for found in seconds]  # the first round warms up
    return Costs(counts, rising(medians[: len(counts)]), rising(medians[len(counts) :]))


def row_counts(most: int) -> list[int]:
    """1, 2, 3, ... with ever larger gaps; whole trees only from one tree's size on."""
    counts = [1]
    while counts[-1] < min(most, WIDEST):
        counts.append(min(max(counts[-1] + 1, int(counts[-1] * 1.2)), most, WIDEST))
    while 2 * counts[-1] <= most:
        counts.append(2 * counts[-1])
    return counts


def rising(seconds: list[float]) -> list[float]:
    """What passes cost at most: one over few rows can be filled up to one that takes less time."""
    return np.minimum.accumulate(seconds[::-1])[::-1].tolist()


def target_step(target: Target, rows: int) -> Step:
    """A target pass over so many rows, in trees of equal size."""
    batch, prefix = trees(rows), prefix_of(target)
    cache = target.new_cache(batch, prefix + rows // batch)
    tree = star(batch, rows // batch, target.device)
    prefix_len = torch.full((batch,), prefix, dtype=torch.int32, device=target.device)
    return lambda: target.logits(target.tree_pass(tree, prefix_len, prefix, cache))


def new_drafter(target: Target, head: Head, batch: int) -> Drafter:
    k = children_of(head)
    return Drafter(
        head, target, TreeConfig(k, 1 + -(-WIDEST // k)), batch, prefix_of(target), target.ops
    )


def draft_step(target: Target, drafter: Drafter, rows: int) -> Step:
    """A draft step over so many leaves: the head's pass, and the scores of their children."""
    batch, prefix = trees(rows), prefix_of(target)
    leaves = rows // batch
    device, size = target.device, (batch, leaves)
    prefix_len = torch.full((batch,), prefix, dtype=torch.int32, device=device)
    places = drafter.places(prefix_len, torch.ones_like(prefix_len))
    words = drafter.growth.root(1).words.expand(-1, leaves, -1).clone()
    words[..., 0] = 1 << torch.arange(leaves, device=device)
    level = Leaves(
        torch.zeros(size, dtype=torch.int64, device=device),
        torch.zeros(size, device=device),
        torch.full(size, -1, dtype=torch.int32, device=device),
        torch.arange(leaves, device=device).expand(size).contiguous(),
        words,
    )
    width = drafter.head.config.hidden_size
    hidden = torch.ones(*size, width, dtype=target.dtype, device=device)
    k = drafter.config.top_k

    def step() -> None:
        after = drafter.leaf_pass(level, hidden, prefix_len, prefix, 1, places)
        target.ops.expand(drafter.to_logits(after), level.scores, k, drafter.draft_to_target)

    return step


def trees(rows: int) -> int:
    """How many trees so many rows are."""
    return max(1, rows // WIDEST)


def prefix_of(target: Target) -> int:
    return min(PREFIX, target.context_limit // 2)


def children_of(head: Head) -> int:
    return min(TOP_K, head.config.draft_size)


def star(batch: int, nodes: int, device: torch.device) -> Tree:
    """The root and its children."""
    scores = -torch.arange(1.0, nodes + 1, device=device)  # the last one has no place
    candidates = Candidates(
        torch.zeros(batch, nodes, dtype=torch.int64, device=device),
        scores.expand(batch, nodes).contiguous(),
        torch.full((batch, nodes), -1, dtype=torch.int32, device=device),
    )
    return eagle2_kernels.rerank(candidates, candidates.tokens[:, 0], nodes)


class Fate(NamedTuple):
    """What became of one tree."""

    probabilities: np.ndarray  # [N] exp(path score)
    parents: np.ndarray  # [N]
    depths: np.ndarray  # [N]
    order: np.ndarray  # nodes but the root, as a smaller tree would keep them
    accepted: int


def fate(tree: Tree, path: torch.Tensor) -> Fate:
    scores, parents, depths = (
        field[0].cpu().numpy() for field in (tree.scores, tree.parents, tree.depths)
    )
    order = 1 + np.argsort(-scores[1 : int(tree.num_nodes[0])], kind="stable")
    accepted = int((path[0] >= 0).sum()) - 1
    return Fate(np.exp(scores.astype(float)), parents.copy(), depths.copy(), order, accepted)


def expectations(fates: list[Fate], tree: TreeConfig) -> tuple[list, list, list]:
    """Trust, offspring and gains of a profile."""
    levels = np.arange(1, tree.depth + 1)
    hopes = sum((f.probabilities @ (f.depths[:, None] == levels) for f in fates), levels * 0.0)
    accepted = sum((levels <= f.accepted for f in fates), levels * 0.0)
    trust = (accepted + PRIOR) / (hopes + PRIOR)
    gains = np.zeros((tree.depth, tree.num_nodes))
    for found in fates:
        depths = found.depths[found.order]
        values = trust[depths - 1] * found.probabilities[found.order]
        for level in levels:
            kept = values[depths <= level].cumsum()
            gains[level - 1, 1:] += np.pad(kept, (0, tree.num_nodes - 1 - len(kept)), "edge")
    offspring = [children(fates, level, tree.top_k) for level in levels]
    return trust.round(4).tolist(), offspring, (gains / len(fates)).round(4).tolist()


def children(fates: list[Fate], level: int, k: int) -> list[float]:
    """Mean probability that the head gives the first, second, ... child of a node that has any."""
    sums, weight = PRIOR * 0.5 ** np.arange(1, k + 1), PRIOR
    for found in fates:
        parents = found.parents[found.order]
        for parent in set(parents[found.depths[found.order] == level]):
            family = found.probabilities[found.order[parents == parent]]
            sums[: len(family)] += family
            weight += found.probabilities[parent]
    return (sums / weight).round(4).tolist()
