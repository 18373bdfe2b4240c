"""The draft networks of EAGLE-1/2 and EAGLE-3."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from .head_config import Eagle3Config, HeadConfig
from .packed import pack_like
from .rope import angles, frequencies, rotate

# attend(q [B, T, H, E], k [B, T, G, E], v [B, T, G, E]) -> [B, T, H, E]; it owns the cache, if any
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (
            nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight
        )


class Attention(nn.Module):
    def __init__(self, config: HeadConfig, width: int, qk_norm: bool = False):
        super().__init__()
        self.dim, bias = config.head_dim, config.qkv_bias
        rows, kv_rows = (
            heads * self.dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.q_proj = nn.Linear(width, rows, bias=bias)
        self.k_proj = nn.Linear(width, kv_rows, bias=bias)
        self.v_proj = nn.Linear(width, kv_rows, bias=bias)
        self.o_proj = nn.Linear(rows, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(self.dim, config.rms_norm_eps) if qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        return self.o_proj(attend(rotate(q, cos, sin), rotate(k, cos, sin), v).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: HeadConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama layer without its input norm, as EAGLE-1/2 heads have it."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Layer(nn.Module):
    """A Llama layer that attends over embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Attention(config, 2 * size, config.qk_norm)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat((self.input_layernorm(embeddings), normed), -1)
        x = (normed if self.norm_before_residual else hidden) + self.self_attn(x, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """What the draft networks have in common.

    Args:
        config: the shape.
        own_embedding: whether the head has an embedding of its own, `embed_tokens`; otherwise it
            uses the target's.

    Raises:
        ValueError: config is of another kind.
    """

    shape: ClassVar[type[HeadConfig]] = HeadConfig
    d2t: Tensor

    def __init__(self, config: HeadConfig, own_embedding: bool = False):
        super().__init__()
        if type(config) is not self.shape:
            wanted, got = self.shape.__name__, type(config).__name__
            raise ValueError(f"config: wanted {wanted}, got {got}")
        self.config = config
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        )
        if config.draft_vocab_size is not None:
            # offsets, as published EAGLE-3 files store them: target id = draft id + d2t[draft id]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def draft_to_target(self) -> Tensor | None:
        """Target id of each draft id, int64 [Vd]; None where the two vocabularies are one."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return angles(positions, *frequencies(self.config, positions.device), dtype)

    def tempered(self, lm_head: nn.Linear) -> Callable[[Tensor], Tensor]:
        """`lm_head` with its logits over the draft temperature: its input is the smaller one."""
        temperature = self.config.draft_temperature
        return lm_head if temperature == 1 else lambda hidden: lm_head(hidden / temperature)

    def check_width(self, features: Tensor) -> None:
        if features.shape[-1] != self.config.feature_size:
            raise ValueError(
                f"features: wanted width {self.config.feature_size}, got {features.shape[-1]}"
            )


class Eagle2Head(Head):
    """The EAGLE-1/2 draft network: `fc` on concat(embedding, feature), then one decoder layer.

    It predicts the target's next feature (the last hidden state after the final norm); the
    target's own `lm_head`, cut to the draft vocabulary, turns that into logits. EAGLE (arXiv
    2401.15077), section 4.1.
    """

    def __init__(self, config: HeadConfig, own_embedding: bool = False):
        super().__init__(config, own_embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config)])

    def features(self, features: Tensor) -> Tensor:
        """Hidden states [B, T, Hd] that stand for target features [B, T, F]."""
        self.check_width(features)
        return features

    def to_logits(self, lm_head: nn.Linear) -> Callable[[Tensor], Tensor]:
        """Draft logits [B, T, Vd] from hidden states, given the target's lm_head."""
        return self.tempered(cut_lm_head(lm_head, self.draft_to_target))

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Predict the features of the next positions.

        Args:
            embeddings: [B, T, Hd], the embedding of the token at position p + 1.
            hidden: [B, T, Hd], the feature of position p (the target's, or this head's own).
            positions: [B, T] or [T] integers, p: one below the target position of the token.
            attend: attention over the rows given and whatever the caller keeps before them.

        Returns:
            [B, T, Hd], the predicted features of position p + 1.
        """
        cos, sin = self.rotary(positions, embeddings.dtype)
        return self.layers[0](self.fc(torch.cat((embeddings, hidden), -1)), cos, sin, attend)


class Eagle3Head(Head):
    """The EAGLE-3 draft network: `fc` on three target features, then one layer of its own width.

    It has its own norm and lm_head, and is fed its own hidden states at later steps. EAGLE-3 (arXiv
    2503.01840), section 3.
    """

    shape = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, own_embedding: bool = False):
        super().__init__(config, own_embedding)
        size, width, eps = config.hidden_size, config.feature_size, config.rms_norm_eps
        self.fc = nn.Linear(width, size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if config.fc_norm:
            single = config.target_hidden_size or size
            self.fc_norm = nn.ModuleList(RMSNorm(single, eps) for _ in range(width // single))

    def features(self, features: Tensor) -> Tensor:
        self.check_width(features)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self.fc(features)

    def to_logits(self, lm_head: nn.Linear) -> Callable[[Tensor], Tensor]:
        logits = self.tempered(self.lm_head)
        return logits if self.config.norm_output else lambda hidden: logits(self.norm(hidden))

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """As `Eagle2Head.forward`, with hidden states from `features` or of this head's own."""
        cos, sin = self.rotary(positions, embeddings.dtype)
        hidden = self.midlayer(embeddings, hidden, cos, sin, attend)
        return self.norm(hidden) if self.config.norm_output else hidden


def cut_lm_head(lm_head: nn.Linear, draft_to_target: Tensor | None) -> nn.Linear:
    """The target's lm_head with the rows of the draft vocabulary alone; packed if it is."""
    if draft_to_target is None:
        return lm_head
    rows = lm_head.weight[draft_to_target]
    layer = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    return pack_like(lm_head, layer)
