import pytest
import torch
from eagle2 import TreeConfig, baseline, generate, packed
from eagle2.networks import cut_lm_head
from tiny import PROMPTS, make_pair

SHAPE = TreeConfig(4, 3, 10)


@pytest.fixture
def pair():
    return make_pair(context=0.3)


def test_packed_products_are_close(pair):
    layer = pair[0].model.layers[0].mlp.up_proj
    x = torch.randn(2, 5, layer.in_features)
    plain = layer(x)
    with packed(pair[0]):
        assert "forward" in layer.__dict__
        torch.testing.assert_close(layer(x), plain)
        torch.testing.assert_close(layer(x[0, :1]), plain[0, :1])


def test_modules_are_left_as_found_after_an_exception(pair):
    before = {name: dict(module.__dict__) for name, module in pair[0].named_modules()}
    with pytest.raises(KeyError), packed(*pair):
        raise KeyError
    assert {name: dict(module.__dict__) for name, module in pair[0].named_modules()} == before


def test_text_is_plain_text(pair):
    target, head = pair
    wanted = baseline.generate(target, PROMPTS, max_new_tokens=30)
    with packed(target, head):
        assert baseline.generate(target, PROMPTS, max_new_tokens=30).tokens == wanted.tokens
        found = generate(target, head, PROMPTS, max_new_tokens=30, tree=SHAPE)
    assert found.tokens == wanted.tokens


def test_nested_contexts_pack_once(pair):
    layer = pair[0].lm_head
    with packed(pair[0]):
        inner = layer.forward
        with packed(pair[0]):
            assert layer.forward is inner
        assert layer.forward is inner


def test_other_dtypes_stay_as_they_are(pair):
    with packed(pair[0].to(torch.bfloat16)):
        assert "forward" not in pair[0].lm_head.__dict__


def test_cut_lm_head_is_packed_with_the_whole_one(pair):
    ids = torch.tensor([3, 5, 9])
    x = torch.randn(4, pair[0].lm_head.in_features)
    wanted = pair[0].lm_head(x)[:, ids]
    assert "forward" not in cut_lm_head(pair[0].lm_head, ids).__dict__
    with packed(pair[0]):
        cut = cut_lm_head(pair[0].lm_head, ids)
    assert "forward" in cut.__dict__
    torch.testing.assert_close(cut(x), wanted)
