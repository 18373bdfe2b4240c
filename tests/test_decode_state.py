"""Nothing survives a call: not in the model, not in the caches, not in a seed."""

import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from eagle2.cache import KVCache
from tiny import PROMPTS, make_head, make_pair, make_target

A, B = PROMPTS[:2], [[9, 8, 7, 6], [30, 31], [40]]
SETTINGS = {"max_new_tokens": 20, "tree": TreeConfig(4, 3, 12)}


@pytest.fixture(scope="module")
def pair():
    return make_pair(context=1.0)


def plain_logits(target):
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        return target(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}])
def test_r41_one_call_leaves_nothing_for_the_next(pair, sampling):
    first = generate(*pair, A, **SETTINGS, **sampling).tokens
    other = generate(*pair, B, **SETTINGS, **sampling).tokens
    assert generate(*pair, A, **SETTINGS, **sampling).tokens == first
    assert generate(*make_pair(context=1.0), B, **SETTINGS, **sampling).tokens == other


@pytest.mark.parametrize("hook", ["on_commit", "on_cycle"])
def test_r41_after_an_exception_inside_a_callback(pair, hook):
    first = generate(*pair, A, **SETTINGS).tokens
    calls = 0

    def fail(*_):
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyError("mid-cycle")

    found, logits = pair[0].config._attn_implementation, plain_logits(pair[0])
    with pytest.raises(KeyError, match="mid-cycle"):
        generate(*pair, A, **{**SETTINGS, hook: fail})
    assert pair[0].config._attn_implementation == found
    assert torch.equal(plain_logits(pair[0]), logits)
    assert generate(*pair, A, **SETTINGS).tokens == first


def test_r41_after_an_exception_inside_the_model(pair):
    first = generate(*pair, A, **SETTINGS).tokens
    found = pair[0].config._attn_implementation
    passes = 0

    def fail(*_):
        nonlocal passes
        passes += 1
        if passes == 4:
            raise MemoryError("in a layer")

    hook = pair[0].model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        generate(*pair, A, **SETTINGS)
    hook.remove()
    assert pair[0].config._attn_implementation == found
    assert generate(*pair, A, **SETTINGS).tokens == first


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_r41_model_is_left_as_found(attention):
    target, head = make_pair(context=1.0, attn_implementation=attention)
    config, logits = target.config.to_dict(), plain_logits(target)
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    generate(target, head, A, **SETTINGS)
    assert target.config._attn_implementation == attention
    assert target.config.to_dict() == config
    assert torch.equal(plain_logits(target), logits)
    for name, weight in target.state_dict().items():
        assert torch.equal(weight, weights[name])
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_r41_two_runs_that_share_a_model_interleave(pair):
    heads = pair[1], make_head(pair[0])
    wanted = [generate(pair[0], head, A, **SETTINGS).tokens for head in heads]
    inner = []

    def other(tree, path):
        inner.append(generate(pair[0], heads[1], A, **SETTINGS).tokens)

    outer = generate(pair[0], heads[0], A, on_cycle=other, **SETTINGS).tokens
    assert outer == wanted[0]
    assert len(inner) > 2
    assert all(tokens == wanted[1] for tokens in inner)


def test_r33_a_smaller_batch_after_a_larger_one(pair, monkeypatch):
    caches, plain = [], KVCache.allocate

    def allocate(*shape):
        caches.append(plain(*shape))
        return caches[-1]

    prompts = [[20, 21, 22], [5], [17, 3], [50, 51, 52, 53]]
    generate(*pair, prompts, **SETTINGS)
    monkeypatch.setattr(KVCache, "allocate", allocate)
    result = generate(*pair, B, **SETTINGS)
    reused = [*caches]
    del caches[:]
    fresh = generate(*make_pair(context=1.0), B, **SETTINGS)
    assert result.tokens == fresh.tokens
    for old, new in zip(reused, caches, strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


def test_r48_global_generators_are_neither_used_nor_moved(pair):
    settings = {**SETTINGS, "temperature": 1.0, "seed": 42}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = generate(*pair, A, **settings).tokens
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert generate(*pair, A, **settings).tokens == first
    assert baseline.generate(pair[0], A, max_new_tokens=20, temperature=1.0, seed=42).tokens == (
        first
    )


def test_model_in_training_mode_is_used_and_left_so(pair):
    target = make_target(attention_dropout=0.0).train()
    head = make_head(target)
    generate(target, head, A, **SETTINGS)
    assert target.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda target: make_head(target, hidden_size=64), "hidden_size=32"),
        (lambda target: make_head(target, vocab_size=60), "vocab_size=61"),
        (lambda target: make_head(target).to(torch.bfloat16), "head: .*float32"),
        (lambda target: make_head(target).to("meta"), "head: .*cpu"),
    ],
)
def test_r45_r49_head_that_does_not_fit_is_named(pair, monkeypatch, change, message):
    monkeypatch.setattr("eagle2.target.Target._forward", None)
    with pytest.raises(ValueError, match=message):
        generate(pair[0], change(pair[0]), A, **SETTINGS)
