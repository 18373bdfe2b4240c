"""Prompts kept out of training, and how near to one of them a text may come."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm

from .checks import read_lines
from .features import FeatureWriter, prefill

SHARED_WORDS = 8


def read_prompts(folder: str | os.PathLike, held_out: bool) -> list[list[str]]:
    """User turns per `*.jsonl` file: first turns of the training lines, or every held-out turn.

    A line is held out when its 0-based number % 4 == 3.
    """
    files = read_turns(folder).values()
    if held_out:
        return [[turn for turns in rows[3::4] for turn in turns] for rows in files]
    return [[turns[0] for number, turns in enumerate(rows) if number % 4 != 3] for rows in files]


def read_turns(folder: str | os.PathLike) -> dict[str, list[list[str]]]:
    """The user turns of each line, by the name of the file.

    Raises:
        ValueError: there is no such file, or a line has no turns.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            found[path.stem] = [turns_of(row, place) for place, row in read_lines(path, lines)]
    if not any(found.values()):
        raise ValueError(f"{folder}: wanted files named *.jsonl with 'turns', found none")
    return found


def turns_of(row: object, place: str) -> list[str]:
    turns = row.get("turns") if isinstance(row, dict) else None
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return turns
    raise ValueError(f"{place}: wanted a JSON object with 'turns', got {str(row)[:60]}")


class HeldOut:
    """Tells whether a text shares a run of eight words (or all words of a shorter prompt) with
    a prompt kept out of training. Words are lower-cased runs of letters, digits and underscores."""

    def __init__(self, prompts: Iterable[str]):
        self.runs: set[tuple[str, ...]] = set()
        for prompt in prompts:
            words = self.words(prompt)
            self.runs.update(self.windows(words, min(SHARED_WORDS, len(words))))
        self.sizes = {len(run) for run in self.runs} - {0}

    def __call__(self, text: str) -> bool:
        words = self.words(text)
        return any(run in self.runs for size in self.sizes for run in self.windows(words, size))

    @staticmethod
    def words(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    @staticmethod
    def windows(words: list[str], size: int) -> Iterable[tuple[str, ...]]:
        return (tuple(words[i : i + size]) for i in range(len(words) - size + 1))


@torch.inference_mode()
def write_held_out(
    model, tokenizer, folder: str | os.PathLike, answers: str | os.PathLike, *, tokens: int = 128
) -> int:
    """The target's greedy answers to the first turns held out, one each, with their features.

    This is the file that `train` reports agreement on. Goes on after a stop.

    Args:
        model: a causal LM of transformers, in float32.
        folder: of prompt files, see `read_prompts`; their names become the rows' `task`.
        tokens: length of an answer at most.

    Returns:
        The number of answers in the file.
    """
    turns = [(task, turns[0]) for task, rows in read_turns(folder).items() for turns in rows[3::4]]
    out = FeatureWriter(answers, model.config.hidden_size)
    for number in tqdm(range(len(out.rows), len(turns)), desc="held out", disable=None):
        task, turn = turns[number]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        ids = model.generate(prompt, max_new_tokens=tokens, do_sample=False)[0].tolist()
        row = {"number": number, "task": task, "prompt_len": prompt.shape[1], "temperature": 0.0}
        out.append(row | {"ids": ids}, prefill(model, [ids])[0].numpy())
    return len(out.rows)
