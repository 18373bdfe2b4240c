"""`eagle2 inspect` and `eagle2 convert`."""

import json

import pytest
import torch
from eagle2 import Eagle2Head, load_head, save_head
from eagle2.published import EAGLE3, TARGETS, fitting, head_shape
from safetensors.torch import load_file
from test_cli import run
from test_head_files import same, write
from tiny import make_eagle3_head, make_head, make_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a target in one file, in shards and as a .bin; the target; and one it is not."""
    folder = tmp_path_factory.mktemp("models")
    target, other = make_target(num_hidden_layers=7), make_target(vocab_size=62)
    target.save_pretrained(folder / "whole")
    target.save_pretrained(folder / "shards", max_shard_size="20KB")
    assert len([*(folder / "shards").glob("*.safetensors")]) > 1
    config = json.loads((folder / "whole" / "config.json").read_text())
    write(folder / "bin", config, target.state_dict(), binary=True)
    other.save_pretrained(folder / "other")
    return folder, target


@pytest.fixture(params=[make_head, make_eagle3_head])
def head(request, models, tmp_path):
    made = request.param(models[1], draft_vocab_size=23)
    made.d2t += 3
    save_head(made, tmp_path / "head", torch.float32)
    return made


def test_inspect_names_what_counts(models, head, monkeypatch, capsys, tmp_path):
    folder = models[0]
    assert run(monkeypatch, "inspect", tmp_path / "head", "--model", folder / "whole") == 0
    shown = capsys.readouterr().out
    reads = "the last hidden state" if head.config.kind == "EAGLE-2" else "layers 2, n // 2, n - 3"
    assert f"head: {head.config.kind}, in the layout of its authors" in shown
    assert reads in shown
    assert "drafts 23 of 61 ids" in shown
    assert "whole: fits" in shown
    assert run(monkeypatch, "inspect", tmp_path / "head", "--model", folder / "other") == 1
    shown = capsys.readouterr().out
    assert "wanted vocab_size=62 as the target has, got 61" in shown
    assert ("wanted a target of 7 layers" in shown) == (head.config.kind == "EAGLE-3")


def test_convert_and_back(models, monkeypatch, tmp_path, capsys):
    made = make_eagle3_head(models[1], draft_ids=23)
    save_head(made, tmp_path / "a", torch.float32)
    options = ["--dtype", "float32", "--model", models[0] / "whole"]
    there = [tmp_path / "a", tmp_path / "b", "--layout", "speculators", *options]
    assert run(monkeypatch, "convert", *there) == 0
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "b" / "model.safetensors")
    assert run(monkeypatch, "inspect", tmp_path / "b") == 0
    assert "in the layout of speculators" in capsys.readouterr().out
    assert run(monkeypatch, "convert", tmp_path / "b", tmp_path / "c", *options) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "c" / name).read_bytes()


@pytest.mark.parametrize("place", ["whole", "shards", "bin"])
def test_convert_with_the_target_s_embedding(models, head, monkeypatch, tmp_path, place):
    folder, target = models
    options = ["--dtype", "float32", "--model", folder / place, "--embedding"]
    assert run(monkeypatch, "convert", tmp_path / "head", tmp_path / "out", *options) == 0
    embedding = {"embed_tokens.weight": target.model.embed_tokens.weight.data}
    same(load_head(tmp_path / "out"), head.state_dict() | embedding)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["head", "head"], "OUT: wanted a new or an empty folder"),
        (["head", "out", "--embedding"], "--embedding: wanted --model"),
        (["head", "out", "--model", "other"], "wanted vocab_size=62 as the target has"),
    ],
)
def test_convert_says_what_is_wrong(
    models, head, monkeypatch, tmp_path, capsys, arguments, message
):
    folders = {"head": tmp_path / "head", "out": tmp_path / "out", "other": models[0] / "other"}
    given = [folders.get(word, word) for word in arguments]
    assert run(monkeypatch, "convert", *given) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("vicuna-7b", 0.24),
        ("vicuna-13b", 0.37),
        ("vicuna-33b", 0.56),
        ("llama2-chat-70b", 0.99),
        ("llama3-instruct-8b", 0.25),
        ("llama3-instruct-70b", 0.99),
        ("mixtral-8x7b", 0.28),
        ("qwen2-7b", 0.26),
    ],
)
def test_published_shapes_have_the_published_sizes(name, billions):
    """Parameters as the authors' README counts them, without the embedding."""
    with torch.device("meta"):
        head = Eagle2Head(head_shape(name, "eagle2"))
    assert round(sum(weight.numel() for weight in head.parameters()) / 1e9, 2) == billions


def test_every_published_head_fits_its_target():
    for kind, names in (("eagle2", TARGETS), ("eagle3", EAGLE3)):
        for name in names:
            assert name in fitting(head_shape(name, kind))
    with pytest.raises(ValueError, match="target: wanted one of vicuna-13b, .* got vicuna-7b"):
        head_shape("vicuna-7b", "eagle3")


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_help(monkeypatch, capsys, command):
    assert run(monkeypatch, command, "--help") == 0
    assert "Usage" in capsys.readouterr().out
