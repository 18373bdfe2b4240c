"""bench/published.py on shapes small enough to write."""

import sys
from pathlib import Path

import pytest
import torch
from eagle2 import load_head
from eagle2.published import EAGLE3, TARGETS, TargetShape
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import published

SMALL = {
    "llama": TargetShape("llama", 7, 32, 48, 4, 2, 60),
    "mixtral": TargetShape("mixtral", 7, 32, 48, 4, 2, 60),
    "qwen3": TargetShape("qwen3", 8, 32, 48, 4, 2, 60, 1e6),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, shape in SMALL.items():
        monkeypatch.setitem(TARGETS, f"small-{name}", shape)
        monkeypatch.setitem(EAGLE3, f"small-{name}", 40)
    monkeypatch.setattr(published, "SHARD", 30_000)


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_what_is_written_loads_and_decodes(tmp_path, capsys, family, kind):
    published.write(f"small-{family}", tmp_path, kind, "float32")
    assert len([*(tmp_path / "target").glob("model-*.safetensors")]) > 2
    head = load_head(tmp_path / "head")
    assert head.config.draft_vocab_size == (40 if kind == "eagle3" else None)
    model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert float(model.lm_head.weight.detach().std()) > 0
    published.measure(tmp_path, "cpu", "float32", (4, 3, 10), prompt=20, new=6)
    shown = capsys.readouterr().out
    for figure in ("load target, s", "tokens / s", "prefill, ms", "target, ms", "peak memory, GB"):
        assert figure in shown


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_layer_by_layer(capsys, kind):
    published.layers("small-llama", kind, prefix=20, nodes=9, top_k=3)
    shown = capsys.readouterr().out
    for figure in ("target, 7 layers, 9 row(s), ms", "head layer, 3 rows, ms", "target, GB"):
        assert figure in shown


def test_the_whole_is_as_large_as_its_layers_say(capsys):
    """The size told by `layers` is that of the model, embedding and lm_head included."""
    published.layers("small-llama", "eagle2", prefix=20, nodes=2, top_k=3)
    told = float(capsys.readouterr().out.split("target, GB")[1].split()[0])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published.target_config("small-llama"))
    size = sum(weight.numel() for weight in model.parameters()) * 4 / 1e9
    assert told == pytest.approx(size, rel=0.01)
