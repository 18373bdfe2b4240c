"""Every option of every command: what cannot be is said by name, in a line, and nothing is left.

Values that no run could use are usage errors, exit code 2; what files hold is told by exit code 1.
"""

import json
import re

import pytest
from test_cli import folders as model_folders  # noqa: F401
from test_cli import run

FILES = {
    "text": b"x",
    "binary": b"\xff\xfe\x00",
    "empty.jsonl": b"",
    "ok.jsonl": b'{"prompt": "w1"}\n',
    "cut.jsonl": b'{"prompt":\n',
    "cut.json": b"{",
    "no_json.pt/checkpoint.pt": b"hello",
    "full/file": b"x",
    "turns/a.jsonl": b'{"turns": ["w1"]}\n' * 8,
    "cut_turns/a.jsonl": b'{"turns":\n',
    "no_turns/a.jsonl": b'{"prompt": 5}\n',
    "no_files/a.txt": b"",
    "answers.jsonl": b'{"number": 0, "prompt_len": 2, "ids": [1, 2, 3, 4, 5, 6]}\n' * 3,
    "no_ids.jsonl": b'{"number": 1}\n',
    "list.jsonl": b"[1]\n",
    "other_model.jsonl": b'{"prompt_len": 1, "ids": [1, 999, 3]}\n',
}
GENERATE = "generate w1 MODEL HEAD --no-pack --max-new-tokens 3 "
BATCH = "generate MODEL HEAD --batch "
CALIBRATE = "calibrate ok.jsonl MODEL HEAD --tree 2,2,4 --max-new-tokens 3 "
TUNE = "tune MODEL HEAD --no-pack --rows 2 "
DATA = "data turns out.jsonl MODEL --tokens 5 --slots 2 "
TRAIN = "train answers.jsonl --out trained MODEL --steps 1 --draft-vocab-size 20 "
TRAIN_ON = "train --out trained MODEL --steps 1 --draft-vocab-size 20 "
CONVERT = "convert head_folder out "

