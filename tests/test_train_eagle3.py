"""Training EAGLE-3 heads: what they are fed, their loss, learning, resuming."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from eagle2 import HeadConfig, TreeConfig, baseline, generate, load_head
from eagle2.features import Conversation, load_conversations, write_features
from eagle2.first_weights import shape_like, start_eagle3_head
from eagle2.objective import Eagle3Objective, make_batch
from eagle2.train import train
from eagle2.training_run import read_layers
from test_train import SIZE, VOCAB, answers, draft_chain, one_thread, options, target
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["answers", "one_thread", "target"]


@pytest.fixture(scope="module")
def deep_target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=64, num_hidden_layers=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(20)
    return model


@pytest.fixture
def deep_answers(deep_target, answers):
    answers.with_suffix(".f16").unlink()
    write_features(deep_target, answers)
    write_features(deep_target, answers, layers=read_layers(deep_target, "eagle3"))
    return answers


def test_inputs_of_layers_are_those_of_transformers(deep_target, deep_answers):
    for conversation in load_conversations(deep_answers, SIZE, 3 * SIZE)[:3]:
        with torch.inference_mode():
            ids = torch.from_numpy(conversation.ids)[None]
            out = deep_target.model(ids, output_hidden_states=True)
        wanted = torch.cat([out.hidden_states[layer][0] for layer in (2, 4, 5)], -1)
        np.testing.assert_allclose(conversation.inputs, wanted, atol=2e-2)
        np.testing.assert_allclose(conversation.features, out.last_hidden_state[0], atol=2e-2)


def test_eagle_3_loss_is_the_cross_entropy_of_its_own_logits(deep_target):
    draw = np.random.default_rng(3)
    head = start_eagle3_head(deep_target, [], None)
    inputs = draw.standard_normal((9, 3 * SIZE)).astype(np.float32)
    features = draw.standard_normal((9, SIZE)).astype(np.float32)
    conversation = Conversation(draw.integers(0, VOCAB, 9), features, 3, 0.0, inputs)
    batch = make_batch([conversation])
    weight, ids = deep_target.lm_head.weight, torch.arange(VOCAB)
    objective = Eagle3Objective(deep_target.get_input_embeddings(), weight, ids, steps=2, share=1.0)
    total = 0
    for start in range(2, 7):  # step s counts while it predicts a recorded token
        outputs = draft_chain(head, objective.embed, batch, start, steps=min(3, 7 - start))
        for step, output in enumerate(outputs):
            law = (batch.features[0, start + step + 1] @ weight.T).softmax(-1)
            logits = head.lm_head(head.norm(output))
            total -= (law * logits.log_softmax(-1)).sum() / (5 - step) / 3
    got = objective.loss(head, batch, np.random.default_rng(0))
    torch.testing.assert_close(got, total, atol=1e-4, rtol=1e-4)


def test_eagle_3_learns_and_resumes(deep_target, deep_answers, tmp_path):
    settings = options(kind="eagle3", steps=60)
    first = train(deep_target, [deep_answers], tmp_path / "short", **settings | {"steps": 1})
    result = train(
        deep_target, [deep_answers], tmp_path / "head", held_out=deep_answers, **settings
    )
    assert result["loss"] < 0.9 * first["loss"]
    assert len(result["agreement"]) == 4
    head = load_head(tmp_path / "head")
    assert head.config.kind == "EAGLE-3"
    assert head.config.draft_vocab_size == 48
    tree = TreeConfig(4, 3, 10)
    plain = baseline.generate(deep_target, [[1, 4, 7, 10]], max_new_tokens=20)
    drafted = generate(deep_target, head, [[1, 4, 7, 10]], max_new_tokens=20, tree=tree)
    assert drafted.tokens == plain.tokens
    with pytest.raises(ValueError, match=r"kind: .*checkpoint\.pt is of an eagle3 head"):
        train(deep_target, [deep_answers], tmp_path / "head", **options())


KILLED_RUN = """
import os, signal, sys, torch
from eagle2.train import train
from test_train import options
from transformers import LlamaForCausalLM

def half(state, path):
    if state["state"]["step"] == 20:
        save(state, path)
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, path)

torch.set_num_threads(1)
save, torch.save = torch.save, half
model, answers, out = sys.argv[1:]
train(LlamaForCausalLM.from_pretrained(model), [answers], out, **options(kind="eagle3"))
"""


def test_a_run_killed_in_its_checkpoint_goes_on_as_if_unbroken(deep_target, deep_answers, tmp_path):
    deep_target.save_pretrained(tmp_path / "model")
    script = [
        sys.executable,
        "-c",
        KILLED_RUN,
        tmp_path / "model",
        deep_answers,
        tmp_path / "parts",
    ]
    killed = subprocess.run(script, cwd=os.path.dirname(__file__), timeout=600)
    assert killed.returncode == -signal.SIGKILL
    saved = torch.load(tmp_path / "parts" / "checkpoint.pt", weights_only=True)
    assert saved["state"]["step"] == 10
    settings = options(kind="eagle3")
    assert train(deep_target, [deep_answers], tmp_path / "parts", **settings)["step"] == 30
    train(deep_target, [deep_answers], tmp_path / "whole", **settings)
    found = load_head(tmp_path / "parts").state_dict()
    for name, tensor in load_head(tmp_path / "whole").state_dict().items():
        assert torch.equal(tensor, found[name]), name
    assert not [*(tmp_path / "parts").glob("*.partial")]


@pytest.mark.parametrize("kind", ["default", "dynamic", "yarn"])
def test_a_new_head_has_the_rotary_of_its_target(kind):
    rope = {"rope_type": kind, "rope_theta": 5e5, "factor": 2.0}
    rope["original_max_position_embeddings"] = 64
    target = SimpleNamespace(config=LlamaConfig(rope_parameters=rope, max_position_embeddings=128))
    config = HeadConfig(**shape_like(target, None))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == (rope if kind == "yarn" else None)


def test_eagle_3_wants_seven_layers(target):
    with pytest.raises(ValueError, match="7 layers or more, got 2"):
        read_layers(target, "eagle3")
