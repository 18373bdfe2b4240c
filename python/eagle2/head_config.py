"""Shapes of draft heads. Field names are those of the published `config.json` files."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from .checks import one_of, positive_number, whole_number
from .rope import check_scaling


def check_field(name: str, kind: object, value: object) -> None:
    if kind in (int, int | None):
        whole_number(name, value)
    elif kind is float:
        positive_number(name, value)
    elif kind is bool:
        one_of(name, value, bool, "true or false")


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of an EAGLE-1/2 head, and what it shares with EAGLE-3.

    Attributes:
        draft_vocab_size: ids the head can draft; None = the target's whole vocabulary.
        bias: whether `fc` has a bias. Published files that do not say so have one.
        qkv_bias: whether q, k and v have one.
        rope_scaling: None, or a dict of type "linear", "yarn" or "llama3" as of transformers.
        head_dim: None = hidden_size / num_attention_heads.
        max_position_embeddings: for other readers of the file; positions have no end here.
        draft_temperature: draft logits are divided by it, which changes the ranking of candidates
            and so the trees, never the text; `eagle2 calibrate` fits it.
    """

    kind: ClassVar[str] = "EAGLE-2"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    draft_vocab_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bias: bool = True
    qkv_bias: bool = False
    rope_scaling: dict | None = dataclasses.field(default=None, hash=False)
    head_dim: int = None  # type: ignore[assignment]  # __post_init__ puts a number in its place
    max_position_embeddings: int = 2048
    draft_temperature: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not field.default:
                check_field(field.name, field.type, getattr(self, field.name))
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    "hidden_size: wanted a multiple of "
                    f"num_attention_heads={self.num_attention_heads}, got {self.hidden_size}"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: wanted a divisor of num_attention_heads="
                f"{self.num_attention_heads}, got {self.num_key_value_heads}"
            )
        if self.draft_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size: wanted 1..vocab_size={self.vocab_size}, "
                f"got {self.draft_vocab_size}"
            )
        check_scaling(self.rope_scaling)

    @property
    def draft_size(self) -> int:
        """Ids the head can draft."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def target_size(self) -> int:
        """Width of the target's hidden states."""
        return self.hidden_size

    @property
    def feature_size(self) -> int:
        """Width of the target features that the head is fed."""
        return self.target_size

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        """Target layers whose inputs are the features; none = the last hidden states instead."""
        return ()

    def misfits(self, hidden_size: int, vocab_size: int, num_layers: int) -> list[str]:
        """What keeps the head from a target of this shape; nothing if it fits."""
        return [
            f"wanted {name}={has} as the target has, got {wants}"
            for name, wants, has in (
                ("hidden_size", self.target_size, hidden_size),
                ("vocab_size", self.vocab_size, vocab_size),
            )
            if wants != has
        ]


@dataclasses.dataclass(frozen=True)
class Eagle3Config(HeadConfig):
    """Shape of an EAGLE-3 head; `bias` means nothing here, its `fc` has none.

    Attributes:
        target_hidden_size: None = hidden_size.
        eagle_aux_hidden_state_layer_ids: target layers whose inputs are the features, ascending;
            None = 2, n // 2 and n - 3 of a target of n layers.
        norm_before_residual: the residual starts from the normed hidden state.
        norm_before_fc: one norm over the features side by side (`input_norm`).
        fc_norm: one norm for each of the features.
        norm_output: the normed hidden state is fed back, not the bare one.
        qk_norm: q and k are normed head by head, as in Qwen3.
    """

    kind: ClassVar[str] = "EAGLE-3"

    target_hidden_size: int | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        super().__post_init__()
        layers = self.eagle_aux_hidden_state_layer_ids
        if layers is None:
            return
        one_of("eagle_aux_hidden_state_layer_ids", layers, Sequence, "layers in ascending order")
        for layer in layers:
            whole_number("eagle_aux_hidden_state_layer_ids", layer, 0)
        if not layers or list(layers) != sorted({*layers}):
            raise ValueError(
                "eagle_aux_hidden_state_layer_ids: wanted layers in ascending order, "
                f"got {list(layers)}"
            )
        object.__setattr__(self, "eagle_aux_hidden_state_layer_ids", tuple(layers))

    @property
    def target_size(self) -> int:
        return self.target_hidden_size or self.hidden_size

    @property
    def feature_size(self) -> int:
        return len(self.eagle_aux_hidden_state_layer_ids or range(3)) * self.target_size

    def feature_layers(self, num_layers: int) -> tuple[int, ...]:
        default = (2, num_layers // 2, num_layers - 3)
        return self.eagle_aux_hidden_state_layer_ids or default

    def misfits(self, hidden_size: int, vocab_size: int, num_layers: int) -> list[str]:
        chosen = self.eagle_aux_hidden_state_layer_ids
        # with fewer than 7 layers 2, n // 2 and n - 3 are not three layers in ascending order
        least = 7 if chosen is None else chosen[-1] + 1
        found = super().misfits(hidden_size, vocab_size, num_layers)
        if num_layers < least:
            names = "2, n // 2 and n - 3" if chosen is None else ", ".join(map(str, chosen))
            found.append(
                f"wanted a target of {least} layers or more, since EAGLE-3 reads the inputs of "
                f"layers {names}, got one of {num_layers}"
            )
        return found
