"""Drafting: the head run level by level, and its cache kept to what the target confirmed."""

import dataclasses
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

import eagle2_kernels
from eagle2_kernels import Candidates
from eagle2_kernels.reference.words import pack

from .cache import KVCache, Slots
from .networks import Attend, Head
from .rows import take_rows
from .target import Target, causal_attention

Lap = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Size of the draft trees.

    Attributes:
        top_k: children per expanded node, and leaves expanded per level.
        depth: levels of drafted nodes below the root.
        num_nodes: nodes verified per cycle, root included; 1 = plain decoding.
        early_stop: draft no level that cannot change the tree; reads one number back per level.
    """

    top_k: int = 10
    depth: int = 6
    num_nodes: int = 60
    early_stop: bool = True

    def __post_init__(self):
        for name in ("top_k", "depth", "num_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: wanted 1 or more, got {getattr(self, name)}")

    @property
    def candidates(self) -> int:
        return self.top_k + (self.depth - 1) * self.top_k**2


class Drafter:
    """A head at work for one batch.

    Its cache holds one row for each committed token but the first: row p pairs the target's
    feature of position p with token p + 1. Rows of drafted nodes lie behind it and never stay.

    Args:
        head: the draft network.
        target: whose features it uses, and embedding and lm_head where it has none of its own.
        config: size of the trees.
        batch, capacity: rows of the cache, and committed slots in each.

    Raises:
        ValueError: the head does not fit the target, or top_k exceeds the draft vocabulary.
    """

    def __init__(
        self,
        head: Head,
        target: Target,
        config: TreeConfig,
        batch: int,
        capacity: int,
        ops: ModuleType = eagle2_kernels,
    ):
        check_head(head, target, config)
        self.head, self.config, self.ops = head, config, ops
        self.draft_to_target = head.draft_to_target
        self.to_logits = head.to_logits(target.lm_head)
        self.embed = target.embed if head.embed_tokens is None else head.embed_tokens
        shape = head.config
        self.feature_layers = shape.feature_layers(target.num_layers)
        drafted = (config.depth - 1) * config.top_k
        self.cache = KVCache.allocate(
            1,
            batch,
            capacity + drafted,
            shape.num_key_value_heads,
            shape.head_dim,
            target.dtype,
            target.device,
        )
        rows = (batch, config.candidates)
        self.candidates = Candidates(
            torch.zeros(rows, dtype=torch.int64, device=target.device),
            torch.zeros(rows, dtype=torch.float32, device=target.device),
            torch.zeros(rows, dtype=torch.int32, device=target.device),
        )
        path = config.depth + 1
        self.chain = pack(torch.ones(path, path, device=target.device).tril() > 0)
        self.words = -(-max(drafted, 1) // 64)  # over the drafted rows

    def prefill(self, tokens: Tensor, features: Tensor, count: Tensor) -> Tensor:
        """First pass: tokens [B, T] are the prompts shifted by one, with the first new token last.

        Args:
            tokens, count: [B, T] and [B] int32, how many of each row's are real.
            features: [B, T, F] of the target, at the positions before the tokens.

        Returns:
            hidden [B, 1, Hd] of each row's last pair, from which level 1 is drafted.
        """
        slots = self.cache.first_slots(tokens.shape[1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(0, k, v, slots)
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return causal_attention(q, k, v, self.head.config.head_dim**-0.5).transpose(1, 2)

        return self._pairs(tokens, features, torch.zeros_like(count), count, attend)

    def extend(
        self, tokens: Tensor, features: Tensor, start: Tensor, count: Tensor, longest: int
    ) -> Tensor:
        """Add the rows that the target confirmed: features of the path, tokens one further.

        Args:
            tokens: [B, T], accepted tokens and the bonus token.
            features: [B, T, F] of the root and the accepted nodes.
            start: [B] int32, rows there are.
            count: [B] int32, rows to add.
            longest: no row's start is larger than this.

        Returns:
            hidden [B, 1, Hd] of each row's last pair.
        """
        width = tokens.shape[1]
        slots = self.cache.slots(start, count, width)
        words = torch.where(slots.live[..., None], self.chain[:width], 0)
        attend = self._tree_attend(slots, start, words, count, longest + width)
        return self._pairs(tokens, features, start, count, attend)

    def draft(
        self,
        hidden: Tensor,
        prefix_len: Tensor,
        longest: int,
        num_nodes: Tensor,
        depth: int,
        lap: Lap,
    ) -> Candidates:
        """Draft up to `depth` levels below the root (EAGLE-2, section 4.1).

        Args:
            hidden: [B, 1, Hd], as `prefill` or `extend` returned it.
            prefix_len: [B] int32, rows in the cache.
            longest: no row's prefix is longer than this.
            num_nodes: [B] int32, nodes to be verified; 0 for a row that is not decoded any more.
            depth: levels, 0..config.depth.
            lap: called with a stage's name when that stage ends.

        Returns:
            Candidates of the levels drafted, views that the next call overwrites.
        """
        ops, k = self.ops, self.config.top_k
        self.candidates.scores.fill_(-torch.inf)
        scores = self.candidates.scores.new_zeros(len(hidden), 1)  # the root's
        parents = self.candidates.parents.new_full((len(hidden), 1), -1)
        words = self.candidates.tokens.new_zeros(len(hidden), 1, self.words)
        end = 0
        for level in range(1, depth + 1):
            logits = self.to_logits(hidden)
            lap("draft")
            children = ops.expand(logits, scores, k, self.draft_to_target)
            begin = 0 if level == 1 else k + (level - 2) * k * k
            end = begin + k * hidden.shape[1]
            # the leaves of the last level are not run: they need no slots
            slot = (level - 1) * k if level < depth else 0
            *leaves, live = ops.enter_level(
                self.candidates, begin, *children, parents, words, slot, k, num_nodes
            )
            if level == depth:
                break
            if self.config.early_stop:
                # what is below the others cannot reach the tree (DESIGN: early stop)
                worth = int(live.max()) if len(live) else 0
                leaves = [field[:, :worth] for field in leaves]
            tokens, scores, parents, ranks, words = leaves
            if tokens.shape[1] == 0:
                break
            lap("tree")
            hidden = self._leaf_pass(
                tokens, take_rows(hidden, ranks), words, prefix_len, longest, level, num_nodes
            )
        lap("tree")
        return Candidates(*(field[:, :end] for field in self.candidates))

    def _leaf_pass(
        self,
        tokens: Tensor,
        hidden: Tensor,
        words: Tensor,
        prefix_len: Tensor,
        longest: int,
        level: int,
        num_nodes: Tensor,
    ) -> Tensor:
        """Run the head on the leaves [B, L] of a level; their rows go behind those drafted before.

        Args:
            tokens, hidden, words: of the leaves; hidden [B, L, Hd] is that of their parents.

        Returns:
            hidden [B, L, Hd] of the leaves themselves.
        """
        leaves = tokens.shape[1]
        row = (level - 1) * self.config.top_k
        count = torch.where(num_nodes > 0, leaves, 0)
        slots = self.cache.slots(prefix_len + row, count, leaves)
        tail = torch.full_like(prefix_len, row + leaves)
        attend = self._tree_attend(slots, prefix_len, words, tail, longest + row + leaves)
        positions = (prefix_len + level - 1)[:, None].expand(-1, leaves)
        return self.head(self.embed(tokens), hidden, positions, attend)

    def _pairs(
        self, tokens: Tensor, features: Tensor, start: Tensor, count: Tensor, attend: Attend
    ) -> Tensor:
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.head(self.embed(tokens), self.head.features(features), positions, attend)
        return take_rows(hidden, (count - 1).clamp(min=0).long()[:, None])

    def _tree_attend(
        self, slots: Slots, prefix_len: Tensor, words: Tensor, tail: Tensor, reach: int
    ) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(0, k, v, slots)
            k_cache, v_cache = (cache[0, :, :reach] for cache in self.cache)
            scale = self.head.config.head_dim**-0.5
            return self.ops.tree_attention(q, k_cache, v_cache, prefix_len, words, tail, scale)

        return attend


def check_head(head: Head, target: Target, config: TreeConfig) -> None:
    shape = head.config
    wrong = shape.misfits(target.hidden_size, target.vocab_size, target.num_layers)
    if head.embed_tokens is None and shape.hidden_size != target.hidden_size:
        wrong.append(f"wanted embed_tokens of its own width {shape.hidden_size}, got none")
    weight = head.fc.weight
    if (weight.dtype, weight.device) != (target.dtype, target.device):
        wrong.append(
            f"wanted {target.dtype} on {target.device} as the target is, "
            f"got {weight.dtype} on {weight.device}"
        )
    if wrong:
        raise ValueError(f"head: {'; '.join(wrong)}")
    if config.top_k > shape.draft_size:
        raise ValueError(
            f"top_k: wanted at most the head's {shape.draft_size} draft ids, got {config.top_k}"
        )
