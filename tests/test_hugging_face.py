"""`model.generate` through draft trees is `model.generate`."""

import eagle2
import pytest
import torch
from eagle2 import TreeConfig
from eagle2.target import Target
from hugging_face_cases import COMMON, PADDED, PROMPT, TREE, a_pair, each_way, inputs  # noqa: F401
from tiny import VOCAB, make_eagle3_pair
from transformers import DynamicCache, GenerationConfig

GREEDY = [
    {},
    {"max_new_tokens": 1},
    {"max_new_tokens": None, "max_length": 17},
    {"min_new_tokens": 12, "eos_token_id": list(range(20, 40))},
    {"min_length": 14, "eos_token_id": [*range(40)]},
    {"eos_token_id": list(range(0, VOCAB, 3))},
    {"eos_token_id": 7},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[3], [4, 5]]},
    {"suppress_tokens": [*range(10, 30)]},
    {"forced_eos_token_id": 5, "eos_token_id": 5},
    {"exponential_decay_length_penalty": (3, 1.2), "eos_token_id": [1, 2]},
    {"num_beams": 1, "renormalize_logits": True},
    {"prefix_allowed_tokens_fn": lambda row, ids: [*range(row, 40, 2), 50 + len(ids) % 7]},
]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("options", GREEDY, ids=lambda options: "-".join(options) or "plain")
def test_greedy(pair, ours, options, batch):
    options = {**COMMON, **inputs(batch), **options}
    wanted = pair[0].generate(**options)
    got = ours(**options)
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted)
    assert not got.is_inference()


SAMPLED = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 10, "top_p": 0.8},
    {"min_p": 0.1, "top_k": 0, "repetition_penalty": 1.2},
    {"eos_token_id": list(range(0, VOCAB, 4)), "typical_p": 0.9},
    {"epsilon_cutoff": 0.02, "eta_cutoff": 0.02, "num_return_sequences": 1},
]


@pytest.mark.parametrize("options", SAMPLED, ids="-".join)
def test_one_sampled_row_is_the_same_text(pair, ours, options):
    """As many draws as there are tokens, in the same order: the same seed, the same text."""
    options = {**COMMON, "do_sample": True, "input_ids": PROMPT, **options}
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = pair[0].generate(**options)
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(ours(**options), wanted)
        assert torch.equal(torch.rand(1), after)


def test_sampled_law_of_a_batch(pair):
    """num_return_sequences and a batch: the first tokens of many rows, by chi-square."""
    model, head = pair
    options = {**COMMON, "do_sample": True, "temperature": 1.5, "top_k": 4, "max_new_tokens": 3,
               "num_return_sequences": 400, "input_ids": PROMPT}  # fmt: skip
    torch.manual_seed(1)
    tree = TreeConfig(3, 3, 8)
    ours = model.generate(**options, custom_generate=eagle2.custom_generate(head, tree))
    theirs = model.generate(**{**options, "num_return_sequences": 4000})
    assert ours.shape == (400, 7)
    for column in (4, 5, 6):
        law = torch.bincount(theirs[:, column], minlength=VOCAB) / 4000
        seen = torch.bincount(ours[:, column], minlength=VOCAB)
        frequent = law > 0.02
        assert seen[law == 0].sum() <= 2
        wanted = 400 * law[frequent]
        # both are samples: the variance of theirs is a tenth of ours
        statistic = ((seen[frequent] - wanted) ** 2 / (1.1 * wanted)).sum()
        degrees = int(frequent.sum())
        assert statistic < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("sampled", [False, True])
def test_outputs(pair, ours, sampled):
    options = {**COMMON, "input_ids": PROMPT, "do_sample": sampled, "top_k": 5,
               "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
               "repetition_penalty": 1.1}  # fmt: skip
    if not sampled:
        del options["top_k"]
    torch.manual_seed(3)
    wanted = pair[0].generate(**options)
    torch.manual_seed(3)
    got = ours(**options)
    assert type(got) is type(wanted)
    assert torch.equal(got.sequences, wanted.sequences)
    assert len(got.scores) == len(got.logits) == 20
    for name in ("scores", "logits"):
        for a, b in zip(got[name], wanted[name], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    fewer = ours(**{**options, "output_scores": False, "output_logits": False})
    assert fewer.scores is fewer.logits is fewer.attentions is None


def test_fewer_passes_than_tokens(pair, ours, monkeypatch):
    passes = []
    original = Target.tree_pass
    monkeypatch.setattr(
        Target, "tree_pass", lambda self, *args: passes.append(1) or original(self, *args)
    )
    ours(**COMMON, input_ids=PROMPT)
    assert 3 < len(passes) < 15


def test_num_return_sequences_and_config_object(pair, ours):
    config = GenerationConfig(
        max_new_tokens=9, do_sample=True, num_return_sequences=3, pad_token_id=0, eos_token_id=[3]
    )
    got = ours(**inputs(3), generation_config=config)
    assert len(got) == 9
    assert torch.equal(got[:, :5], PADDED.repeat_interleave(3, 0))


def test_eagle3():
    model, head = make_eagle3_pair(context=2.0)
    options = {**COMMON, **inputs(3)}
    wanted = model.generate(**options)
    got = model.generate(**options, custom_generate=eagle2.custom_generate(head))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_beams": 2}, "beam"),
        ({"num_beams": 2, "do_sample": True}, "beam"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"max_new_tokens": 500}, "max_length"),
        ({"batch": 3, "output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6]])}, "position_ids"),
        ({"foreign": 1}, "foreign"),
    ],
    ids=str,
)
def test_refused_by_name(pair, options, named):
    options = {**COMMON, **inputs(options.pop("batch", 1)), **options}
    model, head = pair
    with pytest.raises(ValueError, match=named):
        model.generate(**options, custom_generate=eagle2.custom_generate(head))


def test_a_filled_cache_is_refused(pair):
    model, head = pair
    cache = DynamicCache(config=model.config)
    model(PROMPT[:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match="cache|past_key_values"):
        model.generate(
            PROMPT, past_key_values=cache, **COMMON, custom_generate=eagle2.custom_generate(head)
        )


def test_attached_gives_the_model_back(pair):
    model, head = pair
    found = type(model)
    with pytest.raises(ValueError, match="foreign"), eagle2.attached(model, head):
        model.generate(PROMPT, **COMMON, foreign=1)
    assert type(model) is found
    # what is not greedy or sampled goes on as it was
    with eagle2.attached(model, head):
        got = model.generate(PROMPT, **COMMON, num_beams=2)
    assert torch.equal(got, model.generate(PROMPT, **COMMON, num_beams=2))
