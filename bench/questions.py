"""Questions to be answered, and the file that keeps what has been measured on each."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from eagle2.text import encode


class Question(NamedTuple):
    task: str
    question_id: int | str
    turns: list[str]


def read_questions(
    path: Path, every: int, limit: int | None, most_turns: int | None = None
) -> list[Question]:
    """Questions by task: one file per task in a folder, or one file with categories.

    Args:
        path: JSON lines with question_id, category and turns, or a folder of such files.
        every: take every n-th question of a file.
        limit: most questions per task.
        most_turns: of a question, the first so many.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    tasks = defaultdict(list)
    for file in files:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        for row in rows[every - 1 :: every]:
            task = file.stem if path.is_dir() else row["category"]
            tasks[task].append(Question(task, row["question_id"], row["turns"][:most_turns]))
    if not tasks:
        raise ValueError(f"--prompts: wanted JSON lines with questions, found none in {path}")
    return [question for found in tasks.values() for question in found[:limit]]


def encode_turn(tokenizer, turns: Sequence[str], answers: Sequence[str]) -> list[int]:
    """Ids of a conversation up to its last turn; one answer fewer than turns."""
    if not answers or not tokenizer.chat_template:
        earlier = [text for pair in zip(turns, answers, strict=False) for text in pair]
        return encode(tokenizer, "\n".join([*earlier, turns[-1]]))
    chat = [{"role": "user", "content": turns[0]}]
    for turn, answer in zip(turns[1:], answers, strict=True):
        chat.append({"role": "assistant", "content": answer})
        chat.append({"role": "user", "content": turn})
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]


class Records:
    """What was measured, one JSON line per answer, kept as soon as it is known.

    The first line holds the settings. A last line that a kill cut off is dropped.

    Args:
        file: where to keep them; None = nowhere.
        settings: what all the answers have in common.

    Raises:
        ValueError: the file was begun with other settings.
    """

    def __init__(self, file: Path | None, settings: dict):
        self.file, self.settings = file, settings
        self.rows: list[dict] = []
        if file is None:
            return
        lines = whole_lines(file)
        if lines:
            begun, *self.rows = lines
            apart = [name for name in settings if begun.get(name) != settings[name]]
            if apart:
                raise ValueError(
                    f"--out: {file} was begun with {apart[0]} {begun.get(apart[0])!r}, "
                    f"got {settings[apart[0]]!r}; go on with the same or choose another folder"
                )
        else:
            self._write(settings)

    def find(self, **key) -> dict | None:
        """The record with these values, if there is one."""
        for row in self.rows:
            if all(row[name] == value for name, value in key.items()):
                return row
        return None

    def add(self, row: dict) -> None:
        self.rows.append(row)
        if self.file is not None:
            self._write(row)

    def _write(self, row: dict) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


def whole_lines(file: Path) -> list[dict]:
    """The JSON lines of a file; what follows its last line break is cut off the file."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        file.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]
