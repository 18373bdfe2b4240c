"""Draft heads: the EAGLE-2 network, and its published files (`config.json` + weights)."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

# attend(q [B, T, H, E], k [B, T, G, E], v [B, T, G, E]) -> [B, T, H, E]; it owns the cache, if any
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of an EAGLE-2 head. Field names are those of the published `config.json` files.

    Attributes:
        draft_vocab_size: ids the head can draft; None = the target's whole vocabulary.
        bias: whether `fc` has a bias. Published files that do not say so have one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bias: bool = True

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "hidden_size: wanted a multiple of "
                f"num_attention_heads={self.num_attention_heads}, got {self.hidden_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: wanted a divisor of num_attention_heads="
                f"{self.num_attention_heads}, got {self.num_key_value_heads}"
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size: wanted 1..vocab_size={self.vocab_size}, "
                f"got {self.draft_vocab_size}"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


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
    def __init__(self, config: HeadConfig):
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            dim,
        )
        self.q_proj = nn.Linear(size, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(size, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
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
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle2Head(nn.Module):
    """The EAGLE-1/2 draft network: `fc` on concat(embedding, feature), then one decoder layer.

    It predicts the target's next feature (the last hidden state after the final norm); the
    target's own `lm_head`, cut to the draft vocabulary, turns that into logits. EAGLE (arXiv
    2401.15077), section 4.1.
    """

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.bias)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        if config.draft_vocab_size is not None:
            # offsets, as published EAGLE-3 files store them: target id = draft id + d2t[draft id]
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def draft_to_target(self) -> Tensor | None:
        """Target id of each draft id, int64 [Vd]; None where the two vocabularies are one."""
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """Predict the features of the next positions.

        Args:
            embeddings: [B, T, Hd], the target's embedding of the token at position p + 1.
            features: [B, T, Hd], the feature of position p (the target's, or this head's own).
            positions: [B, T] or [T] integers, p: one below the target position of the token.
            attend: attention over the rows given and whatever the caller keeps before them.

        Returns:
            [B, T, Hd], the predicted features of position p + 1.
        """
        cos, sin = self.rotary(positions, embeddings.dtype)
        return self.layers[0](self.fc(torch.cat((embeddings, features), -1)), cos, sin, attend)

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # computed, not looked up: no table that a long context could outgrow
        half = torch.arange(
            0, self.config.head_dim, 2, device=positions.device, dtype=torch.float32
        )
        frequency = self.config.rope_theta ** (-half / self.config.head_dim)
        angle = (positions[..., None, None].float() * frequency).repeat(
            *[1] * positions.dim(), 1, 2
        )
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, T, H, E] in the two-halves layout of Llama."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def load_head(path: str | os.PathLike, dtype: torch.dtype = torch.float32) -> Eagle2Head:
    """Load an EAGLE-1/2 head: `config.json` and `model.safetensors` or `pytorch_model.bin`.

    Raises:
        FileNotFoundError: there is no such folder, no config or no weights in it.
        ValueError: a tensor is missing, unknown or of the wrong shape; `d2t` leaves the vocabulary.
    """
    path = Path(path)
    config = read_config(path / "config.json")
    weights = read_weights(path)
    head = Eagle2Head(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} is not part of an EAGLE-2 head" for name in found.keys() - expected.keys()]
    wrong += [
        f"{name} has shape {found[name]}, wanted {expected[name]}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    if wrong:
        raise ValueError(f"weights in {path}: " + "; ".join(sorted(wrong)))
    head.load_state_dict(weights)
    ids = head.draft_to_target
    if ids is not None and not (0 <= int(ids.min()) and int(ids.max()) < config.vocab_size):
        raise ValueError(
            f"d2t in {path}: wanted target ids in 0..{config.vocab_size - 1}, "
            f"got {int(ids.min())}..{int(ids.max())}"
        )
    return head.to(dtype).eval()


def read_config(path: Path) -> HeadConfig:
    raw = json.loads(path.read_text())
    fields = {field.name for field in dataclasses.fields(HeadConfig)}
    try:
        return HeadConfig(**{name: value for name, value in raw.items() if name in fields})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from None


def read_weights(path: Path) -> dict[str, Tensor]:
    if (path / "model.safetensors").exists():
        return load_file(path / "model.safetensors")
    if (path / "pytorch_model.bin").exists():
        return torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True)
    raise FileNotFoundError(f"{path}: wanted model.safetensors or pytorch_model.bin, found neither")


def save_head(
    head: Eagle2Head, path: str | os.PathLike, dtype: torch.dtype = torch.float16
) -> None:
    """Write a head in the published layout; a crash leaves the old weights whole."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor
        for name, tensor in head.state_dict().items()
    }
    fresh = path / "model.safetensors.partial"
    save_file(weights, fresh)
    (path / "config.json").write_text(json.dumps(dataclasses.asdict(head.config), indent=2) + "\n")
    os.replace(fresh, path / "model.safetensors")
