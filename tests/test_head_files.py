"""EAGLE-1/2 and EAGLE-3 files as others write them, tensor by tensor."""

import json
import os

import pytest
import torch
from eagle2 import Eagle2Head, Eagle3Head, load_head, save_head
from safetensors.torch import load_file, save_file

IDS = [1, 4, 9]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float16",
    "vocab_size": 10,
}
EAGLE3 = {**CONFIG, "draft_vocab_size": 3}


def layer(prefix, width, rows=16, kv_rows=8):
    shapes = {
        "self_attn.q_proj": (rows, width),
        "self_attn.k_proj": (kv_rows, width),
        "self_attn.v_proj": (kv_rows, width),
        "self_attn.o_proj": (16, rows),
        "mlp.gate_proj": (24, 16),
        "mlp.up_proj": (24, 16),
        "mlp.down_proj": (16, 24),
        "post_attention_layernorm": (16,),
    }
    return {f"{prefix}{name}.weight": torch.randn(*shape) for name, shape in shapes.items()}


def eagle2_tensors(**changes):
    torch.manual_seed(0)
    return {
        "embed_tokens.weight": torch.randn(10, 16),
        "fc.weight": torch.randn(16, 32),
        "fc.bias": torch.randn(16),
        **layer("layers.0.", 16),
        **changes,
    }


