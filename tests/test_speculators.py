"""The layout of `speculators` 0.9."""

import json

import pytest
import torch
from eagle2 import Eagle3Config, Eagle3Head, load_head, save_head
from safetensors.torch import load_file
from test_head_files import CONFIG, IDS, eagle2_tensors, eagle3_tensors, same, write

# what speculators 0.9 writes: only what differs from the layer's defaults, and a qwen3 layer by
# default
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 3,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "norm_before_residual": True,
    "speculators_config": {"algorithm": "eagle3"},
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "transformer_layer_config": {
        "head_dim": 4,
        "hidden_size": 16,
        "intermediate_size": 24,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        "vocab_size": 10,
    },
}


def test_speculators_layout(tmp_path):
    head = load_head(write(tmp_path, SPECULATORS, eagle3_tensors("layers.0.")))
    same(head, eagle3_tensors())
    config = head.config
    assert config == Eagle3Config(
        10, 16, 24, 4, 2, 3, rope_theta=5e5, norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=(1, 3, 5),
    )  # fmt: skip
    assert config.feature_layers(32) == (1, 3, 5)


def test_speculators_norms(tmp_path):
    given = {**SPECULATORS, "fc_norm": True, "norm_output": True}
    given["transformer_layer_config"] = {
        **SPECULATORS["transformer_layer_config"],
        "model_type": "qwen3",
    }
    norms = {f"fc_norm.{i}.weight": torch.randn(16) for i in range(3)}
    norms |= {f"layers.0.self_attn.{name}_norm.weight": torch.randn(4) for name in "qk"}
    head = load_head(write(tmp_path, given, eagle3_tensors("layers.0.", **norms)))
    assert head.config.qk_norm
    assert head.config.norm_output
    given |= {"fc_norm": False, "norm_before_fc": True}
    norms = {name: tensor for name, tensor in norms.items() if "fc_norm" not in name}
    norms["input_norm.weight"] = torch.randn(48)
    head = load_head(write(tmp_path, given, eagle3_tensors("layers.0.", **norms)))
    x = torch.randn(2, 48)
    normed = torch.nn.functional.rms_norm(x, (48,), head.input_norm.weight, 1e-6)
    torch.testing.assert_close(head.features(x), head.fc(normed), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_speculators_round_trip(tmp_path, qk_norm):
    torch.manual_seed(0)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 5e5,
    }
    head = Eagle3Head(
        Eagle3Config(
            10, 16, 24, 4, 2, 3, rope_theta=5e5, rope_scaling=scaling, head_dim=8,
            norm_before_residual=True, norm_output=True, qk_norm=qk_norm,
            max_position_embeddings=512, draft_temperature=1.5,
        ),
        own_embedding=True,
    ).eval()  # fmt: skip
    head.d2t.copy_(torch.tensor(IDS) - torch.arange(3))
    target = write(tmp_path / "target", {"architectures": ["LlamaForCausalLM"]}, {})
    save_head(head, tmp_path / "head", torch.float32, "speculators", target)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in tensors
    assert tensors["t2d"].nonzero().flatten().tolist() == IDS
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written["speculators_config"]["verifier"] == {
        "architectures": ["LlamaForCausalLM"],
        "name_or_path": str(target),
    }
    again = load_head(tmp_path / "head")
    assert again.config == head.config
    same(again, head.state_dict())


def test_speculators_has_no_place_for_eagle_2(tmp_path):
    head = load_head(write(tmp_path, CONFIG, eagle2_tensors()))
    with pytest.raises(ValueError, match="layout: speculators 0.9 has no place"):
        save_head(head, tmp_path / "out", layout="speculators")


def test_speculators_wants_a_target(tmp_path):
    head = Eagle3Head(Eagle3Config(10, 16, 24, 4, 2))
    with pytest.raises(ValueError, match="target: wanted its folder"):
        save_head(head, tmp_path / "out", layout="speculators")
    assert not (tmp_path / "out").exists()
