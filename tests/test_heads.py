import json
import os

import pytest
import torch
from eagle2 import Eagle2Head, Eagle3Config, Eagle3Head, HeadConfig, load_head, save_head
from eagle2.rope import rotate
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

SHAPE = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make(**changes):
    torch.manual_seed(0)
    return Eagle2Head(HeadConfig(**{**SHAPE, **changes})).eval()


def make_eagle3(**changes):
    torch.manual_seed(0)
    return Eagle3Head(Eagle3Config(**{**SHAPE, **changes})).eval()


def saved(path, weights=None, config=None, **changes):
    """A folder with a head in it; `weights` and `config` replace or, where None, remove entries."""
    save_head(make(**changes), path, torch.float32)
    for name, values, read, write in (
        ("model.safetensors", weights, load_file, save_file),
        ("config.json", config, lambda p: json.loads(p.read_text()), write_json),
    ):
        if values:
            merged = read(path / name) | values
            write({key: value for key, value in merged.items() if value is not None}, path / name)
    return path


def write_json(values, path):
    path.write_text(json.dumps(values))


def causal(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ).transpose(1, 2)


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"draft_vocab_size": 3}])
def test_saved_and_loaded_again(tmp_path, changes):
    head = make(**changes)
    if "draft_vocab_size" in changes:
        head.d2t.copy_(torch.tensor([1, 3, 7]))
    save_head(head, tmp_path, torch.float32)
    again = load_head(tmp_path)
    assert again.config == head.config
    assert not again.training
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert not [*tmp_path.glob("*.partial")]
    save_head(head, tmp_path)
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.float16
    assert load_head(tmp_path, torch.bfloat16).fc.weight.dtype == torch.bfloat16


def test_published_files_load(tmp_path):
    """pytorch_model.bin, a config with more in it and without `bias`."""
    path = saved(tmp_path, config={"bias": None, "architectures": ["x"], "torch_dtype": "float16"})
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    os.remove(path / "model.safetensors")
    assert load_head(path).config.bias


SCALINGS = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 2.0,
        "mscale": 2.0,
        "mscale_all_dim": 1.0,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
]


@pytest.mark.parametrize("scaling", [None, *SCALINGS])
def test_layer_is_a_llama_layer_without_its_input_norm(scaling):
    head = make(rope_scaling=scaling, rope_theta=50.0)
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 50.0}
    config = LlamaConfig(
        **SHAPE,
        attn_implementation="eager",
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        rope_parameters=rope,
    )
    layer = LlamaDecoderLayer(config, 0).eval()
    layer.input_layernorm = torch.nn.Identity()
    head.layers[0].post_attention_layernorm.weight.data.uniform_(0.5, 2)
    for name in ("q_proj", "k_proj"):
        getattr(head.layers[0].self_attn, name).weight.data.mul_(8)  # so that positions matter
    layer.load_state_dict(head.layers[0].state_dict())
    embeddings, features = torch.randn(2, 3, 7, 16).unbind()
    positions = torch.arange(5, 12) * 7

    x = head.fc(torch.cat((embeddings, features), -1))
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(config)(x, positions[None])
    wanted = layer(x, attention_mask=mask, position_embeddings=rotary)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    got = head(embeddings, features, positions, causal)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    if scaling:
        plain = make(rope_theta=50.0)
        plain.load_state_dict(head.state_dict())
        assert (plain(embeddings, features, positions, causal) - wanted).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("norm_before_residual", "norm_output"), [(False, False), (True, False), (False, True)]
)
def test_eagle_3_layer_is_a_llama_layer_on_twice_the_width(norm_before_residual, norm_output):
    torch.manual_seed(0)
    shape = Eagle3Config(
        **SHAPE,
        draft_vocab_size=3,
        norm_before_residual=norm_before_residual,
        norm_output=norm_output,
    )
    head = Eagle3Head(shape).eval()
    for name, weight in head.named_parameters():
        if "norm" in name:
            weight.data.uniform_(0.5, 2)
    config = LlamaConfig(**SHAPE, attn_implementation="eager", rms_norm_eps=1e-6)
    layer = LlamaDecoderLayer(config, 0).eval()
    for name in ("q_proj", "k_proj", "v_proj"):
        wide = torch.nn.Linear(32, len(getattr(layer.self_attn, name).weight), bias=False)
        setattr(layer.self_attn, name, wide)
    state = head.midlayer.state_dict()
    hidden_scale = state.pop("hidden_norm.weight")
    layer.load_state_dict(state, assign=True)
    embeddings, positions = torch.randn(2, 7, 16), torch.arange(5, 12)
    features = torch.randn(2, 7, 48)

    hidden = features @ head.fc.weight.T
    normed = torch.nn.functional.rms_norm(hidden, (16,), hidden_scale, 1e-6)
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(config)(hidden, positions[None])
    both = torch.cat((layer.input_layernorm(embeddings), normed), -1)
    mixed, _ = layer.self_attn(both, position_embeddings=rotary, attention_mask=mask)
    x = (normed if norm_before_residual else hidden) + mixed
    x = x + layer.mlp(layer.post_attention_layernorm(x))
    out = torch.nn.functional.rms_norm(x, (16,), head.norm.weight, 1e-6)

    got = head(embeddings, head.features(features), positions, causal)
    torch.testing.assert_close(got, out if norm_output else x, atol=1e-5, rtol=1e-5)
    logits = head.to_logits(None)(got)
    torch.testing.assert_close(logits, out @ head.lm_head.weight.T, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 4096])