def eagle3_tensors(prefix="midlayer.", target_size=16, **changes):
    torch.manual_seed(0)
    used = torch.zeros(10, dtype=torch.bool)
    used[IDS] = True
    tensors = {
        "d2t": torch.tensor(IDS) - torch.arange(3),
        "t2d": used,
        "fc.weight": torch.randn(16, 3 * target_size),
        "lm_head.weight": torch.randn(3, 16),
        "norm.weight": torch.randn(16),
        f"{prefix}hidden_norm.weight": torch.randn(16),
        f"{prefix}input_layernorm.weight": torch.randn(16),
        **layer(prefix, 32),
        **changes,
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def write(folder, config, tensors, binary=False):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def same(head, tensors):
    state = head.state_dict()
    assert state.keys() == tensors.keys() - {"t2d"}
    for name, tensor in state.items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize("binary", [False, True])
def test_eagle_1_and_2(tmp_path, binary):
    tensors = eagle2_tensors()
    head = load_head(write(tmp_path, CONFIG, tensors, binary))
    assert isinstance(head, Eagle2Head)
    assert (head.config.bias, head.config.rope_theta) == (True, 10000.0)
    same(head, tensors)
    assert not head.training
    assert all(weight.requires_grad for weight in head.parameters())


def test_qkv_bias_and_no_fc_bias(tmp_path):
    tensors = eagle2_tensors()
    del tensors["fc.bias"]
    for name, size in (("q", 16), ("k", 8), ("v", 8)):
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = torch.randn(size)
    head = load_head(write(tmp_path, {**CONFIG, "bias": False, "qkv_bias": True}, tensors))
    same(head, tensors)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_eagle_3(tmp_path, prefix, binary):
    folder = write(tmp_path, EAGLE3, eagle3_tensors(prefix), binary)
    head = load_head(folder)
    assert isinstance(head, Eagle3Head)
    same(head, eagle3_tensors())
    assert head.draft_to_target.tolist() == IDS
    assert head.config.feature_layers(32) == (2, 16, 29)
    assert head.config.feature_size == 48


def test_whole_vocabulary_needs_no_mapping(tmp_path):
    tensors = eagle3_tensors(d2t=None, t2d=None, **{"lm_head.weight": torch.randn(10, 16)})
    head = load_head(write(tmp_path, {**CONFIG, "draft_vocab_size": 10}, tensors))
    assert head.draft_to_target is None
    same(head, tensors)


def test_target_of_another_width(tmp_path):
    tensors = eagle3_tensors(target_size=20, **{"embed_tokens.weight": torch.randn(10, 16)})
    head = load_head(write(tmp_path, {**EAGLE3, "target_hidden_size": 20}, tensors))
    same(head, tensors)
    assert (head.config.target_size, head.config.feature_size) == (20, 60)


@pytest.mark.parametrize("rows", [16, 32])
def test_head_dim_counts_where_the_tensors_have_it(tmp_path, rows):
    tensors = eagle3_tensors(**layer("midlayer.", 32, rows, rows // 2))
    head = load_head(write(tmp_path, {**EAGLE3, "head_dim": 8}, tensors))
    assert head.config.head_dim == rows // 4


def test_sharded(tmp_path):
    tensors = eagle3_tensors()
    names = sorted(tensors)
    write(tmp_path, EAGLE3, {})
    (tmp_path / "model.safetensors").unlink()
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / shard)
    places = {name: shard for shard, held in shards.items() for name in held}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    same(load_head(tmp_path), tensors)


@pytest.mark.parametrize(
    ("changes", "scaling", "theta"),
    [
        ({"rope_theta": 5e5}, None, 5e5),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"type": "linear", "factor": 2.0},
            1e4,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}}, None, 3e4),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 3e4},
            3e4,
        ),
    ],
)
def test_rope_fields(tmp_path, changes, scaling, theta):
    config = load_head(write(tmp_path, {**EAGLE3, **changes}, eagle3_tensors())).config
    assert (config.rope_scaling, config.rope_theta) == (scaling, theta)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": None}, "lm_head.weight is missing"),
        ({"midlayer.hidden_norm.weight": None}, "midlayer.hidden_norm.weight is missing"),
        ({"fc.bias": torch.zeros(16)}, "fc.bias is not part of an EAGLE-3 head"),
        (
            {"fc.weight": torch.zeros(16, 16)},
            r"fc.weight has shape \(16, 16\), wanted \(16, 48\)",
        ),
        (
            {"lm_head.weight": torch.zeros(10, 16)},
            r"lm_head.weight has shape \(10, 16\), wanted \(3, 16\)",
        ),
        ({"layers.0.hidden_norm.weight": torch.zeros(16)}, "layers.0.hidden_norm.weight is there"),
        ({"d2t": None, "t2d": None}, "d2t is missing"),
        ({"d2t": torch.tensor([1, 3])}, r"d2t has shape \(2,\), wanted \(3,\)"),
        ({"d2t": torch.tensor([1, 3, 8])}, r"d2t: wanted target ids in 0\.\.9, got 1\.\.10"),
        ({"d2t": torch.tensor([1, 0, 7])}, "d2t: target id 1 has 2 draft ids"),
        ({"t2d": torch.ones(10, dtype=torch.bool)}, "disagree on target id 0: t2d says True"),
        ({"t2d": torch.zeros(10, dtype=torch.bool)}, "disagree on target id 1: t2d says False"),
        ({"t2d": torch.ones(11, dtype=torch.bool)}, r"t2d has shape \(11,\), wanted \(10,\)"),
    ],
)
def test_r18_r45_r46_wrong_tensors_are_named(tmp_path, changes, message):
    write(tmp_path, EAGLE3, eagle3_tensors(**changes))
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, r"config\.json: hidden_act: wanted silu, got gelu"),
        ({"draft_vocab_size": 12}, r"config\.json: draft_vocab_size: .*got 12"),
        ({"draft_vocab_size": 0}, r"config\.json: draft_vocab_size: .*got 0"),
        ({"hidden_size": None, "vocab_size": None}, "vocab_size, hidden_size missing"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "linear, yarn, llama3, got 'su'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "dynamic changes its frequencies"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "yarn needs original_max_position"),
        ({"draft_temperature": -1}, r"config\.json: draft_temperature: .*got -1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "llama3 needs low_freq_factor"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1]}}, r"ascending.*\[3, 1\]"),
        ({"speculators_model_type": "eagle"}, "speculators_model_type: wanted eagle3, got eagle"),
    ],
)
def test_r45_wrong_configs_are_named(tmp_path, changes, message):
    write(tmp_path, {**EAGLE3, **changes}, eagle3_tensors())
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    write(tmp_path, EAGLE3, {**eagle3_tensors(), "x": print}, binary=True)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: wanted tensors alone"):
        load_head(tmp_path)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_write_cut_short_leaves_a_head(tmp_path, monkeypatch, calls):
    head = load_head(write(tmp_path, EAGLE3, eagle3_tensors()))
    left = [None] * calls
    replace = os.replace

    def cut(*paths):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(*paths)

    monkeypatch.setattr(os, "replace", cut)
    old = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    head.fc.weight.data.zero_()
    with pytest.raises(KeyboardInterrupt):
        save_head(head, tmp_path, torch.float32)
    same(load_head(tmp_path), old)


def test_eagle_3_saved_as_published(tmp_path):
    tensors = eagle3_tensors()
    config = {**EAGLE3, "rope_scaling": {"type": "linear", "factor": 2.0}}
    head = load_head(write(tmp_path / "a", config, tensors))
    save_head(head, tmp_path / "b", torch.float32)
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name
    again = json.loads((tmp_path / "b" / "config.json").read_text())
    assert again["architectures"] == ["LlamaForCausalLMEagle3"]
    assert again["draft_vocab_size"] == 3
    assert "bias" not in again
    assert load_head(tmp_path / "b").config == head.config
