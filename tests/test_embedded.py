"""The embedded model and its head: the same text as plain decoding, on real prompts."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import eagle2
import pytest
import torch
from eagle2 import TreeConfig, baseline, embedded
from eagle2.near_ties import part
from eagle2.requests import Sampling
from eagle2.target import Target
from eagle2.text import encode

OWN = Path(__file__).parents[1] / "bench" / "prompts.jsonl"
SIX_TASKS = Path(__file__).parents[2] / "shared" / "prompts"
LENGTH = 128


@pytest.fixture(scope="module")
def engine():
    try:
        embedded.gguf_file()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    model, tokenizer = embedded.load_target()
    return model, eagle2.load_head(embedded.HEAD, model.dtype), tokenizer


def prompts_of(tokenizer, path, every=1):
    lines = path.read_text().splitlines()[every - 1 :: every]
    return [encode(tokenizer, json.loads(line)["turns"][0]) for line in lines]


def check_same(model, rows, plain, other, law=None):
    """Every answer equal, or parted at a near-tie; returns how many near-ties there were."""
    target = Target(model)
    partings = [
        part(target, *texts, Sampling.of(1, **(law or {})))
        for texts in zip(rows, plain.tokens, other.tokens, strict=True)
    ]
    wrong = [parting for parting in partings if parting and not parting.near_tie]
    assert not wrong, wrong
    return sum(parting is not None for parting in partings)


@pytest.mark.parametrize("half", [0, 1])
def test_greedy_text_is_plain_text(engine, half):
    model, head, tokenizer = engine
    rows = prompts_of(tokenizer, OWN)[half::2]
    plain = baseline.generate(model, rows, max_new_tokens=LENGTH)
    drafted = eagle2.generate(model, head, rows, max_new_tokens=LENGTH, tree=embedded.TREE)
    near_ties = check_same(model, rows, plain, drafted)
    print(f"{len(rows)} prompts, {near_ties} near-ties, tau {drafted.statistics.tau:.2f}")
    assert drafted.statistics.tau > 1.3  # an untrained head has 1.0


def test_generate_of_transformers_says_the_same(engine):
    model, head, tokenizer = engine
    rows = prompts_of(tokenizer, OWN)[:3]
    width = max(map(len, rows))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    options = {"attention_mask": mask, "max_new_tokens": 48, "do_sample": False}
    plain = model.generate(ids, **options)
    drafting = eagle2.custom_generate(head, embedded.TREE)
    drafted = model.generate(ids, **options, custom_generate=drafting)
    texts = [SimpleNamespace(tokens=said[:, width:].tolist()) for said in (plain, drafted)]
    check_same(model, rows, *texts)


def test_sampled_text_is_plain_text(engine):
    model, head, tokenizer = engine
    law = {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 7}
    rows = prompts_of(tokenizer, OWN, every=4)
    plain = baseline.generate(model, rows, max_new_tokens=48, **law)
    drafted = eagle2.generate(
        model, head, rows, max_new_tokens=48, tree=TreeConfig(6, 4, 24), **law
    )
    check_same(model, rows, plain, drafted, law)
    assert len({tuple(tokens[:12]) for tokens in plain.tokens}) == len(rows)


def test_the_largest_trees_take_different_shapes(engine):
    model, head, tokenizer = engine
    shapes = Counter()

    def count(tree, path):
        depths = tree.depths[0, : int(tree.num_nodes[0])]
        shapes[tuple(depths.bincount().tolist())] += 1

    for row in prompts_of(tokenizer, OWN, every=6):
        eagle2.generate(model, head, [row], max_new_tokens=24, on_cycle=count)
    assert len(shapes) > sum(shapes.values()) / 2


def test_draft_head_fits_the_card(engine):
    model, head, _ = engine
    size = sum(file.stat().st_size for file in embedded.HEAD.iterdir())
    assert size < 12.5e6
    assert head.config.vocab_size == model.config.vocab_size
    assert (embedded.HEAD / "README.md").exists()


def test_unpacking_leaves_all_or_nothing(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(embedded.AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(OSError, match="No space left"):
        embedded.dequantise(Path("model.gguf"), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install"):
        embedded.model_path(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("task", ["alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum"])
def test_held_out_prompts_of_the_six_tasks(engine, task):
    """Ten prompts each that the head was not trained on, in one ragged batch, 128 tokens."""
    if not SIX_TASKS.exists():
        pytest.skip("the prompts of the six tasks are not part of this repository")
    model, head, tokenizer = engine
    rows = prompts_of(tokenizer, SIX_TASKS / f"{task}.jsonl", every=4)
    with eagle2.packed(model, head):
        plain = baseline.generate(model, rows, max_new_tokens=LENGTH)
        for shape in (embedded.TREE, TreeConfig(10, 4, 24)):
            drafted = eagle2.generate(model, head, rows, max_new_tokens=LENGTH, tree=shape)
            near_ties = check_same(model, rows, plain, drafted)
            tau = drafted.statistics.tau
            print(f"{task}: {len(rows)} prompts, {near_ties} near-ties, {shape}, tau {tau:.2f}")
            assert tau > 1.4
