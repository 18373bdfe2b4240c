"""What a caller may hand in as prompts and end tokens, as plain lists."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from transformers import PreTrainedModel

from .checks import one_of, whole_number


def token_rows(
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None = None,
    vocab_size: int | None = None,
    name: str = "input_ids",
) -> list[list[int]]:
    """Token ids of each row, padding left out wherever it stood.

    Raises:
        ValueError: not rows of whole numbers, no row, an id outside of a vocabulary that is given,
            or an attention_mask of another shape.
    """
    rows = _rows(input_ids, attention_mask, name)
    if not rows:
        raise ValueError(f"{name}: wanted one row or more, got none")
    for number, row in enumerate(rows):
        for token in (min(row), max(row)) if row else ():
            if vocab_size is not None and not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: wanted ids in 0..{vocab_size - 1}, got {token} in row {number}"
                )
    return rows


def _rows(
    input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None, name: str
) -> list[list[int]]:
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise ValueError("attention_mask: wanted input_ids as a tensor with it, got lists")
        if not isinstance(input_ids, Iterable) or isinstance(input_ids, str):
            raise ValueError(f"{name}: wanted rows of ids, got {input_ids!r}")
        input_ids = list(input_ids)
        if any(isinstance(row, int) for row in input_ids):
            raise ValueError(f"{name}: wanted a list of rows, got a list of ids")
        for number, row in enumerate(input_ids):
            one_of(f"{name}, row {number}", row, Iterable, "ids")
        return [[whole_number(name, token, -(2**63)) for token in row] for row in input_ids]
    if input_ids.dim() != 2:
        raise ValueError(f"{name}: wanted shape [B, T], got {[*input_ids.shape]}")
    if attention_mask is not None:
        one_of("attention_mask", attention_mask, Tensor, "a tensor")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: wanted shape {[*input_ids.shape]}, got {[*attention_mask.shape]}"
        )
    if input_ids.is_floating_point() or input_ids.is_meta:
        kind = "meta" if input_ids.is_meta else str(input_ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name}: wanted whole numbers, got a tensor of {kind}")
    if attention_mask is None:
        return input_ids.tolist()
    return [row[keep].tolist() for row, keep in zip(input_ids, attention_mask.bool(), strict=True)]


def end_tokens(model: PreTrainedModel, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row; those of the model's generation config where none are given."""
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    if isinstance(eos_token_id, Tensor):
        eos_token_id = eos_token_id.flatten().tolist()
    if isinstance(eos_token_id, str) or not isinstance(eos_token_id, Iterable):
        eos_token_id = [eos_token_id]
    return [whole_number("eos_token_id", token, -(2**63)) for token in eos_token_id]
