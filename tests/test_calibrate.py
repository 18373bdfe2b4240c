"""Confidence against acceptance, the fitted draft temperature, and `eagle2 calibrate`."""

import json
import sys
from collections import Counter

import pytest
import torch
from eagle2 import TreeConfig, baseline, generate, load_head
from eagle2.calibrate import TEMPERATURES, Confidences, confidences, with_draft_temperature
from test_cli import folders, run
from tiny import PROMPTS, make_eagle3_pair, make_pair

__all__ = ["folders"]

# trees in which every candidate becomes a node
WHOLE = TreeConfig(3, 3, 22, early_stop=False)
UNEVEN = TreeConfig.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1]])


def made_up(logits, taken, children):
    """What a head would have said that drafts the first so many of all ids."""
    found = Confidences()
    for row in logits:
        found.logits.append(row[:children])
        found.log_sums.append((row / TEMPERATURES[:, None]).logsumexp(-1))
    found.taken = [min(int(token), children) for token in taken]
    return found


@pytest.mark.parametrize(("true", "children"), [(0.6, 3), (1.0, 8), (1.7, 3)])
def test_fit_finds_the_temperature_that_the_tokens_were_drawn_at(true, children):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6000, 8, generator=generator)
    taken = torch.multinomial((logits / true).softmax(-1), 1, generator=generator)[:, 0]
    assert made_up(logits, taken, children).fit() == pytest.approx(true, rel=0.08)


def test_bins_and_error_by_hand():
    probabilities = torch.tensor([[0.95, 0.05], [0.96, 0.04], [0.5, 0.3], [0.5, 0.06]])
    rest = 1 - probabilities.sum(1, keepdim=True)
    logits = torch.cat((probabilities, rest.clamp(min=1e-12)), 1).log()
    found = made_up(logits, torch.tensor([0, 1, 2, 0]), 2)
    bins = {round(each.low, 2): each for each in found.bins() if each.children}
    assert {low: (each.children, each.acceptance) for low, each in bins.items()} == {
        0.0: (2, 0.5),
        0.05: (1, 0.0),
        0.25: (1, 0.0),
        0.45: (2, 0.5),
        0.9: (1, 1.0),
        0.95: (1, 0.0),
    }
    assert bins[0.0].confidence == pytest.approx(0.045)
    off = 2 * abs(0.5 - 0.045) + 0.06 + 0.3 + 2 * 0.0 + 0.05 + 0.96
    assert found.error() == pytest.approx(off / 8, abs=1e-6)


@pytest.mark.parametrize("make", [make_pair, make_eagle3_pair])
@pytest.mark.parametrize(("temperature", "tree"), [(0.0, WHOLE), (1.0, WHOLE), (0.0, UNEVEN)])
def test_what_is_noted_is_what_the_trees_and_paths_say(make, temperature, tree):
    target, head = make(context=2.0)
    head = with_draft_temperature(head, 1.3)
    options = {"tree": tree, "max_new_tokens": 24}
    found = confidences(target, head, PROMPTS, temperature=temperature, seed=5, **options)
    noted, wanted, cycles, tokens = Counter(), Counter(), 0, 0
    confidence = found.probabilities(len(TEMPERATURES) // 2)
    for row, taken in zip(confidence.tolist(), found.taken, strict=True):
        noted.update((round(one, 4), child == taken) for child, one in enumerate(row) if one)

    def on_cycle(tree, path):
        nodes = path[0].tolist()
        for node in range(1, int(tree.num_nodes[0])):
            parent = int(tree.parents[0, node])
            if parent in nodes:
                one = float((tree.scores[0, node] - tree.scores[0, parent]).exp())
                wanted[round(one, 4), node in nodes] += 1

    for number, prompt in enumerate(PROMPTS):
        result = generate(
            target, head, [prompt], temperature=temperature, seed=5 + number, on_cycle=on_cycle,
            **options,
        )  # fmt: skip
        cycles, tokens = (
            cycles + result.statistics.cycles,
            tokens + result.statistics.cycle_tokens,
        )
    assert found.tau == tokens / cycles
    assert {accepted for _, accepted in wanted} == {True, False}
    # at the end of a text the path can go on beyond it
    missed = wanted - noted
    assert missed.total() <= tree.top_k * tree.depth * len(PROMPTS)
    assert noted - wanted == Counter()
    assert noted.total() > 60


@pytest.mark.parametrize("make", [make_pair, make_eagle3_pair])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_draft_temperature_changes_the_trees_and_not_the_text(make, temperature):
    target, head = make(context=3.0)
    options = {"max_new_tokens": 30, "temperature": temperature, "seed": 2}
    plain = baseline.generate(target, PROMPTS, **options)
    shapes = []
    for draft_temperature in (0.25, 1.0, 4.0):
        shapes.append([])
        warm = with_draft_temperature(head, draft_temperature)
        result = generate(
            target, warm, PROMPTS, tree=TreeConfig(4, 3, 10), **options,
            on_cycle=lambda tree, path: shapes[-1].append(tree.parents[0].tolist()),
        )  # fmt: skip
        assert result.tokens == plain.tokens
    assert len({str(shape[0]) for shape in shapes}) > 1
    assert head.config.draft_temperature == 1


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w1 w2"}\n{"turns": ["w3", "w4"]}\n{"prompt": "w5"}\n')
    return path


def test_command(folders, prompts, tmp_path, monkeypatch, capsys):
    options = [prompts, *folders, "--limit", 2, "--max-new-tokens", 12, "--tree", "4,3,10"]
    plot, head = tmp_path / "figure.png", folders[3]
    assert run(monkeypatch, "calibrate", *options, "--json", "--plot", plot, "--apply") == 0
    before, after = json.loads(capsys.readouterr().out)
    assert (before["draft_temperature"], len(before["bins"])) == (1.0, 20)
    assert sum(each["children"] for each in before["bins"]) % 4 == 0
    assert min(run["tau"] for run in (before, after)) >= 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert load_head(head).config.draft_temperature == after["draft_temperature"]
    assert not [*tmp_path.glob("*.partial")]
    assert run(monkeypatch, "calibrate", *options) == 0
    shown = capsys.readouterr().out
    assert "0.95-1.00" in shown
    assert f"draft temperature {after['draft_temperature']:.3f}: expected calibration" in shown


def test_what_cannot_be_is_said_before_anything_is_loaded(prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(monkeypatch, "calibrate", prompts, "--plot", tmp_path / "x.png") == 1
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert run(monkeypatch, "calibrate", prompts, "--apply") == 1
    assert "--apply: wanted --head" in capsys.readouterr().err
