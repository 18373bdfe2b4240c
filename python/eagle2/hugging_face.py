"""Trees behind transformers' own `generate`: what it prepares is kept to, or refused by name.

    answer = model.generate(**inputs, custom_generate=eagle2.custom_generate(head), ...)

    with eagle2.attached(model, head):  # also for pipelines, and for stop_strings
        answer = model.generate(**inputs, ...)

Greedy and sampled decoding of any batch, with every logits processor and stopping criterion that
judges a row by itself. With one row and a seed set, sampled text is the very text of plain
`generate`; with more, rows take their random numbers in another order, so the law is the same.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

import eagle2_kernels

from . import decode
from .cycle import Cycle
from .drafter import TreeConfig, check_pair
from .networks import Head
from .requests import Sampling
from .target import Target, check_model
from .turns import Turns

# what `generate` hands on that has no bearing here
IGNORED = {"attention_mask", "use_cache", "logits_to_keep", "cache_position", "tokenizer"}
# logits processors that run the model on their own, or keep a state of the whole batch
NEVER = {"UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale"}
ALONE = {"SynthIDTextWatermarkLogitsProcessor": "watermarking_config"}


def custom_generate(head: Head, tree: TreeConfig | None = None) -> Callable:
    """The decoding method for `model.generate(..., custom_generate=...)`.

    `stop_strings` does not reach decoding methods given this way: transformers drops the tokenizer
    and says so. Use `attached`, or a StopStringCriteria among the stopping_criteria.

    Args:
        head: an EAGLE-1/2 or EAGLE-3 head of the model.
        tree: size of the trees; None = the defaults.

    Raises:
        ValueError: head or tree is something else.
    """
    check_pair(head, tree)

    def decoding_method(
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs,
    ):
        # transformers hands no streamer on to a decoding method of others
        streamer = sys._getframe(1).f_locals.get("streamer")
        return answer(
            model, head, tree, input_ids, logits_processor, stopping_criteria, generation_config,
            streamer, **model_kwargs,
        )  # fmt: skip

    return decoding_method


@contextlib.contextmanager
def attached(
    model: PreTrainedModel, head: Head, tree: TreeConfig | None = None
) -> Iterator[PreTrainedModel]:
    """Within it, greedy and sampled `generate` of this model go through the head's trees."""
    check_model(model)
    check_pair(head, tree)

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config,
        synced_gpus=False, streamer=None, **model_kwargs,
    ):  # fmt: skip
        if synced_gpus:
            raise ValueError("synced_gpus: wanted False, got True")
        return answer(
            self, head, tree, input_ids, logits_processor, stopping_criteria, generation_config,
            streamer, **model_kwargs,
        )  # fmt: skip

    found = type(model)
    model.__class__ = type(found.__name__, (found,), {"_sample": _sample})
    try:
        yield model
    finally:
        model.__class__ = found


def answer(
    model: PreTrainedModel,
    head: Head,
    tree: TreeConfig | None,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer=None,
    **model_kwargs,
) -> Tensor | GenerateDecoderOnlyOutput:
    """What transformers' decoding methods do, with its arguments.

    Raises:
        ValueError: something asked for that is not done here, by its name.
    """
    target = Target(model)
    refuse(target, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
    turns = Turns(
        input_ids, model_kwargs.get("attention_mask"), logits_processor, stopping_criteria,
        generation_config, streamer and streamer.put, target.group,
    )  # fmt: skip
    form = eagle2_kernels.form_for(target.device)
    operators = {name: getattr(form, name) for name in eagle2_kernels.ops.OPERATORS}
    operators.update(sample=turns.sample, accept=turns.accept)
    target = Target(model, SimpleNamespace(**operators))
    sampling = Sampling.of(len(turns), device=target.device)
    decode.decode(target, head, turns, sampling, tree, cycles=Cycle)
    if streamer is not None:
        streamer.end()

    sequences = whole(turns, generation_config, input_ids)
    if not generation_config.return_dict_in_generate:
        return sequences
    kept = {"scores": turns.scores, "logits": turns.logits}
    # clones, because what inference mode made cannot be used everywhere
    kept = {name: x and tuple(value.clone() for value in x) for name, x in kept.items()}
    return GenerateDecoderOnlyOutput(sequences=sequences, **kept)


def whole(turns: Turns, generation_config: GenerationConfig, input_ids: Tensor) -> Tensor:
    """Prompts and answers [B, T + longest answer], filled up with the pad token."""
    width = turns.width + max(turns.ends)
    filler = generation_config._pad_token_tensor if turns.pads else 0
    out = input_ids.new_full((len(turns), width), int(filler))
    for row, ids in enumerate(turns.ids):
        out[row, : ids.shape[1]] = ids[0, :width]
    return out


def refuse(
    target: Target,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict,
) -> None:
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"generation_config: wanted greedy or sampled decoding, got {mode.value}")
    wrong = [name for name in ("output_attentions", "output_hidden_states")
             if getattr(generation_config, name)]  # fmt: skip
    classes = {type(processor).__name__ for processor in logits_processor}
    wrong += [name for kind, name in NEVER.items() if kind in classes]
    if len(input_ids) > 1:
        several = [name for kind, name in ALONE.items() if kind in classes]
        several += [name for name in ("output_scores", "output_logits")
                    if generation_config.return_dict_in_generate
                    and getattr(generation_config, name)]  # fmt: skip
        wrong += [f"{name} of several rows" for name in several]
    for name, value in model_kwargs.items():
        if name in ("cache", "past_key_values"):
            if value is not None and value.get_seq_length():
                wrong.append(name)
        elif name == "position_ids":
            if value is not None and not usual_positions(value, model_kwargs.get("attention_mask")):
                wrong.append(name)
        elif name not in IGNORED and value is not None:
            wrong.append(name)
    if wrong:
        raise ValueError(f"generate: {', '.join(wrong)} cannot be had with draft trees")
    longest = stopping_criteria.max_length
    if longest is None or longest > target.context_limit:
        raise ValueError(f"max_length: wanted {target.context_limit} or less, which is what the "
                         f"model's context holds, got {longest}")  # fmt: skip


def usual_positions(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether they count the tokens that are not padding, which is what is done here."""
    if attention_mask is None:
        return bool((position_ids == torch.arange(position_ids.shape[-1]).to(position_ids)).all())
    live = attention_mask.bool()
    return bool((position_ids == attention_mask.long().cumsum(-1) - 1)[live].all())