def test_r46_features_of_another_width_are_refused(rows):
    head = Eagle3Head(Eagle3Config(**SHAPE, target_hidden_size=8))
    for width in (8, 16, 48):
        with pytest.raises(ValueError, match=f"features: wanted width 24, got {width}"):
            head.features(torch.zeros(1, rows, width))
    with pytest.raises(ValueError, match="features: wanted width 16, got 24"):
        make().features(torch.zeros(1, rows, 24))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_that_changes_with_the_length_is_refused(kind):
    wanted = f"type {kind} changes its frequencies with the length of the text.*wanted type default"
    with pytest.raises(ValueError, match=wanted):
        make(rope_scaling={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("make_one", [make, make_eagle3])
def test_draft_temperature_divides_the_logits(tmp_path, make_one):
    lm_head, hidden = torch.nn.Linear(16, 10, bias=False), torch.randn(2, 3, 16)
    for changes in ({}, {"norm_output": True})[: 1 if make_one is make else 2]:
        plain, warm = make_one(**changes), make_one(draft_temperature=2.5, **changes)
        logits = [head.to_logits(lm_head)(hidden) for head in (plain, warm)]
        torch.testing.assert_close(logits[1], logits[0] / 2.5)
    save_head(warm, tmp_path)
    assert load_head(tmp_path).config.draft_temperature == 2.5
    with pytest.raises(ValueError, match="draft_temperature: wanted a positive number, got 0"):
        make_one(draft_temperature=0)


@pytest.mark.parametrize("theta", [10000.0, 5e5])
def test_r32_rotary_has_no_end(theta):
    head = make(rope_theta=theta)
    cos, sin = head.rotary(torch.tensor([[0, 1, 2047, 2048, 10**6]]), torch.float32)
    assert cos.shape == sin.shape == (1, 5, 1, 4)
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))
    # dot products depend on distances alone
    q, k = torch.randn(2, 1, 2, 3, 4).unbind()
    near, far = (head.rotary(torch.tensor([[p, p + 3]]), torch.float32) for p in (2, 4000))
    dots = [(rotate(q, *at)[:, 0] * rotate(k, *at)[:, 1]).sum(-1) for at in (near, far)]
    torch.testing.assert_close(dots[0], dots[1], atol=1e-2, rtol=1e-2)


def test_absent_rope_theta_means_10000(tmp_path):
    assert load_head(saved(tmp_path, config={"rope_theta": None})).config.rope_theta == 10000


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"fc.bias": None}, "fc.bias is missing"),
        ({"lm_head.weight": torch.zeros(2, 2)}, "lm_head.weight is not part of an EAGLE-2 head"),
        ({"fc.weight": torch.zeros(16, 48)}, r"fc.weight has shape \(16, 48\), wanted \(16, 32\)"),
        ({"d2t": torch.zeros(3, dtype=torch.int64)}, "d2t is not part of an EAGLE-2 head"),
        (
            {"fc.bias": None, "x": torch.zeros(1)},
            "fc.bias is missing; x is not part of an EAGLE-2 head",
        ),
    ],
)
def test_r46_wrong_tensors_are_named(tmp_path, weights, message):
    with pytest.raises(ValueError, match=message):
        load_head(saved(tmp_path, weights))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (None, "d2t is missing"),
        ([1, 3], r"d2t has shape \(2,\), wanted \(3,\)"),
        ([1, 3, 8], r"d2t: wanted target ids in 0\.\.9, got 1\.\.10"),
        ([-1, 3, 7], r"d2t: wanted target ids in 0\.\.9, got -1\.\.9"),
    ],
)
def test_r18_r45_bad_mapping_is_named(tmp_path, offsets, message):
    weights = {"d2t": None if offsets is None else torch.tensor(offsets)}
    with pytest.raises(ValueError, match=message):
        load_head(saved(tmp_path, weights, draft_vocab_size=3))


def test_r18_offsets_become_target_ids():
    head = make(draft_vocab_size=3)
    assert head.draft_to_target.tolist() == [0, 1, 2]  # all zeros is the identity
    head.d2t.copy_(torch.tensor([1, 3, 7]))
    assert head.draft_to_target.tolist() == [1, 4, 9]
    assert make().draft_to_target is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size: wanted 1 or more, got 0"),
        ({"draft_vocab_size": -1}, "draft_vocab_size: .*got -1"),
        ({"draft_vocab_size": 12}, "draft_vocab_size: .*got 12"),
        ({"hidden_size": 18}, "hidden_size: wanted a multiple of num_attention_heads=4, got 18"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: wanted a divisor .* got 3"),
    ],
)
def test_r45_shapes_that_cannot_be_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**{**SHAPE, **changes})


def test_missing_files_and_fields_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        load_head(tmp_path)
    saved(tmp_path)
    os.remove(tmp_path / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors or pytorch_model\.bin"):
        load_head(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: .*hidden_size"):
        load_head(saved(tmp_path, config={"hidden_size": None}))
