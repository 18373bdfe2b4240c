"""Target features of recorded conversations: float16 rows, one per token, beside the JSONL of ids.

`NAME.f16` holds the last hidden states; `NAME.layers.f16`, for EAGLE-3, the inputs of the layers
that the head reads, side by side.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from .checks import read_lines
from .target import Target, features_of


class Conversation(NamedTuple):
    """One recorded conversation: a user turn and the target's own answer."""

    ids: np.ndarray  # int64 [T], chat template included
    features: np.ndarray  # float16 [T, Hd], the target's last hidden states after its final norm
    prompt_len: int  # ids[prompt_len:] is the answer
    temperature: float = 0.0  # the answer was drawn at
    inputs: np.ndarray | None = None  # float16 [T, F] of layers, where the head reads those


class FeatureWriter:
    """Append conversations to `NAME.jsonl` and their features to `NAME.f16`, safe against a kill.

    Features go first and the line seals them, so opening the pair again drops a half-written end.
    """

    def __init__(self, answers: str | os.PathLike, hidden_size: int):
        self.answers = Path(answers)
        self.rows = read_answers(self.answers) if self.answers.exists() else []
        _keep_whole_lines(self.answers)
        known = sum(len(row["ids"]) for row in self.rows) * hidden_size * 2
        path = feature_path(self.answers)
        if path.exists() and path.stat().st_size < known:
            raise ValueError(f"{path}: wanted at least {known} bytes, run write_features first")
        self.lines = self.answers.open("a")
        self.values = path.open("ab")
        self.values.truncate(known)

    def append(self, row: dict, features: np.ndarray) -> None:
        """Add one row (`ids`, `prompt_len`, anything else) with its features [T, Hd]."""
        self.values.write(features.astype(np.float16).tobytes())
        self.values.flush()
        self.lines.write(json.dumps(row, separators=(",", ":")) + "\n")
        self.lines.flush()
        self.rows.append(row)


def feature_path(answers: str | os.PathLike, layers: bool = False) -> Path:
    return Path(answers).with_suffix(".layers.f16" if layers else ".f16")


def read_answers(path: str | os.PathLike) -> list[dict]:
    """The whole lines of an answers file; a last line that a kill cut short is left out."""
    with open(path, encoding="utf-8") as lines:
        sealed = (line for line in lines if line.endswith("\n"))
        return [answer_of(row, place) for place, row in read_lines(path, sealed)]


def answer_of(row: object, place: str) -> dict:
    if isinstance(row, dict):
        ids, prompt_len = row.get("ids"), row.get("prompt_len")
        if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            if isinstance(prompt_len, int) and 0 < prompt_len <= len(ids):
                return row
    raise ValueError(
        f"{place}: wanted 'ids' and 'prompt_len', as `eagle2 data` writes them, got {str(row)[:60]}"
    )


def _keep_whole_lines(path: Path) -> None:
    if path.exists():
        text = path.read_bytes()
        if text and not text.startswith(b"{"):
            raise ValueError(f"{path}: wanted a new file or one of answers to go on with")
        os.truncate(path, text.rfind(b"\n") + 1)


def load_conversations(
    answers: str | os.PathLike, hidden_size: int, input_size: int = 0
) -> list[Conversation]:
    """Conversations whose features are there, with the inputs of layers if those have a size.

    The features stay on disk (memory-mapped).
    """
    values = map_rows(feature_path(answers), hidden_size)
    inputs = map_rows(feature_path(answers, layers=True), input_size) if input_size else None
    count = len(values) if inputs is None else min(len(values), len(inputs))
    found, start = [], 0
    for row in read_answers(answers):
        end = start + len(row["ids"])
        if end > count:
            break
        ids = np.array(row["ids"], np.int64)
        temperature = row.get("temperature", 0.0)
        own = None if inputs is None else inputs[start:end]
        found.append(Conversation(ids, values[start:end], row["prompt_len"], temperature, own))
        start = end
    return found


def map_rows(path: Path, size: int) -> np.ndarray:
    count = path.stat().st_size // (2 * size)
    if count == 0:
        return np.empty((0, size), np.float16)
    return np.memmap(path, np.float16, "r", shape=(count, size))


@torch.inference_mode()
def write_features(
    model, answers: str | os.PathLike, *, layers: Sequence[int] = (), batch_tokens: int = 2048
) -> int:
    """Prefill the conversations of an answers file whose features are still missing.

    Args:
        model: a causal LM of transformers whose `model` returns normed last hidden states.
        layers: write the inputs of these instead of the last hidden states.
        batch_tokens: about how many tokens one pass takes; memory grows with it.

    Returns:
        The number of tokens prefilled.

    Raises:
        ValueError: what the file holds are no answers, or those of another model.
    """
    size = model.config.hidden_size * max(len(layers), 1)
    rows, known = read_answers(answers), model.config.vocab_size
    for row in rows:
        if not 0 <= min(row["ids"]) <= max(row["ids"]) < known:
            raise ValueError(f"{answers}: wanted ids in 0..{known - 1}, got others")
    path = feature_path(answers, bool(layers))
    path.touch()
    done, start = 0, 0
    while done < len(rows) and (start + len(rows[done]["ids"])) * size * 2 <= path.stat().st_size:
        start += len(rows[done]["ids"])
        done += 1
    os.truncate(path, start * size * 2)
    lengths = [len(row["ids"]) for row in rows]
    bar = tqdm(total=sum(lengths), initial=start, unit="tok", desc="features", disable=None)
    with path.open("ab") as values, bar:
        while done < len(rows):
            last = done + 1
            while (
                last < len(rows)
                and max(lengths[done : last + 1]) * (last + 1 - done) <= batch_tokens
            ):
                last += 1
            for features in prefill(model, [row["ids"] for row in rows[done:last]], layers):
                values.write(features.half().cpu().numpy().tobytes())
            bar.update(sum(lengths[done:last]))
            done = last
    return sum(lengths) - start


def prefill(model, sequences: list[list[int]], layers: Sequence[int] = ()) -> list[Tensor]:
    """Features [T, Hd] of each sequence, from one right-padded causal pass.

    With `layers`: [T, F], the inputs of those side by side.
    """
    ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    with Target(model).inputs_of(tuple(layers)) as inputs:
        hidden = model.model(ids.to(model.device), use_cache=False).last_hidden_state
    hidden = features_of(hidden, inputs)
    return [row[: len(sequence)] for row, sequence in zip(hidden, sequences, strict=True)]
