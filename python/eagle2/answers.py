"""Training text for a draft head: the target answers prompts that it mostly wrote itself."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from .checks import whole_number
from .features import FeatureWriter
from .held_out import HeldOut
from .rope import rotate


class Decoder:
    """One token per row and step through a Llama-family target, every row at its own position."""

    def __init__(self, model, rows: int, capacity: int):
        self.model, self.rows = model, rows
        config = model.config
        self.kv_heads = config.num_key_value_heads
        self.dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        shape = (config.num_hidden_layers, 2, rows, self.kv_heads, capacity, self.dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed tokens [B] at positions [B]; returns their features, float32 [B, Hd]."""
        model = self.model.model
        x = model.embed_tokens(tokens).float()
        cos, sin = model.rotary_emb(x, positions[:, None])
        cos, sin = cos[:, :, None], sin[:, :, None]
        for index, layer in enumerate(model.layers):
            inner = norm(layer.input_layernorm, x)
            q, k, v = (
                projection(inner).unflatten(-1, (1, -1, self.dim)).float()
                for projection in (
                    layer.self_attn.q_proj,
                    layer.self_attn.k_proj,
                    layer.self_attn.v_proj,
                )
            )
            mixed = self.attend(
                index, rotate(q, cos, sin)[:, 0], rotate(k, cos, sin)[:, 0], v[:, 0], positions
            )
            x = x + layer.self_attn.o_proj(mixed.flatten(1).to(inner.dtype)).float()
            x = x + layer.mlp(norm(layer.post_attention_layernorm, x)).float()
        return norm(model.norm, x, torch.float32)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        """Store k and v [B, G, E] of a layer, then attend with q [B, H, E]; returns [B, H, E]."""
        keys, values = self.cache[index]
        rows = torch.arange(self.rows, device=q.device)
        keys[rows, :, positions] = k.to(keys.dtype)
        values[rows, :, positions] = v.to(values.dtype)
        end = int(positions.max()) + 1
        seen = torch.arange(end, device=q.device) <= positions[:, None]
        # the query heads of a group are the rows of one product
        grouped = q.unflatten(1, (self.kv_heads, -1)).to(keys.dtype)
        mixed = nn.functional.scaled_dot_product_attention(
            grouped, keys[:, :, :end], values[:, :, :end], attn_mask=seen[:, None, None]
        )
        return mixed.flatten(1, 2)


def norm(module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    weight = module.weight
    scaled = nn.functional.rms_norm(x, x.shape[-1:], weight.float(), module.variance_epsilon)
    return scaled.to(dtype or weight.dtype)


@dataclasses.dataclass
class Slot:
    """One conversation in the making."""

    number: int
    ids: list[int]
    draw: np.random.Generator
    temperature: float  # of the answer
    turn_end: int  # the user turn is closed at this length at the latest; 0 once it is closed
    prompt_len: int
    position: int = 0
    closed: bool = False

    @property
    def waits(self) -> bool:
        """Whether the token after `position` is still to be drawn."""
        return not self.closed and self.position + 1 == len(self.ids)


class Writer:
    """Plans conversations and moves them on, one drawn token at a time."""

    def __init__(
        self, tokenizer, prompts, held_out, *, seed, turn_temperature, temperatures, whole, limits
    ):
        self.tokenizer, self.held_out, self.seed = tokenizer, held_out, seed
        self.groups = [group for group in prompts if group]
        if not self.groups:
            raise ValueError("prompts: wanted one user turn or more, got none")
        whole_number("seed", seed, 0)
        self.turn_temperature, self.temperatures, self.whole = turn_temperature, temperatures, whole
        self.max_turn, self.max_answer = limits
        mark = "@@@"
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
        )
        self.before, self.after = (self.encode(part) for part in text.split(mark))
        self.eos = self.after[0]  # what ends a user turn ends an answer too

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def capacity(self) -> int:
        longest = max(len(self.encode(text)) for group in self.groups for text in group)
        return (
            len(self.before) + max(longest, self.max_turn) + len(self.after) + self.max_answer + 2
        )

    def plan(self, number: int) -> Slot:
        """Conversation `number`: a prompt as it is, or its first 3-8 words, or nothing at first."""
        draw = np.random.default_rng((self.seed, number))
        group = self.groups[draw.integers(len(self.groups))]
        text = group[draw.integers(len(group))]
        temperature = float(draw.choice(self.temperatures))
        kind, words = draw.random(), int(draw.integers(3, 9))
        if kind < self.whole:
            ids = [*self.before, *self.encode(text), *self.after]
            return Slot(number, ids, draw, temperature, 0, len(ids))
        limit = min(self.max_turn, max(32, len(self.encode(text))))
        start = "" if kind > 1 - self.whole else " ".join(re.split(r"(?<=\S) ", text)[:words])
        ids = [*self.before, *self.encode(start)]
        return Slot(number, ids, draw, temperature, len(self.before) + limit, 0)

    def push(self, slot: Slot, token: int) -> bool:
        """Take the drawn token in; False if the user turn, now whole, is near a held-out prompt."""
        if slot.prompt_len:
            slot.ids.append(token)
            slot.closed = token == self.eos or len(slot.ids) == slot.prompt_len + self.max_answer
            return True
        if token != self.eos:
            slot.ids.append(token)
        if token == self.eos or len(slot.ids) >= slot.turn_end:
            turn = self.tokenizer.decode(slot.ids[len(self.before) :])
            slot.ids += self.after
            slot.prompt_len = len(slot.ids)
            return not self.held_out(turn)
        return True


