"""bench/decode.py on a small target: what it reports, that it goes on, that it refuses."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from eagle2 import EAGLE1_CHOICES, TreeConfig, baseline, generate
from tiny import PROMPTS, VOCAB, make_pair

import eagle2_kernels as ek

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import ablations
import decode
import decode_plots
import decode_report
import questions
import ways

TREES = ["1,3,4", "eagle1", "4,3,10"]
TURNS = {"short": [["ab", "cd"]], "long": [["abcdefg"], ["hijk"]]}


class Letters:
    """A tokenizer of one token per character."""

    chat_template = "chat"

    def __call__(self, text):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def apply_chat_template(self, chat, **options):
        return self("".join(f"<{turn['role']}>{turn['content']}" for turn in chat))

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(64 + i) for i in ids)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the bench on prompts of two tasks; options as for `main`."""
    target, head = make_pair(context=3.0, max_position_embeddings=256)
    monkeypatch.setattr(decode.embedded, "load_target", lambda path: (target, Letters()))
    monkeypatch.setattr(decode, "load_head", lambda path, dtype: head)
    monkeypatch.setattr(decode, "context", lambda: {"commit": "abc"})
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for task, rows in TURNS.items():
        lines = [
            json.dumps({"question_id": number, "category": task, "turns": turns})
            for number, turns in enumerate(rows)
        ]
        (prompts / f"{task}.jsonl").write_text("\n".join(lines) + "\n")
    usual = {"prompts": prompts, "tree": TREES, "max_new_tokens": 12, "threads": 1, "pack": False}
    threads = torch.get_num_threads()
    yield lambda **options: decode.main(**{**usual, **options})
    torch.set_num_threads(threads)


def test_what_a_run_leaves(bench, tmp_path, capsys):
    out = tmp_path / "out"
    bench(out=out, temperature=[0.0, 1.0], with_transformers=True)
    result = json.loads((out / "results.json").read_text())
    rows = {(row["temperature"], row["task"], row["way"]): row for row in result["rows"]}
    tasks = [*sorted(TURNS), "mean"]
    ways_run = ["plain", *TREES]
    assert {*rows} == {
        *((t, task, way) for t in (0.0, 1.0) for task in tasks for way in ways_run),
        *((0.0, task, "transformers") for task in tasks),
    }
    for (_, task, way), row in rows.items():
        assert row["different"] == 0
        assert row["speed_up"] > 0
        assert row["answers"] == (4 if task == "mean" else 2)
        if way in TREES:
            assert sum(row["accepted"]) == row["cycles"]
            tokens = sum((1 + n) * count for n, count in enumerate(row["accepted"]))
            assert 1 < row["tau"] <= tokens / row["cycles"] + 0.2
            assert 0 < row["management_share"] < 1
    assert rows[0.0, "mean", "plain"]["speed_up"] == 1
    assert result["context"]["trees"] == TREES
    table = (out / "table.md").read_text()
    assert "| task | 1,3,4 | eagle1 | 4,3,10 | transformers |" in re.sub(" +", " ", table)
    assert "commit abc" in table
    assert "eagle1" in capsys.readouterr().out
    plots = {path.name for path in out.glob("*.png")}
    kinds = ("speed_up_by_task", "tau_by_depth", "acceptance_by_position_eagle1")
    assert plots == {f"{kind}_t{t}.png" for kind in kinds for t in (0, 1)}
    for path in out.glob("*.png"):
        assert path.read_bytes()[:4] == b"\x89PNG"


def test_later_turns_go_on_from_plain_answers(bench, tmp_path, monkeypatch):
    seen = []
    plain = baseline.generate

    def generate(model, rows, **options):
        seen.append(rows[0])
        return plain(model, rows, **options)

    monkeypatch.setattr(decode.baseline, "generate", generate)
    bench(out=tmp_path / "out", tree=["1,3,4"])
    first = Letters()("<user>ab")["input_ids"]
    target, _ = make_pair(context=3.0, max_position_embeddings=256)
    answer = Letters().decode(plain(target, [first], max_new_tokens=12).tokens[0], True)
    wanted = Letters()(f"<user>ab<assistant>{answer}<user>cd")["input_ids"]
    assert first in seen
    assert wanted in seen
    assert len(seen) == 4


