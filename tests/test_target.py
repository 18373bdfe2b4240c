import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from eagle2.target import ATTENTION, Target, attention_of
from tiny import PROMPTS, make_head, make_target, plain_pass
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from eagle2_kernels import Candidates, rerank

GUARD = 8


def random_tree(rows, nodes, columns, seed=0):
    """Ragged random trees over `columns` columns."""
    generator = torch.Generator().manual_seed(seed)
    count = max(columns - 1, 1)
    parents = torch.stack(
        [torch.randint(-1, max(i, 0), (rows,), generator=generator) for i in range(count)], 1
    )
    tokens = torch.randint(1, 60, (rows, count), generator=generator)
    candidates = Candidates(tokens, -torch.arange(count).float().expand(rows, -1), parents.int())
    return rerank(candidates, torch.arange(rows) + 30, torch.tensor(nodes).int(), columns)


def path_to(tree, row, node):
    parent = int(tree.parents[row, node])
    above = [] if parent < 0 else path_to(tree, row, parent)
    return [*above, int(tree.tokens[row, node])]


@torch.inference_mode()
def tree_pass(model, prompts, tree, reach=0):
    """Features and logits of the nodes, and the cache behind them."""
    target = Target(model)
    lengths = [len(prompt) for prompt in prompts]
    cache = target.new_cache(len(prompts), max(lengths) + tree.tokens.shape[1] + GUARD)
    for half in cache:
        half[:] = 777  # what no pass may read
    padded = torch.nn.utils.rnn.pad_sequence(map(torch.tensor, prompts), batch_first=True)
    target.prefill(padded, cache)
    features = target.tree_pass(tree, torch.tensor(lengths).int(), max(lengths) + reach, cache)
    return features, target.logits(features), cache


def check_nodes(model, prompts, tree):
    features, logits, cache = tree_pass(model, prompts, tree)
    for row, prompt in enumerate(prompts):
        for node in range(int(tree.num_nodes[row])):
            wanted = plain_pass(model, [*prompt, *path_to(tree, row, node)])
            torch.testing.assert_close(features[row, node], wanted[0][-1], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(logits[row, node], wanted[1][-1], atol=1e-4, rtol=1e-4)
    for half in cache:
        assert (half[:, :, -GUARD - 1 : -1] == 777).all()  # all but the spare slot


@pytest.mark.parametrize(("nodes", "columns"), [([9, 1, 14], 14), ([0, 70, 30], 70), ([1] * 3, 1)])
def test_node_equals_a_plain_pass_of_its_path(nodes, columns):
    check_nodes(make_target(), PROMPTS, random_tree(3, nodes, columns))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2), (6, 3)])
def test_r37_gqa_ratios(heads, kv_heads):
    model = make_target(
        hidden_size=48, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8
    )
    check_nodes(model, PROMPTS, random_tree(3, [9, 1, 14], 14))


@pytest.mark.parametrize("window", [3, 6, 64])
def test_sliding_window(window):
    model = make_target(config=MistralConfig, model=MistralForCausalLM, sliding_window=window)
    check_nodes(model, PROMPTS, random_tree(3, [9, 2, 14], 14))
    wanted = baseline.generate(model, PROMPTS, max_new_tokens=16).tokens
    for prompt, tokens in zip(PROMPTS, wanted, strict=True):
        text = list(prompt)
        for token in tokens:
            assert int(plain_pass(model, text)[1][-1].argmax()) == token
            text.append(token)
    tree = TreeConfig(4, 3, 10)
    result = generate(model, make_head(model), PROMPTS, max_new_tokens=16, tree=tree)
    assert result.tokens == wanted


def test_biases_and_tied_embeddings():
    model = make_target(config=Qwen2Config, model=Qwen2ForCausalLM, tie_word_embeddings=True)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.data.normal_()
    check_nodes(model, PROMPTS, random_tree(3, [9, 2, 14], 14))


def test_r21_positions_go_by_depth():
    model = make_target()
    seen = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, more: seen.append(more["position_ids"]), with_kwargs=True
    )
    tree = rerank(
        Candidates(
            torch.tensor([[5, 6, 7, 8]]),
            -torch.arange(4.0)[None],
            torch.tensor([[-1, -1, 0, 2]]).int(),
        ),
        torch.tensor([9]),
        5,
    )
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 3]]
    tree_pass(model, [[*range(10, 17)]], tree)
    hook.remove()
    assert [positions.tolist() for positions in seen] == [[[*range(7)]], [[7, 8, 8, 9, 10]]]


