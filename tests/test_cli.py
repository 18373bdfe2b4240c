import json
import subprocess
import sys

import pytest
from eagle2 import cli, engine, save_head
from tiny import VOCAB, make_head, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model with a tokenizer of one id per word, and a head for it."""
    folder = tmp_path_factory.mktemp("cli")
    model = make_target()
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    save_head(make_head(model), folder / "head")
    return ["--model", str(folder / "model"), "--head", str(folder / "head")]


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["eagle2", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0


def test_compare_finds_the_same_text(folders, monkeypatch, capsys):
    code = run(
        monkeypatch, "generate", "w5 w6", *folders, "--compare", "--max-new-tokens", 20,
        "--tree", "4,3,10",
    )  # fmt: skip
    shown = capsys.readouterr().out
    assert code == 0
    assert "same text: yes" in shown
    assert "speed-up" in shown


def test_streamed_text_is_the_answer(folders, monkeypatch, capsys):
    options = [*folders, "--max-new-tokens", 12, "--temperature", 1, "--seed", 3]
    assert run(monkeypatch, "generate", "w5 w6", *options) == 0
    streamed = capsys.readouterr().out.strip()
    assert run(monkeypatch, "generate", "w5 w6", *options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == streamed


def test_batch_gives_one_object_per_prompt(folders, monkeypatch, capsys, tmp_path):
    batch = tmp_path / "prompts.jsonl"
    batch.write_text('{"prompt": "w1 w2"}\n\n{"turns": ["w3", "w4"]}\n')
    options = [*folders, "--max-new-tokens", 8, "--json", "--compare"]
    assert run(monkeypatch, "generate", "--batch", batch, *options) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["w1 w2", "w3"]
    assert all(line["same_as_plain"] for line in lines)


def test_a_difference_beyond_rounding_fails(folders, monkeypatch, capsys):
    honest = engine.decode
    monkeypatch.setattr(engine, "decode", lambda *args, **more: spoiled(honest(*args, **more)))
    options = [*folders, "--compare", "--max-new-tokens", 6]
    assert run(monkeypatch, "generate", "w5 w6", *options) == 1
    assert "MORE THAN ROUNDING" in capsys.readouterr().out


def spoiled(answer):
    answer.tokens[0][3] = (answer.tokens[0][3] + 1) % VOCAB
    return answer


def test_tree_shows_every_node(folders, monkeypatch, capsys):
    assert run(monkeypatch, "tree", "w5 w6", *folders, "--tree", "3,3,9", "--cycle", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[0].endswith("1.000 *")


def test_env_names_every_form(monkeypatch, capsys):
    assert run(monkeypatch, "env") == 0
    shown = capsys.readouterr().out
    assert all(f"form {form}: " in shown for form in ("reference", "cpu", "triton", "cuda"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "PROMPT and --batch: wanted one of them"),
        (["generate", " "], "PROMPT: wanted some text"),
        (["generate", "w1", "--tree", "4,4"], "--tree: wanted TOP_K,DEPTH,NUM_NODES"),
        (["generate", "w1", "--tree", "0,1,1"], "top_k: wanted 1 or more, got 0"),
        (["tree", "w5", "--cycle", "900"], "--cycle: the answer took"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(folders, monkeypatch, capsys, arguments, message):
    assert run(monkeypatch, *arguments, *folders) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_a_model_without_its_head_is_refused(folders, monkeypatch, capsys):
    assert run(monkeypatch, "generate", "w1", *folders[:2]) == 1
    assert "--model and --head: wanted both or neither" in capsys.readouterr().err


def test_a_bad_line_of_a_batch_is_named(folders, monkeypatch, capsys, tmp_path):
    batch = tmp_path / "prompts.jsonl"
    batch.write_text('{"prompt": "w1"}\n{"text": "w2"}\n')
    assert run(monkeypatch, "generate", "--batch", batch, *folders) == 1
    assert "prompts.jsonl:2: wanted" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["generate"], ["tree"], ["train"], ["answers"], ["env"]])
def test_help(monkeypatch, capsys, command):
    assert run(monkeypatch, *command, "--help") == 0
    assert "Usage" in capsys.readouterr().out


def test_unknown_option_is_a_usage_error(monkeypatch):
    assert run(monkeypatch, "generate", "--colour") == 2


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "eagle2", "env"], capture_output=True, text=True, check=True
    )
    assert "form reference: yes" in done.stdout
