"""A cycle: draft a tree, verify it in one pass of the target, commit the accepted path."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from eagle2_kernels import Tree

from .drafter import Drafter, Lap, TreeConfig
from .networks import Head
from .requests import Sampling
from .rows import take_rows
from .target import Target, features_of

Step = Callable[[], object]


class State(NamedTuple):
    """What a cycle starts from."""

    root_tokens: Tensor  # [B] int64, the last committed tokens
    hidden: Tensor  # [B, 1, Hd] of the head at the root: level 1 is drafted from it
    prefix_len: Tensor  # [B] int32, rows in the caches


class Outcome(NamedTuple):
    """What a cycle found."""

    tree: Tree
    path: Tensor  # [B, D + 1] int32
    tokens: Tensor  # [B, D + 1] int64: accepted drafts, then the bonus token, then -1
    accept_length: Tensor  # [B] int32
    bonus_token: Tensor  # [B] int64, -1 in a row without a tree
    features: Tensor  # [B, N, F] of the target


class Cycle:
    """Cycles whose sizes follow the rows: as many nodes, levels and cache rows as can be of use."""

    def __init__(
        self,
        target: Target,
        head: Head,
        config: TreeConfig,
        sampling: Sampling,
        batch: int,
        capacity: int,
    ):
        self.config, self.target, self.ops, self.sampling = config, target, target.ops, sampling
        self.drafter = Drafter(head, target, config, batch, capacity, target.ops)
        self.cache = target.new_cache(batch, capacity)

    def run(self, state: State, sizes: list[int], depth: int, longest: int, lap: Lap) -> Outcome:
        """Draft, verify, and move the accepted rows of the target's cache.

        Args:
            state: where the rows stand.
            sizes: nodes for each row, root included; 0 = leave the row alone.
            depth: levels to draft.
            longest: no row's prefix is longer than this.
            lap: called with a stage's name when that stage ends.
        """
        num_nodes = torch.tensor(sizes, dtype=torch.int32, device=self.target.device)
        outcome = self.verify(state, num_nodes, max(sizes), depth, longest, lap)
        self.drafter.growth.learn(outcome.tree, outcome.accept_length)
        return outcome

    def verify(
        self,
        state: State,
        num_nodes: Tensor,
        max_nodes: int,
        depth: int,
        longest: int,
        lap: Lap,
    ) -> Outcome:
        """As `run`, with the sizes [B] int32 on the device, none of them above max_nodes."""
        ops, prefix_len = self.ops, state.prefix_len
        candidates = self.drafter.draft(state.hidden, prefix_len, longest, num_nodes, depth, lap)
        num_nodes, max_nodes = self.drafter.growth.afford(num_nodes, max_nodes)
        tree = ops.rerank(candidates, state.root_tokens, num_nodes, max_nodes)
        # before the pass: its weights push the code of small operations out of the caches
        positions = prefix_len[:, None] + tree.depths.long() + 1
        lap("tree")

        with self.target.inputs_of(self.drafter.feature_layers) as inputs:
            last = self.target.tree_pass(tree, prefix_len, longest, self.cache)
        logits = self.target.logits(last)
        lap("target")

        accepted = ops.accept(tree, logits, *self.sampling, positions, depth)
        path, accept_length, bonus, tokens = accepted
        lap("verify")

        ops.compact_kv(self.cache.k, self.cache.v, path, accept_length, prefix_len)
        features = features_of(last, inputs)
        return Outcome(tree, path, tokens, accept_length, bonus, features)

    def advance(self, state: State, outcome: Outcome, counts: list[int], longest: int) -> State:
        """The state after row b has grown by counts[b] tokens, 0 for a row that has ended."""
        count = torch.tensor(counts, dtype=torch.int32, device=self.target.device)
        return self.extend(state, outcome, count, max(counts), longest)

    def extend(
        self, state: State, outcome: Outcome, count: Tensor, width: int, longest: int
    ) -> State:
        """As `advance`, with the counts [B] int32 on the device, none of them above width."""
        confirmed = take_rows(outcome.features, outcome.path[:, :width].clamp(min=0).long())
        tokens = outcome.tokens[:, :width].clamp(min=0)
        hidden = self.drafter.extend(tokens, confirmed, state.prefix_len, count, longest)
        return State(outcome.bonus_token, hidden, state.prefix_len + count)


class StaticCycle(Cycle):
    """Cycles of one size, without a host read inside: a step that can be captured and replayed.

    The state lives in buffers that each step renews in place. A row that is left alone keeps its
    state and its caches, so a step with no nodes anywhere changes nothing.

    Args:
        target, head, config, sampling, batch, capacity: as for `Cycle`; nothing is stopped early,
            and of `TreeConfig.auto` the one size that suits all cycles best is taken.
        capture: makes a replayable step of a step, e.g. `cuda_graph`.
    """

    def __init__(
        self,
        target: Target,
        head: Head,
        config: TreeConfig,
        sampling: Sampling,
        batch: int,
        capacity: int,
        capture: Callable[[Step], Step],
    ):
        config = dataclasses.replace(config.fixed(batch), early_stop=False)
        super().__init__(target, head, config, sampling, batch, capacity)
        self.capacity, self.capture = capacity, capture
        pinned = target.device.type == "cuda"
        self.wanted = torch.zeros(batch, dtype=torch.int32, pin_memory=pinned)
        self.num_nodes = torch.zeros(batch, dtype=torch.int32, device=target.device)
        # tokens of the path, then the number of accepted drafts
        self.report = torch.zeros(batch, config.depth + 2, dtype=torch.int64, device=target.device)
        self.host_report = torch.zeros(self.report.shape, dtype=torch.int64, pin_memory=pinned)
        self.replay: Step | None = None

    def run(self, state, sizes, depth, longest, lap) -> Outcome:
        if self.replay is None:
            self.state = State(*(field.clone() for field in state))
            self.replay = self.capture(self.step)
        self.wanted.copy_(torch.tensor(sizes, dtype=torch.int32))
        self.num_nodes.copy_(self.wanted, non_blocking=True)
        self.replay()
        self.host_report.copy_(self.report, non_blocking=True)
        wait_for(self.target.device)
        lap("cycle")
        tokens, accept_length = self.host_report[:, :-1], self.host_report[:, -1]
        return self.outcome._replace(tokens=tokens, accept_length=accept_length)

    def step(self) -> None:
        """The cycle and what the next one needs, on the buffers."""
        self.outcome = outcome = self.verify(
            self.state,
            self.num_nodes,
            self.config.num_nodes,
            self.config.depth,
            self.capacity,
            lambda stage: None,
        )
        live = self.num_nodes > 0
        count = torch.where(live, outcome.accept_length + 1, 0)
        after = self.extend(self.state, outcome, count, self.config.depth + 1, self.capacity)
        for buffer, value in zip(self.state, after, strict=True):
            buffer.copy_(torch.where(live.view(-1, *[1] * (buffer.dim() - 1)), value, buffer))
        self.report[:, :-1] = outcome.tokens
        self.report[:, -1] = outcome.accept_length

    def advance(self, state, outcome, counts, longest) -> State:
        return self.state


def cuda_graph(step: Step) -> Step:
    """`step` as a CUDA graph, after two runs that compile and allocate what it needs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def wait_for(device: torch.device) -> None:
    """Until the copies to the host have arrived."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