def test_prefill_of_ragged_rows_equals_plain_passes():
    model = make_target()
    target = Target(model)
    padded = torch.nn.utils.rnn.pad_sequence(map(torch.tensor, PROMPTS), batch_first=True)
    with torch.inference_mode():
        features = target.prefill(padded, target.new_cache(3, 20))
    for row, prompt in enumerate(PROMPTS):
        wanted, _ = plain_pass(model, prompt)
        torch.testing.assert_close(features[row, : len(prompt)], wanted, atol=1e-5, rtol=1e-5)


def test_r31_nan_at_one_node_reaches_its_descendants_only():
    model = make_target()
    tree = random_tree(3, [14, 14, 14], 14, seed=3)
    sound, _, _ = tree_pass(model, PROMPTS, tree)
    poison = int(tree.tokens[1, 3])
    model.model.embed_tokens.weight.data[poison] = torch.nan
    features, _, _ = tree_pass(model, PROMPTS, tree)
    spoilt = 0
    for row, prompt in enumerate(PROMPTS):
        for node in range(14):
            if poison in prompt + path_to(tree, row, node):
                spoilt += 1
                assert features[row, node].isnan().all()
            else:
                assert torch.equal(features[row, node], sound[row, node])
    assert 0 < spoilt < 42


def test_r24_a_row_without_a_tree_keeps_its_cache():
    model = make_target()
    tree = random_tree(3, [9, 0, 9], 9)
    _, _, cache = tree_pass(model, PROMPTS, tree)
    _, _, before = tree_pass(model, PROMPTS, tree._replace(num_nodes=torch.zeros(3).int()))
    for old, new in zip(before, cache, strict=True):
        assert torch.equal(old[:, 1], new[:, 1])
        assert not torch.equal(old[:, 0], new[:, 0])


def test_what_lies_behind_the_reach_is_not_read():
    tree = random_tree(3, [9, 5, 9], 9)
    near, _, _ = tree_pass(make_target(), PROMPTS, tree)
    far, _, _ = tree_pass(make_target(), PROMPTS, tree, reach=GUARD)
    for row, count in enumerate([9, 5, 9]):
        torch.testing.assert_close(near[row, :count], far[row, :count], atol=1e-5, rtol=0)


def test_r41_attention_is_given_back():
    config = make_target().config
    found = config._attn_implementation
    with pytest.raises(KeyError), attention_of(config, ATTENTION):
        raise KeyError(config._attn_implementation)
    assert config._attn_implementation == found != ATTENTION


@pytest.mark.parametrize("layers", [(), (0, 1, 2), (2,), (1, 6)])
def test_r46_inputs_of_layers_are_those_of_transformers(layers):
    model = make_target(num_hidden_layers=7)
    target, tree = Target(model), random_tree(1, [6], 6)
    cache = target.new_cache(1, 20)
    with torch.inference_mode():
        with target.inputs_of(layers) as found:
            target.prefill(torch.tensor(PROMPTS[:1]), cache)
        plain = model.model(torch.tensor(PROMPTS[:1]), output_hidden_states=True).hidden_states
        for layer, got in zip(layers, found, strict=True):
            torch.testing.assert_close(got, plain[layer], atol=1e-5, rtol=1e-5)
        with target.inputs_of(layers) as found:
            target.tree_pass(tree, torch.tensor([3]).int(), 3, cache)
        assert [x.shape for x in found] == [(1, 6, 32)] * len(layers)
        path = torch.tensor([PROMPTS[0] + path_to(tree, 0, 5)])
        plain = model.model(path, output_hidden_states=True).hidden_states
        for layer, got in zip(layers, found, strict=True):
            torch.testing.assert_close(got[0, 5], plain[layer][0, -1], atol=1e-5, rtol=1e-5)


def test_hooks_are_there_while_they_are_wanted_and_no_longer():
    model = make_target(num_hidden_layers=7)

    def hooked():
        return [n for n, layer in enumerate(model.model.layers) if layer._forward_pre_hooks]

    with pytest.raises(KeyError, match=r"\[2, 3, 4\]"), Target(model).inputs_of((2, 3, 4)):
        raise KeyError(hooked())
    with Target(model).inputs_of(()):
        assert hooked() == []


def test_model_without_the_registry_is_refused():
    model = make_target()
    model._supports_attention_backend = False
    with pytest.raises(ValueError, match=r"model: wanted a causal LM .* got LlamaForCausalLM"):
        Target(model)
