"""Every target family, with both kinds of head: the text is the target's own."""

import dataclasses

import pytest
import torch
import transformers
from eagle2 import TreeConfig, baseline, generate
from eagle2.target import Target
from tiny import (
    PROMPTS,
    make_eagle3_head,
    make_eagle3_pair,
    make_head,
    make_pair,
    make_target,
)

FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "Gemma": {"head_dim": 8, "tie_word_embeddings": False},
    "Gemma3Text": {"head_dim": 8, "tie_word_embeddings": False, "sliding_window": 8},
}
LENGTHS = {"max_new_tokens": 12}


def make_family(name, **changes):
    settings = {"num_hidden_layers": 7, "vocab_size": 16, **FAMILIES.get(name, {}), **changes}
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    return make_target(config=config, model=model, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    target = make_family(request.param)
    return target, baseline.generate(target, PROMPTS, **LENGTHS).tokens


def test_plain_text_is_that_of_transformers(family):
    target, plain = family
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        whole = target.generate(torch.tensor([prompt]), do_sample=False, **LENGTHS)
        assert whole[0, len(prompt) :].tolist() == tokens
    assert len({*sum(plain, [])}) > 2


@pytest.mark.parametrize("make", [make_head, make_eagle3_head])
def test_greedy_text_is_the_plain_one(family, make):
    target, plain = family
    head, accepted = make(target), set()
    for tree in (TreeConfig(8, 3, 40), TreeConfig(1, 3, 4)):
        for rows in (3, 1):
            result = generate(target, head, PROMPTS[:rows], tree=tree, **LENGTHS)
            assert result.tokens == plain[:rows]
            accepted |= {n for n, count in enumerate(result.statistics.accept_histogram) if count}
    assert accepted > {0}


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 6.0],
        "factor": 1.0,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_targets_with_scaled_rotary(kind):
    """To the end of what they can take: lengths of 32, whose last token no pass reads."""
    scaling = {"rope_type": kind, "rope_theta": 1e4, **SCALINGS[kind]}
    longest = 128 if kind == "longrope" else 32
    target = make_family("Llama", rope_parameters=scaling, max_position_embeddings=longest)
    same = kind in ("linear", "yarn", "llama3")
    head = make_head(target, rope_scaling=scaling if same else None)
    room = 32 - max(map(len, PROMPTS))
    plain = baseline.generate(target, PROMPTS, max_new_tokens=room).tokens
    for prompt, tokens in zip(PROMPTS, plain, strict=True):
        whole = target.generate(torch.tensor([prompt]), max_new_tokens=room, do_sample=False)
        assert whole[0, len(prompt) :].tolist() == tokens
    tree = TreeConfig(8, 3, 40)
    assert generate(target, head, PROMPTS, max_new_tokens=room, tree=tree).tokens == plain
    # nothing is written beyond, whatever is asked for
    over = generate(target, head, PROMPTS, max_new_tokens=4 * room, tree=tree)
    most = [len(prompt) + len(tokens) for prompt, tokens in zip(PROMPTS, over.tokens, strict=True)]
    assert max(most) <= 33


@pytest.mark.parametrize("name", ["Gemma2", "Cohere", "GptOss"])
def test_families_with_laws_of_their_own_are_refused(name):
    model = make_family(name, head_dim=8, num_local_experts=4)
    with pytest.raises(ValueError, match=f"model: {name}ForCausalLM has .*, not known here"):
        Target(model)


@pytest.mark.parametrize("make", [make_pair, make_eagle3_pair])
def test_r32_past_the_positions_of_the_head_s_config(make):
    target, head = make(context=1.0, max_position_embeddings=64)
    prompt = [[*range(5, 35)]]
    plain = baseline.generate(target, prompt, max_new_tokens=20)
    taus = []
    for limit in (32, 2048):
        head.config = dataclasses.replace(head.config, max_position_embeddings=limit)
        result = generate(target, head, prompt, max_new_tokens=20, tree=TreeConfig(4, 3, 10))
        assert result.tokens == plain.tokens
        taus.append(result.statistics.tau)
    assert taus[0] == taus[1] > 1.2


@pytest.mark.parametrize("layers", [2, 6])
def test_eagle_3_needs_seven_layers(layers):
    target = make_target(num_hidden_layers=layers)
    with pytest.raises(
        ValueError, match=f"head: wanted a target of 7 layers .*got one of {layers}"
    ):
        generate(target, make_eagle3_head(target), PROMPTS, max_new_tokens=4)
