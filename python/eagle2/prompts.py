"""What a caller may hand in as prompts and end tokens, as plain lists."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel


def token_rows(
    input_ids: Tensor | Sequence[Sequence[int]], attention_mask: Tensor | None = None
) -> list[list[int]]:
    """Token ids of each row, padding left out wherever it stood.

    Raises:
        ValueError: not two-dimensional, or an attention_mask of another shape.
    """
    if not isinstance(input_ids, Tensor):
        if attention_mask is not None:
            raise ValueError("attention_mask: wanted input_ids as a tensor with it, got lists")
        if any(isinstance(row, int) for row in input_ids):
            raise ValueError("input_ids: wanted a list of rows, got a list of ids")
        return [[int(token) for token in row] for row in input_ids]
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids: wanted shape [B, T], got {[*input_ids.shape]}")
    if attention_mask is None:
        return input_ids.tolist()
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask: wanted shape {[*input_ids.shape]}, got {[*attention_mask.shape]}"
        )
    return [row[keep].tolist() for row, keep in zip(input_ids, attention_mask.bool(), strict=True)]


def end_tokens(model: PreTrainedModel, eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The ids that end a row; those of the model's generation config where none are given."""
    if eos_token_id is None:
        eos_token_id = model.generation_config.eos_token_id
    if eos_token_id is None:
        return []
    if isinstance(eos_token_id, int):
        return [eos_token_id]
    return [int(token) for token in torch.as_tensor(eos_token_id).flatten()]