def test_a_run_that_was_killed_goes_on(bench, tmp_path, monkeypatch):
    out = tmp_path / "out"
    bench(out=out, tree=TREES[:1])
    whole = (out / "answers.jsonl").read_text().splitlines(keepends=True)
    assert len(whole) == 5
    (out / "answers.jsonl").write_text("".join(whole[:3]) + whole[3][:40])
    answered = []
    measure = decode.Bench.answer

    def answer(self, *arguments):
        answered.append(arguments)
        return measure(self, *arguments)

    monkeypatch.setattr(decode.Bench, "answer", answer)
    bench(out=out, tree=TREES[:1])
    assert len(answered) == 2
    again = (out / "answers.jsonl").read_text().splitlines(keepends=True)
    assert again[:3] == whole[:3]
    for line, other in zip(again[3:], whole[3:], strict=True):
        one, two = json.loads(line), json.loads(other)
        assert one["answer"] == two["answer"]
        assert one["question_id"] == two["question_id"]
    bench(out=out, tree=TREES[:1])
    assert len(answered) == 2


def test_other_settings_do_not_mix(bench, tmp_path):
    bench(out=tmp_path / "out", tree=["1,3,4"], limit=1, turns=1)
    assert len((tmp_path / "out" / "answers.jsonl").read_text().splitlines()) == 3
    with pytest.raises(ValueError, match=r"^--out: .* was begun with max_new_tokens 12, got 8"):
        bench(out=tmp_path / "out", tree=["1,3,4"], limit=1, max_new_tokens=8)


def test_a_text_that_differs_has_no_speed_up(bench, tmp_path, monkeypatch):
    right = ways.Way.generate

    def wrong(self, *arguments, **options):
        run = right(self, *arguments, **options)
        tokens = [[*ids[:-1], (ids[-1] + 1) % VOCAB] for ids in run.tokens]
        return run._replace(tokens=tokens)

    monkeypatch.setattr(ways.Way, "generate", wrong)
    with pytest.raises(SystemExit, match="differs from plain"):
        bench(out=tmp_path / "out", tree=["1,3,4"])
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    for row in result["rows"]:
        if row["way"] != "plain":
            assert row["speed_up"] is None
            assert row["different"] > 0
    assert "DIFFER" in (tmp_path / "out" / "table.md").read_text()


def test_ablations_keep_the_text(bench, tmp_path):
    bench(tree=["1,3,4", "4,3,10"], ablate=True, temperature=[1.0], out=tmp_path / "out")
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["context"]["trees"] == [
        "1,3,4", "4,3,10", "4,3,10-value", "4,3,10-rerank", "4,3,10-value-rerank"
    ]  # fmt: skip
    assert not any(row["different"] for row in found["rows"])


def test_nothing_taken_away_changes_nothing():
    target, head = make_pair(context=3.0)
    found = []
    for ops in (ek, ablations.without()):
        trees = []
        generate(
            target,
            head,
            PROMPTS,
            max_new_tokens=20,
            tree=TreeConfig(4, 3, 10),
            ops=ops,
            on_cycle=lambda tree, path, trees=trees: trees.append(tree),
        )
        found.append(trees)
    for tree, other in zip(*found, strict=True):
        assert all(map(torch.equal, tree, other))


def level(scores, parents, k, num_nodes, *stages, candidates=None):
    """`enter_level` less stages, on one row: leaves' indices, live, candidates' scores."""
    scores = torch.tensor([scores])
    size = scores[0].numel()
    begin = 0 if candidates is None else 2
    if candidates is None:
        candidates = ek.Candidates(
            torch.zeros(1, 8, dtype=torch.int64),
            torch.full((1, 8), -torch.inf),
            torch.zeros(1, 8, dtype=torch.int32),
        )
    *leaves, live = ablations.without(*stages).enter_level(
        candidates,
        begin,
        torch.arange(size).view(scores.shape),
        scores,
        torch.tensor([parents], dtype=torch.int32),
        torch.zeros(1, len(parents), 1, dtype=torch.int64),
        begin,
        k,
        torch.tensor([num_nodes], dtype=torch.int32),
    )
    return leaves[2][0].tolist(), int(live), candidates


