"""The target model: a transformers causal LM whose attention is lent to the tree for one pass."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

import eagle2_kernels
from eagle2_kernels import Tree
from eagle2_kernels.ops import OPERATORS

from .cache import KVCache
from .ranks import agreeing, group_and_share
from .requests import Requests, Sampling
from .rows import take_rows

Operators = ModuleType | SimpleNamespace
ATTENTION = "eagle2_tree"
# what some families do to scores or logits outside of the modules that are run here
FOREIGN = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
)


class Target:
    """A Llama-family causal LM of transformers, as the loop sees it.

    The model is not changed: each pass borrows its attention through transformers' registry and
    gives it back, also after an exception. Threads that share a model take turns, pass by pass.
    Keys and values live in our own cache.

    Args:
        model: e.g. a LlamaForCausalLM, on one device, or spread over ranks by its tp_plan.
        ops: where the operators come from, e.g. `eagle2_kernels.reference`; None = the form of
            the model's device.

    Raises:
        ValueError: the model does not take its attention from transformers' registry, or changes
            attention scores or logits in a way of its own, e.g. by soft-capping.
    """

    def __init__(self, model: PreTrainedModel, ops: Operators | None = None):
        check_model(model)
        ops = eagle2_kernels.form_for(model.device) if ops is None else ops
        missing = [name for name in OPERATORS if not callable(getattr(ops, name, None))]
        if missing:
            raise ValueError(f"ops: wanted a module of operators, got one without {missing[0]}")
        config = model.config
        foreign = [name for name in FOREIGN if getattr(config, name, None) not in (None, 1, 1.0)]
        foreign += [name for name, _ in model.named_parameters() if name.endswith(".sinks")][:1]
        if foreign:
            raise ValueError(
                f"model: {type(model).__name__} has {', '.join(foreign)}, not known here"
            )
        self.config, self.turn = config, turn_of(config)
        self.decoder: Any = model.base_model
        self.group, ranks = group_and_share(self.decoder)
        self.ops = ops if self.group is None else agreeing(ops, self.group)
        self.embed: Any = model.get_input_embeddings()
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.context_limit: int = context_limit(config)
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self.hidden_size: int = config.hidden_size
        self.kv_heads: int = config.num_key_value_heads // ranks  # those of this rank
        self.head_dim: int = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache.allocate(
            self.config.num_hidden_layers,
            batch,
            capacity,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            self.device,
        )

    def prefill(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Run the prompts, right-padded tokens [B, T], into an empty cache.

        Returns:
            [B, T, Hd]: the last hidden states after the final norm.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        slots = cache.first_slots(tokens.shape[1]).index
        return self._forward(tokens, positions, kv_cache=cache, slots=slots, ancestors=None)

    def tree_pass(self, tree: Tree, prefix_len: Tensor, longest: int, cache: KVCache) -> Tensor:
        """One pass over the nodes of a tree; node t of row b goes to slot prefix_len[b] + t.

        Args:
            tree: N columns.
            prefix_len: [B] int32, committed slots.
            longest: no row's prefix is longer than this.
            cache: written at the nodes' slots.

        Returns:
            [B, N, Hd]: the last hidden states after the final norm.
        """
        width = tree.tokens.shape[1]
        reach = longest + width
        return self._forward(
            tree.tokens.clamp(min=0),
            prefix_len[:, None] + tree.depths.long(),
            kv_cache=cache,
            slots=cache.slots(prefix_len, tree.num_nodes, width).index,
            ancestors=tree.ancestors,
            num_nodes=tree.num_nodes,
            prefix_len=prefix_len,
            reach=reach,
            tree_attention=self.ops.tree_attention,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    @contextlib.contextmanager
    def inputs_of(self, layers: tuple[int, ...]) -> Iterator[list[Tensor]]:
        """Collect what these decoder layers are called with, in layer order: [B, T, Hd] each.

        The model carries a hook on each of them while the context lasts, none otherwise.
        """
        found: list[Tensor] = []

        def keep(module: nn.Module, args: tuple, named: dict) -> None:
            found.append(args[0] if args else named["hidden_states"])

        with self.turn:
            hooks = [
                self.decoder.layers[layer].register_forward_pre_hook(keep, with_kwargs=True)
                for layer in layers
            ]
            try:
                yield found
            finally:
                for hook in hooks:
                    hook.remove()

    def _forward(self, tokens: Tensor, positions: Tensor, **attention) -> Tensor:
        with self.turn, attention_of(self.config, ATTENTION):
            return self.decoder(
                input_ids=tokens, position_ids=positions, use_cache=False, **attention
            ).last_hidden_state


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError for what is no causal LM, or has its attention elsewhere."""
    lends = getattr(model, "_supports_attention_backend", False)
    if not lends or model.get_output_embeddings() is None:
        raise ValueError(
            "model: wanted a causal LM that takes its attention from transformers' registry, "
            f"got {type(model).__name__}"
        )