USAGE = {
    GENERATE: [
        "--temperature nan", "--temperature -1", "--top-p nan", "--top-p 2", "--top-k -1",
        "--top-k 9999999999", "--min-p nan", "--min-p 1.5", "--max-new-tokens 0", "--threads 0",
        "--threads 999999", "--seed x", "--seed 99999999999999999999", "--model nowhere",
        "--model text", "--head nowhere", "--head text", "--batch nowhere", "--batch full",
    ],
    "tree w1 MODEL HEAD ": ["--cycle 0", "--cycle x", "--model text", "--head nowhere"],
    CALIBRATE: [
        "--temperature nan", "--temperature -1", "--seed 99999999999999999999", "--limit 0",
        "--max-new-tokens 0", "--plot full", "--threads 0", "--model text", "--head nowhere",
    ],
    TUNE: [
        "--rows 0", "--rows nan", "--rows 999999999", "--out full", "--threads 0",
        "--prompts nowhere", "--prompts full", "--model text", "--head nowhere",
    ],
    DATA: [
        "--tokens 0", "--tokens nan", "--slots 0", "--slots -5", "--seed -1", "--seed x",
        "--threads 0", "--model nowhere", "--model text",
    ],
    TRAIN: [
        "--steps 0", "--batch-tokens 0", "--draft-vocab-size 0", "--learning-rate nan",
        "--learning-rate -1", "--learning-rate inf", "--seed -1", "--seed x", "--kind medusa",
        "--threads 0", "--out text", "--model nowhere", "--held-out nowhere", "--held-out full",
    ],
    CONVERT: ["--layout gguf", "--dtype int8", "--model nowhere", "--model text"],
    "inspect head_folder ": ["--model nowhere", "--model text"],
}  # fmt: skip
ARGUMENTS = [
    ("calibrate nowhere MODEL HEAD", "prompts"),
    ("calibrate full MODEL HEAD", "prompts"),
    ("inspect nowhere", "folder"),
    ("inspect text", "folder"),
    ("convert nowhere out", "folder"),
    ("data nowhere out.jsonl MODEL", "prompts"),
    ("data text out.jsonl MODEL", "prompts"),
    ("data turns full MODEL", "out"),
    (TRAIN_ON + "nowhere", "files"),
    (TRAIN_ON + "full", "files"),
]
OTHERS = [
    (GENERATE + "--tree 4,4", "--tree: wanted TOP_K,DEPTH,NUM_NODES"),
    (GENERATE + "--tree 4,999999999,9", "top_k, depth: wanted trees of"),
    (GENERATE + "--tree nowhere.json", "nowhere.json"),
    (GENERATE + "--tree cut.json", "cut.json: wanted JSON"),
    (GENERATE + "--model full", "--model .*full: "),
    (GENERATE + "--model head_folder", "--model .*head_folder: wanted all weights of a causal LM"),
    (GENERATE + "--head full", "full/config.json"),
    (BATCH + "binary", "binary: wanted JSON in line 1"),
    (BATCH + "cut.jsonl", "cut.jsonl: wanted JSON in line 1"),
    (BATCH + "list.jsonl", r"list.jsonl:1: wanted a JSON object with 'prompt' or 'turns', got \[1"),
    (BATCH + "empty.jsonl", "empty.jsonl: wanted some text, got none"),
    (CALIBRATE + "--plot text/x.png", "--plot: wanted a file in a folder that is there"),
    (CALIBRATE + "--plot nowhere/x.png", "--plot: wanted a file in a folder that is there"),
    (CALIBRATE + "--max-new-tokens 1", "prompts: wanted some whose answers take a cycle"),
    ("calibrate cut.jsonl MODEL HEAD", "cut.jsonl: wanted JSON in line 1"),
    ("calibrate ok.jsonl --apply", "--apply: wanted --head"),
    (TUNE + "--device abacus", "--device: wanted one that works here, got 'abacus'"),
    (TUNE + "--device meta", "--device: wanted one that works here, got 'meta'"),
    (TUNE + "--prompts cut.jsonl", "cut.jsonl: wanted JSON in line 1"),
    ("data no_files out.jsonl MODEL", "no_files: wanted files named .*, found none"),
    ("data cut_turns out.jsonl MODEL", "cut_turns/a.jsonl: wanted JSON in line 1"),
    ("data no_turns out.jsonl MODEL", "a.jsonl:1: wanted a JSON object with 'turns', got"),
    ("data no_turns out.jsonl MODEL --held-out", "a.jsonl:1: wanted a JSON object with 'turns'"),
    ("data turns nowhere/out.jsonl CHAT", "nowhere/out.jsonl"),
    ("data turns text CHAT", "text: wanted a new file or one of answers"),
    ("data turns no_ids.jsonl CHAT", "no_ids.jsonl:1: wanted 'ids' and 'prompt_len', .* got"),
    (DATA + "--model head_folder", "--model .*head_folder: wanted all weights"),
    (TRAIN_ON + "binary", "binary: wanted JSON in line 1"),
    (TRAIN_ON + "no_ids.jsonl", "no_ids.jsonl:1: wanted 'ids' and 'prompt_len'"),
    (TRAIN_ON + "list.jsonl", "list.jsonl:1: wanted 'ids' and 'prompt_len'"),
    (TRAIN_ON + "other_model.jsonl", "other_model.jsonl: wanted ids in 0..60"),
    (TRAIN_ON + "empty.jsonl", "answers: wanted conversations of .*, got none of 0"),
    (TRAIN + "--held-out cut.jsonl", "cut.jsonl: wanted JSON in line 1"),
    (TRAIN + "--held-out empty.jsonl", "held_out: wanted one conversation or more"),
    (TRAIN + "--draft-vocab-size 99", "draft_vocab_size: wanted 1..vocab_size=61, got 99"),
    (TRAIN + "--out text/x", "text/x"),
    (TRAIN + "--out no_json.pt", "checkpoint.pt: damaged or cut short"),
    (TRAIN + "--model head_folder", "--model .*head_folder: wanted all weights"),
    (CONVERT + "--model full", "--model .*full: "),
    (CONVERT + "--embedding", "--embedding: wanted --model"),
    (CONVERT + "--layout speculators", "layout: speculators 0.9 has no place"),
    ("convert head_folder text", "OUT: wanted a new or an empty folder"),
    ("convert head_folder text/x", "text/x"),
    ("inspect full", "full/config.json"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folders):  # noqa: F811
    place = tmp_path_factory.mktemp("options")
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    (place / "head_folder").symlink_to(model_folders[3])
    (place / "chat").mkdir()
    for file in place.joinpath(model_folders[1]).iterdir():
        (place / "chat" / file.name).symlink_to(file)
    settings = place / "chat" / "tokenizer_config.json"
    known = json.loads(settings.read_text())
    settings.unlink()
    template = "{% for m in messages %}w1 {{m['content']}} w2 {% endfor %}"
    settings.write_text(json.dumps(known | {"chat_template": template}))
    return place


@pytest.fixture
def shown(folder, model_folders, monkeypatch, capsys):  # noqa: F811
    """Runs a command in that folder; its exit code, and what it says in one line."""
    monkeypatch.chdir(folder)
    options = dict(zip(("MODEL", "HEAD"), (model_folders[:2], model_folders[2:]), strict=True))
    options["CHAT"] = ["--model", "chat"]

    def run_here(line):
        before = contents(folder)
        words = [option for word in line.split() for option in options.get(word, [word])]
        code = run(monkeypatch, *words)
        assert contents(folder) == before, "something was written"
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return code, " ".join(said.replace("│", " ").split())

    return run_here


def contents(folder):
    """What is there, but for features, which any run may add beside answers."""
    files = (file for file in folder.rglob("*") if file.suffix != ".f16" and file.is_file())
    return {file: file.read_bytes() for file in files}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        *((start + option, option.split()[0]) for start in USAGE for option in USAGE[start]),
        *ARGUMENTS,
    ],
)
def test_what_no_run_could_use_is_a_usage_error(shown, line, name):
    code, said = shown(line)
    assert f"Invalid value for '{name}': " in said
    assert code == 2


@pytest.mark.parametrize(("line", "message"), OTHERS)
def test_what_is_found_on_the_way(shown, line, message):
    code, said = shown(line)
    assert re.search(f"eagle2: .*{message}", said), said
    assert code == 1
