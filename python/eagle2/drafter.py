"""Drafting: the head run level by level, and its cache kept to what the target confirmed."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import eagle2_kernels
from eagle2_kernels import Candidates
from eagle2_kernels.reference.words import pack

from .budget import CostedGrowth
from .cache import KVCache
from .checks import one_of, whole_number
from .growth import DynamicGrowth, Growth, Leaves, StaticGrowth
from .networks import Attend, Head
from .profile import Profile
from .rows import take_rows
from .static_tree import Path, checked_choices
from .target import Operators, Target, causal_attention

Lap = Callable[[str], None]
PROFILE = "what Profile.find or Profile.read gives"
MOST_CANDIDATES = 2**20  # their places are found by counting: beyond, a cycle takes minutes


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """Size of the draft trees; their shape follows the scores, or is that of `static`.

    Attributes:
        top_k: children per expanded node, and leaves expanded per level.
        depth: levels of drafted nodes below the root.
        num_nodes: nodes verified per cycle, root included; 1 = plain decoding.
        early_stop: draft no level that cannot change the tree; reads one number back per level.
        choices: paths of a static tree, as `static` makes them.
        profile: what passes cost, as `auto` takes it.
    """

    top_k: int = 10
    depth: int = 6
    num_nodes: int = 60
    early_stop: bool = True
    choices: tuple[Path, ...] = ()
    profile: Profile | None = dataclasses.field(default=None, repr=False, hash=False)

    def __post_init__(self):
        for name in ("top_k", "depth", "num_nodes"):
            whole_number(name, getattr(self, name))
        if self.top_k + (self.depth - 1) * self.top_k**2 > MOST_CANDIDATES and not self.choices:
            raise ValueError(
                f"top_k, depth: wanted trees of {MOST_CANDIDATES:,} candidates or fewer, which are "
                f"top_k + (depth - 1) * top_k**2, got {self.top_k} and {self.depth}"
            )
        if self.choices:
            checked_choices(self.choices)
        known = self.profile
        if known is not None:
            one_of("profile", known, Profile, PROFILE)
        if known and (self.choices or self.top_k > known.top_k or self.depth > known.depth):
            raise ValueError(
                f"profile: wanted top_k and depth within its {known.top_k} and {known.depth} and "
                f"no choices, got {self.top_k} and {self.depth} and {len(self.choices)} choices"
            )

    @classmethod
    def static(cls, choices: Iterable[Sequence[int]]) -> "TreeConfig":
        """Trees of one shape whatever the scores, as EAGLE-1 and Medusa have them.

        Args:
            choices: the paths of the nodes as child ranks, e.g. [[0], [1], [0, 0]]: the two best
                children of the root and the best child of the better one.

        Raises:
            ValueError: no path, an empty one, a negative rank, a path given twice or without its
                parent.
        """
        paths = checked_choices(choices)
        children = 1 + max(path[-1] for path in paths)
        return cls(children, len(paths[-1]), len(paths) + 1, choices=paths)

    @classmethod
    def auto(cls, profile: Profile, num_nodes: int = 64) -> "TreeConfig":
        """Trees whose levels, leaves and nodes are kept, cycle by cycle, while they pay.

        With a CUDA graph, whose cycles are all of one size, that of `Profile.fixed`.

        Args:
            profile: of this model, head and device: `Profile.find`, or `tune` makes one.
            num_nodes: most nodes of a cycle.
        """
        one_of("profile", profile, Profile, PROFILE)
        return cls(profile.top_k, profile.depth, num_nodes, profile=profile)

    def fixed(self, batch: int) -> "TreeConfig":
        """This, or instead of trees that follow the costs those of one size that suit best."""
        if self.profile is None:
            return self
        depth, num_nodes, _ = self.profile.fixed(batch)
        return TreeConfig(self.top_k, depth, min(num_nodes, self.num_nodes))

    def growth(self, ops: Operators, batch: int, device: torch.device) -> Growth:
        """How such trees grow, for one batch."""
        if self.profile:
            return CostedGrowth(self.profile, self.top_k, self.depth, ops, batch, device)
        if self.choices:
            return StaticGrowth(self.choices, batch, device)
        return DynamicGrowth(self.top_k, self.depth, self.early_stop, ops, batch, device)


class Places(NamedTuple):
    """Where the leaves of all levels of a cycle go."""

    slots: Tensor  # [B, slots of all levels] int64, as `KVCache.write` takes them
    positions: Tensor  # [B, D] int32, of the leaves of each level


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
        ops: Operators = eagle2_kernels,
    ):
        check_head(head, target, config)
        self.head, self.config, self.ops = head, config, ops
        self.draft_to_target = head.draft_to_target
        self.to_logits = head.to_logits(target.lm_head)
        self.embed = target.embed if head.embed_tokens is None else head.embed_tokens
        shape = head.config
        self.feature_layers = shape.feature_layers(target.num_layers)
        self.growth = config.growth(ops, batch, target.device)
        self.cache = KVCache.allocate(
            1,
            batch,
            capacity + self.growth.slots,
            shape.num_key_value_heads,
            shape.head_dim,
            target.dtype,
            target.device,
        )
        path, device = config.depth + 1, target.device
        self.chain = pack(torch.ones(path, path, device=device).tril() > 0)
        # of each level that is run: positions below the prefix, drafted rows so far
        self.above = torch.arange(config.depth, dtype=torch.int32, device=device)
        ends = [self.growth.slot(level + 1) for level in range(1, config.depth)]
        self.tails = [torch.full((batch,), end, dtype=torch.int32, device=device) for end in ends]

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
            self.cache.write(0, k, v, slots.index)
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
        attend = self._tree_attend(slots.index, start, words, count, longest + width)
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
        growth = self.growth
        leaves, places = growth.root(depth), self.places(prefix_len, num_nodes)
        for level in range(1, depth + 1):
            logits = self.to_logits(hidden)
            lap("draft")
            k = growth.children(level)
            children = self.ops.expand(logits, leaves.scores, k, self.draft_to_target)
            leaves = growth.enter(level, *children, leaves, num_nodes)
            if level == depth or leaves.tokens.shape[1] == 0:
                break
            lap("tree")
            hidden = self.leaf_pass(leaves, hidden, prefix_len, longest, level, places)
        lap("tree")
        return Candidates(*(field[:, : growth.end] for field in growth.candidates))

    def places(self, prefix_len: Tensor, num_nodes: Tensor) -> Places:
        """Where the leaves of all levels go, in each row that has nodes to be verified."""
        drafted = self.growth.slots
        slots = self.cache.slots(prefix_len, torch.where(num_nodes > 0, drafted, 0), drafted)
        return Places(slots.index.view_as(slots.live), prefix_len[:, None] + self.above)

    def leaf_pass(
        self,
        leaves: Leaves,
        hidden: Tensor,
        prefix_len: Tensor,
        longest: int,
        level: int,
        places: Places,
    ) -> Tensor:
        """Run the head on the leaves of a level; their rows go behind those drafted before.

        Args:
            leaves: L of them.
            hidden: [B, M, Hd] of the leaves above.
            places: as `self.places` returned them.

        Returns:
            hidden [B, L, Hd] of the leaves.
        """
        first, width = self.growth.slot(level), leaves.tokens.shape[1]
        index = places.slots[:, first : first + width].flatten()
        tail, reach = self.tails[level - 1], longest + self.growth.slot(level + 1)
        attend = self._tree_attend(index, prefix_len, leaves.words, tail, reach)
        positions = places.positions[:, level - 1 : level].expand(-1, width)
        hidden = take_rows(hidden, leaves.ranks)
        return self.head(self.embed(leaves.tokens), hidden, positions, attend)

    def _pairs(
        self, tokens: Tensor, features: Tensor, start: Tensor, count: Tensor, attend: Attend
    ) -> Tensor:
        positions = start[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.head(self.embed(tokens), self.head.features(features), positions, attend)
        return take_rows(hidden, (count - 1).clamp(min=0).long()[:, None])

    def _tree_attend(
        self, slots: Tensor, prefix_len: Tensor, words: Tensor, tail: Tensor, reach: int
    ) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(0, k, v, slots)
            k_cache, v_cache = (cache[0, :, :reach] for cache in self.cache)
            scale = self.head.config.head_dim**-0.5
            return self.ops.tree_attention(q, k_cache, v_cache, prefix_len, words, tail, scale)

        return attend


def check_pair(head: Head, tree: TreeConfig | None) -> None:
    """Raise ValueError unless these are a head and, if anything, the size of its trees."""
    one_of("head", head, Head, "a head as load_head gives it")
    if tree is not None:
        one_of("tree", tree, TreeConfig, "a TreeConfig")


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
    if config.profile and target.group is not None:
        raise ValueError(
            "tree: wanted trees of one size for a target spread over ranks, got TreeConfig.auto"
        )
    if config.top_k > shape.draft_size:
        raise ValueError(
            f"top_k: wanted at most the head's {shape.draft_size} draft ids, got {config.top_k}"
        )