def context_limit(config: PreTrainedConfig) -> int:
    """Positions the model has; of two sets of rotary frequencies, those of the shorter one.

    transformers turns the whole batch over to the longer set in the pass that first goes beyond,
    and a tree goes beyond some tokens before the text does.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope["original_max_position_embeddings"]
    return config.max_position_embeddings


class Start(NamedTuple):
    """Where the loops begin, after the prompts."""

    first: Tensor  # [B] int64, the first new token of each row: the first root
    features: Tensor  # [B, T, F] of the prompts
    shifted: Tensor  # [B, T] int64, each row's prompt less its first token, then `first`
    prefix_len: Tensor  # [B] int32, prompt lengths
    prefix: list[int]  # the same on the host


def features_of(hidden: Tensor, inputs: list[Tensor]) -> Tensor:
    """What a head is fed: the layer inputs it reads, side by side, or else the hidden states."""
    return torch.cat(inputs, -1) if inputs else hidden


def prefill(
    target: Target,
    requests: Requests,
    sampling: Sampling,
    cache: KVCache,
    feature_layers: tuple[int, ...] = (),
) -> Start:
    """Run the prompts and commit the first new token of every row."""
    prefix = [len(prompt) for prompt in requests.prompts]
    prompts = [torch.tensor(prompt, device=target.device) for prompt in requests.prompts]
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    prefix_len = torch.tensor(prefix, dtype=torch.int32, device=target.device)
    with target.inputs_of(feature_layers) as inputs:
        hidden = target.prefill(tokens, cache)

    last = (prefix_len - 1).long()[:, None]
    logits = target.logits(take_rows(hidden, last))
    first = target.ops.sample(logits, *sampling, prefix_len.long()[:, None])
    for row, token in enumerate(first.flatten().tolist()):
        requests.commit(row, [token])
    shifted = tokens.roll(-1, 1).scatter_(1, last, first.clamp(min=0))
    return Start(first[:, 0], features_of(hidden, inputs), shifted, prefix_len, prefix)


TURNS: dict[int, threading.RLock] = {}


def turn_of(config: PreTrainedConfig) -> threading.RLock:
    """What is held while a model of this config lends its attention."""
    fresh = threading.RLock()
    turn = TURNS.setdefault(id(config), fresh)
    if turn is fresh:
        weakref.finalize(config, TURNS.pop, id(config), None)
    return turn


@contextlib.contextmanager
def attention_of(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Lend the model of this config another attention implementation."""
    found = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = found


def tree_attention_forward(
    module: Any,
    query: Tensor,  # [B, H, T, E]
    key: Tensor,  # [B, G, T, E]
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    kv_cache: KVCache,
    slots: Tensor,  # [B * T] int64, where k and v go
    ancestors: Tensor | None,  # [B, T, W]; None in a prefill
    num_nodes: Tensor | None = None,
    prefix_len: Tensor | None = None,
    reach: int = 0,
    tree_attention: Any = None,
    sliding_window: int | None = None,
    **_,
) -> tuple[Tensor, None]:
    """What transformers' attention registry calls in place of its own attention."""
    layer = module.layer_idx
    kv_cache.write(layer, key.transpose(1, 2), value.transpose(1, 2), slots)
    if ancestors is None:
        return causal_attention(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if torch.compiler.is_compiling():  # which takes the operator as it is, and trips over a form
        tree_attention = eagle2_kernels.tree_attention
    out = tree_attention(
        query.transpose(1, 2),
        kv_cache.k[layer, :, :reach],
        kv_cache.v[layer, :, :reach],
        prefix_len,
        ancestors,
        num_nodes,
        scaling,
        window=sliding_window,
    )
    return out, None


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of right-padded rows [B, heads, T, E]; padding only follows real rows."""
    rows = q.shape[2]
    if window is None or rows <= window:
        return nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        )
    place = torch.arange(rows, device=q.device)
    seen = (place[:, None] >= place) & (place[:, None] - place < window)
    return nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=scale, enable_gqa=True
    )


AttentionInterface.register(ATTENTION, tree_attention_forward)
