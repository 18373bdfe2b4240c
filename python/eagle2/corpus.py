"""The conversations a head learns from, and the order in which it sees them."""

import os
from collections.abc import Iterator, Sequence

import numpy as np

from .features import Conversation, load_conversations


class Corpus:
    """Conversations of several answers files, in batches of like length and random order.

    Args:
        input_size: width of the layers' inputs that the head reads; 0 = it reads none.
        batch_tokens: about how many tokens, padding included, a batch holds.
        max_length: longer conversations are left out.
        temperatures: only answers drawn at one of these; None = all.
    """

    def __init__(
        self,
        hidden_size: int,
        answers: Sequence[str | os.PathLike],
        batch_tokens: int,
        max_length: int,
        temperatures: Sequence[float] | None,
        seed: int,
        input_size: int = 0,
    ):
        self.hidden_size, self.input_size = hidden_size, input_size
        self.answers, self.seed = answers, seed
        self.batch_tokens, self.max_length = batch_tokens, max_length
        self.temperatures = temperatures

    def load(self, counts: list[int] | None = None) -> tuple[list[Conversation], list[int]]:
        """The first `counts` conversations of each file (None = all there are), and `counts`."""
        sizes = self.hidden_size, self.input_size
        files = [load_conversations(path, *sizes) for path in self.answers]
        counts = counts or [len(file) for file in files]
        found = [c for file, count in zip(files, counts, strict=True) for c in file[:count]]
        kept = [c for c in found if self.wants(c)]
        if not kept:
            raise ValueError(
                f"answers: wanted conversations of {self.max_length} tokens or fewer, whose "
                f"answers have three or more, got none of {len(found)}"
            )
        return kept, counts

    def wants(self, conversation: Conversation) -> bool:
        if self.temperatures is not None and conversation.temperature not in self.temperatures:
            return False
        return conversation.prompt_len + 2 < len(conversation.ids) <= self.max_length

    def batches(self, epoch: int, counts: list[int] | None = None):
        """All batches of an epoch, and the counts that give the same batches again."""
        conversations, counts = self.load(counts)
        draw = np.random.default_rng((self.seed, epoch))
        return list(order_batches(conversations, self.batch_tokens, draw)), counts


def order_batches(conversations, batch_tokens: int, draw) -> Iterator[list[Conversation]]:
    """Batches in random order; conversations of like length, at random, share one."""
    order = draw.permutation(len(conversations))
    batches = []
    for window in np.array_split(order, max(1, len(order) // 64)):
        batch: list[Conversation] = []
        for number in sorted(window, key=lambda number: len(conversations[number].ids)):
            if batch and len(conversations[number].ids) * (len(batch) + 1) > batch_tokens:
                batches.append(batch)
                batch = []
            batch.append(conversations[number])
        batches.append(batch)
    return (batches[number] for number in draw.permutation(len(batches)))
