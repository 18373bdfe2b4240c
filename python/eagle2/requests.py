"""The rows of a batch: what each has said, where it ends, and how its tokens are chosen."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import function, whole_number

OnCommit = Callable[[int, list[int]], None]


class Sampling(NamedTuple):
    """Sampling parameters, one of each per row; fields in the order of the operators' arguments."""

    temperature: Tensor  # [B] float32, 0 = greedy
    top_k: Tensor  # [B] int32, 0 = off
    top_p: Tensor  # [B] float32, 1 = off
    min_p: Tensor  # [B] float32, 0 = off
    seed: Tensor  # [B] int64

    @classmethod
    def of(
        cls,
        batch: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        device: torch.device | None = None,
    ) -> "Sampling":
        """One value for all rows, or one per row.

        Raises:
            ValueError: a value out of range, or as many values as there are no rows.
        """
        return cls(
            rows("temperature", temperature, batch, torch.float32, 0.0, float("inf")).to(device),
            rows("top_k", top_k, batch, torch.int32, 0, 2**31 - 1).to(device),
            rows("top_p", top_p, batch, torch.float32, 0.0, 1.0).to(device),
            rows("min_p", min_p, batch, torch.float32, 0.0, 1.0).to(device),
            rows("seed", seed, batch, torch.int64, -(2**63), 2**63 - 1).to(device),
        )


def rows(name: str, value, batch: int, dtype: torch.dtype, low, high) -> Tensor:
    try:
        values = [value] * batch if isinstance(value, str) else list(value)
    except TypeError:
        values = [value] * batch
    if len(values) != batch:
        raise ValueError(f"{name}: wanted one value or {batch}, got {len(values)}")
    for one in values:
        if not dtype.is_floating_point:
            whole_number(name, one, low)
        try:
            inside = bool(low <= one <= high)
        except (TypeError, ValueError, RuntimeError):  # the last two are those of whole arrays
            wanted = "a number or one for each row"
            raise ValueError(f"{name}: wanted {wanted}, got {one!r}") from None
        if not inside:
            raise ValueError(f"{name}: wanted {low}..{high}, got {one}")
    return torch.tensor(values, dtype=dtype)


@dataclasses.dataclass
class Statistics:
    """What a call to `generate` or `baseline` did.

    Attributes:
        new_tokens: tokens returned, over all rows.
        cycles: target passes after the prefill, summed over the rows that took part.
        cycle_tokens: tokens committed by those cycles (the prefill gives one more to each row).
        accept_histogram: how many cycles accepted 0, 1, 2, ... drafts.
        stage_seconds: wall-clock seconds by stage; on a GPU a cycle is one stage.
    """

    new_tokens: int = 0
    cycles: int = 0
    cycle_tokens: int = 0
    accept_histogram: list[int] = dataclasses.field(default_factory=list)
    stage_seconds: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Mean tokens committed per cycle, the bonus token included."""
        return self.cycle_tokens / self.cycles if self.cycles else 0.0

    @property
    def seconds(self) -> float:
        return sum(self.stage_seconds.values())

    def count(self, accepted: int, committed: int) -> None:
        self.cycles += 1
        self.cycle_tokens += committed
        missing = accepted + 1 - len(self.accept_histogram)
        self.accept_histogram.extend([0] * missing)
        self.accept_histogram[accepted] += 1


class Generation(NamedTuple):
    """The answers of a batch."""

    tokens: list[list[int]]  # new ids of each row, an end token included
    finish_reasons: list[str]  # "eos", "length" (max_new_tokens or context) or "bad_logits"
    statistics: Statistics


class Requests:
    """Prompts, answers and limits of the rows of one call.

    Args:
        prompts: token ids of each row.
        max_new_tokens: most new tokens in each row.
        eos_token_ids: a row ends with the first of these.
        context_limit: longest a row may become, prompt included.
        on_commit: called with (row, new ids) whenever a row grows.

    Raises:
        ValueError: no rows, an empty prompt, a prompt with no room for a new token.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        context_limit: int,
        on_commit: OnCommit | None = None,
    ):
        whole_number("max_new_tokens", max_new_tokens)
        if on_commit is not None:
            function("on_commit", on_commit)
        for row, prompt in enumerate(prompts):
            if not 1 <= len(prompt) < context_limit:
                raise ValueError(
                    f"input_ids: wanted 1..{context_limit - 1} tokens in each row (the context "
                    f"holds {context_limit}), got {len(prompt)} in row {row}"
                )
        self.context_limit = context_limit
        self.prompts = [list(prompt) for prompt in prompts]
        self.answers: list[list[int]] = [[] for _ in self.prompts]
        self.reasons: list[str | None] = [None] * len(self.prompts)
        self.limits = [min(max_new_tokens, context_limit - len(p)) for p in self.prompts]
        self.eos_token_ids = frozenset(eos_token_ids)
        self.on_commit = on_commit

    def __len__(self) -> int:
        return len(self.prompts)

    def remaining(self, row: int) -> int:
        """New tokens a row may still get; 0 once it has ended."""
        return 0 if self.reasons[row] else self.limits[row] - len(self.answers[row])

    def capacity(self, num_nodes: int) -> int:
        """Cache slots that the longest row can come to need, trees included."""
        longest = max(
            (len(p) + n for p, n in zip(self.prompts, self.limits, strict=True)), default=1
        )
        return min(self.context_limit, longest + num_nodes)

    @property
    def done(self) -> bool:
        return all(self.reasons)

    def commit(self, row: int, tokens: list[int]) -> int:
        """Append tokens to a row's answer up to its end; return how many were kept."""
        kept = []
        for token in tokens[: self.remaining(row)]:
            if token < 0:
                self.reasons[row] = "bad_logits"
                break
            kept.append(token)
            if token in self.eos_token_ids:
                self.reasons[row] = "eos"
                break
        self.answers[row] += kept
        if not self.remaining(row) and not self.reasons[row]:
            self.reasons[row] = "length"
        if kept and self.on_commit:
            self.on_commit(row, kept)
        return len(kept)

    def generation(self, statistics: Statistics) -> Generation:
        statistics.new_tokens = sum(map(len, self.answers))
        return Generation(self.answers, [reason or "" for reason in self.reasons], statistics)