def write_answers(
    model,
    tokenizer,
    prompts: Sequence[Sequence[str]],
    answers,
    *,
    tokens: int = 1_000_000,
    held_out: Iterable[str] = (),
    temperatures: Sequence[float] = (0.0, 0.0, 0.0, 0.8, 1.0),
    turn_temperature: float = 1.0,
    whole: float = 0.12,
    max_turn_tokens: int = 192,
    max_answer_tokens: int = 192,
    slots: int = 128,
    seed: int = 0,
    decoder: type[Decoder] = Decoder,
) -> int:
    """Let the target hold conversations with itself until its answers fill `tokens` tokens.

    Writes `answers` (JSON lines: number, prompt_len, temperature, ids), features beside it. Stopped
    and started again, it goes on where it was; conversation n depends on (seed, n) only, up to
    rounding. Speed comes from many `slots`, and from a bfloat16 model where the CPU has such units.

    Args:
        prompts: groups of user turns, drawn from with equal weight. None of them may be held out.
        held_out: prompts kept out: a user turn too near one of them (`HeldOut`) is dropped.
        temperatures: one is drawn for each answer; 0 is greedy.
        whole: share of the conversations that take a prompt as it is, and that start from nothing.

    Returns:
        The number of answer tokens in the file.
    """
    writer = Writer(
        tokenizer, prompts, HeldOut(held_out), seed=seed, turn_temperature=turn_temperature,
        temperatures=temperatures, whole=whole, limits=(max_turn_tokens, max_answer_tokens),
    )  # fmt: skip
    out = FeatureWriter(answers, model.config.hidden_size)
    known = {row["number"] for row in out.rows}
    numbers = (number for number in itertools.count() if number not in known)
    written = sum(len(row["ids"]) - row["prompt_len"] for row in out.rows)
    machine = decoder(model, slots, writer.capacity)
    features = np.zeros((slots, writer.capacity, model.config.hidden_size), np.float16)
    active = [writer.plan(next(numbers)) for _ in range(slots)]

    def replace(row: int) -> None:
        active[row] = writer.plan(next(numbers))
        active[row].position = len(writer.before) - 1  # this row's cache holds what all share

    with tqdm(total=tokens, initial=written, unit="tok", desc="answers", disable=None) as bar:
        while written < tokens:
            fed = torch.tensor([slot.ids[slot.position] for slot in active], device=model.device)
            positions = torch.tensor([slot.position for slot in active], device=model.device)
            hidden = machine.step(fed, positions)
            features[np.arange(slots), positions.cpu().numpy()] = hidden.cpu().numpy()
            waiting = [row for row, slot in enumerate(active) if slot.waits]
            drawn = draw_tokens(
                model, hidden[waiting], [active[row] for row in waiting], turn_temperature
            )
            refused = {
                row
                for row, token in zip(waiting, drawn, strict=True)
                if not writer.push(active[row], token)
            }
            for row, slot in enumerate(active):
                slot.position += 1
                if row in refused:
                    replace(row)
                elif slot.closed and slot.position == len(slot.ids):
                    out.append(
                        {"number": slot.number, "prompt_len": slot.prompt_len,
                         "temperature": slot.temperature, "ids": slot.ids},
                        features[row, : len(slot.ids)],
                    )  # fmt: skip
                    written += len(slot.ids) - slot.prompt_len
                    bar.update(len(slot.ids) - slot.prompt_len)
                    replace(row)
    return written


@torch.inference_mode()
def draw_tokens(model, hidden: Tensor, slots: list[Slot], turn_temperature: float) -> list[int]:
    """The next token of each slot from its feature [B, Hd]."""
    if not slots:
        return []
    logits = model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()
    chosen = logits.argmax(-1).tolist()
    warm = [slot.temperature if slot.prompt_len else turn_temperature for slot in slots]
    rows = [row for row, temperature in enumerate(warm) if temperature > 0]
    if rows:
        scale = torch.tensor([warm[row] for row in rows], device=logits.device)
        mass = (logits[rows] / scale[:, None]).softmax(-1).cumsum(-1)
        point = torch.tensor([slots[row].draw.random() for row in rows], device=logits.device)
        picks = torch.searchsorted(mass, (point * mass[:, -1])[:, None].float(), right=True)
        for row, pick in zip(
            rows, picks[:, 0].clamp(max=logits.shape[-1] - 1).tolist(), strict=True
        ):
            chosen[row] = pick
    return chosen