# level 1: -1 and -2; level 2, as path scores: -1.5 and -2 below the first, -2.25 and -9 below the
# second. By value its best two are 2 and 3, by confidence 4 (-0.25) and 2 (-0.5).
ONE, TWO = [[-1.0, -2.0]], [[-1.5, -2.0], [-2.25, -9.0]]


@pytest.mark.parametrize(
    ("stages", "leaves", "kept"),
    [
        ((), [2, 3], [0, 1, 2, 3]),
        (("value",), [2, 4], [0, 1, 2, 3]),
        (("rerank",), [2, 3], [0, 1, 2, 3]),
        (("value", "rerank"), [2, 4], [0, 1, 2, 4]),
    ],
)
def test_what_an_ablation_expands_and_keeps(stages, leaves, kept):
    _, live, candidates = level(ONE, [-1], 2, 5, *stages)
    assert live == 2
    found, live, candidates = level(TWO, [0, 1], 2, 5, *stages, candidates=candidates)
    assert found == leaves
    assert live == (0 if "rerank" in stages else 2)  # without a rerank the tree is full
    order = candidates.scores[0].argsort(descending=True, stable=True).tolist()
    assert sorted(order[:4]) == kept


def test_without_a_rerank_the_last_level_is_cut_to_the_budget():
    _, _, candidates = level(ONE, [-1], 2, 4, "value", "rerank")
    _, live, candidates = level(TWO, [0, 1], 2, 4, "value", "rerank", candidates=candidates)
    assert live == 0
    alive = (candidates.scores[0] > -torch.inf).nonzero().flatten().tolist()
    assert alive == [0, 1, 4]  # the most confident of the two


def test_trees_by_name():
    assert ways.way("4,3,10").config == TreeConfig(4, 3, 10)
    assert ways.way("eagle1").config == TreeConfig.static(EAGLE1_CHOICES)
    assert ways.way("static5").config.num_nodes == 6
    for name in ("4,3", "4,3,10-all", "eagle9", "4,3,10,1", ""):
        with pytest.raises(ValueError, match="^--tree: wanted TOP_K.*here also eagle1, static5"):
            ways.way(name)
    with pytest.raises(ValueError, match="^top_k: wanted 1 or more"):
        ways.way("0,1,2")


def test_positions_count_what_was_reached_and_taken():
    config = TreeConfig.static([[0], [1], [0, 0], [0, 1]])
    whole, cut = torch.tensor([5]), torch.tensor([3])
    cycles = [
        (None, whole, torch.tensor([[0, 1, 4]])),  # [0], [0, 1]
        (None, whole, torch.tensor([[0, 1, -1]])),  # [0]
        (None, whole, torch.tensor([[0, -1, -1]])),
        (None, cut, torch.tensor([[0, 2, -1]])),
    ]
    assert decode.positions(config, cycles) == [[3, 2], [3, 0], [2, 0], [2, 1]]


def test_figures_of_the_report():
    assert decode_plots.cut_taus([1, 1, 2]) == [1.0, 1.75, 2.25]
    stages = {"prefill": 9.0, "draft": 2.0, "target": 7.0, "tree": 0.5, "verify": 0.25}
    assert decode_report.share({**stages, "commit": 0.25}) == 0.1
    assert decode_report.share({"cycle": 3.0}) is None
    plain = {"seconds": 4.0, "new_tokens": 8, "stage_seconds": {}}
    pairs = [({**plain, "seconds": seconds}, plain) for seconds in (2.0, 1.0, 40.0)]
    row = decode_report.summary(pairs)
    assert row["speed_up"] == 2.0
    assert row["speed_up_quartiles"] == [1.05, 3.0]


def test_questions_by_task(tmp_path):
    file = tmp_path / "all.jsonl"
    rows = [{"question_id": n, "category": "ab"[n % 2], "turns": [str(n)]} for n in range(8)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    found = questions.read_questions(file, every=1, limit=2)
    assert [(q.task, q.question_id) for q in found] == [("a", 0), ("a", 2), ("b", 1), ("b", 3)]
    assert [q.question_id for q in questions.read_questions(file, every=4, limit=None)] == [3, 7]
    file.write_text("\n")
    with pytest.raises(ValueError, match="^--prompts: .* none in"):
        questions.read_questions(file, every=1, limit=None)
