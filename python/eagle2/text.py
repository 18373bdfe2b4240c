"""Prompts from the command line, and text on its way out."""

import sys
from pathlib import Path
from typing import Any, TextIO

from .checks import read_lines


def read_prompts(prompt: str | None, batch: Path | None) -> list[str]:
    """The prompt given, or the one on stdin for "-", or those of a JSON-lines file.

    Raises:
        ValueError: none or both given, an empty prompt, a line that is not what it should be.
        FileNotFoundError: no such file.
    """
    if (prompt is None) == (batch is None):
        raise ValueError("PROMPT and --batch: wanted one of them, got both or none")
    prompts: list[str] = []
    if prompt is not None:
        prompts.append(sys.stdin.read() if prompt == "-" else prompt)
    if batch is not None:
        with batch.open(encoding="utf-8") as lines:
            prompts = [prompt_of(row, place) for place, row in read_lines(batch, lines)]
    if not prompts or not all(text.strip() for text in prompts):
        raise ValueError(f"{batch or 'PROMPT'}: wanted some text, got none")
    return prompts


def prompt_of(row: Any, place: str) -> str:
    try:
        return str(row["prompt"] if "prompt" in row else row["turns"][0])
    except (KeyError, TypeError, IndexError):
        raise ValueError(
            f"{place}: wanted a JSON object with 'prompt' or 'turns', got {str(row)[:60]}"
        ) from None


def encode(tokenizer, text: str, raw: bool = False) -> list[int]:
    """Ids of a prompt, as the user's turn of a chat where the tokenizer has a template."""
    if raw or not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


class Stream:
    """Writes the text of row 0 as it grows, held back while a character is incomplete."""

    def __init__(self, tokenizer, out: TextIO | None):
        self.tokenizer, self.out = tokenizer, out
        self.ids: list[int] = []
        self.shown = 0

    def __call__(self, row: int, ids: list[int]) -> None:
        if self.out is None:
            return
        self.ids += ids
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self.out.write(text[self.shown :])
            self.out.flush()
            self.shown = len(text)

    def close(self) -> None:
        if self.out is not None:
            text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
            self.out.write(text[self.shown :] + "\n")
            self.out.flush()
