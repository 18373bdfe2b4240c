"""Profiles: measured, kept, found again, refused where damaged."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from eagle2 import Profile, TreeConfig, baseline, tune
from eagle2.cycle import StaticCycle
from eagle2.profile import place, setting_of
from eagle2.tune import Fate, expectations, rising, row_counts
from hypothesis import given
from hypothesis import strategies as st
from test_budget import DEPTH, LENGTHS, NODES, profile, sizes_of
from test_cli import folders, run  # noqa: F401
from tiny import PROMPTS, make_pair


@pytest.fixture(scope="module")
def dense():
    return make_pair(context=3.0)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_few_rows_cost_no_more_than_many(seconds):
    found = rising(seconds)
    assert found == [min(seconds[i:]) for i in range(len(seconds))]
    assert rising(found) == found


@pytest.mark.parametrize("most", [1, 5, 64, 100, 512])
def test_rows_to_measure(most):
    counts = row_counts(most)
    assert counts[0] == 1
    assert counts == sorted(set(counts))
    assert counts[-1] <= most < 2 * counts[-1]
    assert all(n % 64 == 0 for n in counts if n > 64)


def test_expectations_of_a_tree_drawn_by_hand():
    #   root -> 1 (0.5), 2 (0.25); 1 -> 3 (0.4); accepted: 1 and 3
    fates = [
        Fate(
            np.array([1, 0.5, 0.25, 0.4]),
            np.array([-1, 0, 0, 1]),
            np.array([0, 1, 1, 2]),
            np.array([1, 3, 2]),
            2,
        )
    ]
    trust, offspring, gains = expectations(fates, TreeConfig(2, 2, 4))
    assert trust == pytest.approx([4 / 3.75, 4 / 3.4], abs=1e-4)
    first, second = trust[0] * 0.5, trust[0] * 0.25
    assert gains[0] == pytest.approx([0, first, first + second, first + second], abs=1e-4)
    both = first + trust[1] * 0.4
    assert gains[1] == pytest.approx([0, first, both, both + second], abs=1e-4)
    assert offspring[0] == pytest.approx([(1.5 + 0.5) / 4, (0.75 + 0.25) / 4])
    assert offspring[1] == pytest.approx([(1.5 + 0.4) / 3.5, 0.75 / 3.5], abs=1e-4)


def test_a_profile_comes_back_as_written(tmp_path):
    known = profile()
    known.write(tmp_path / "new" / "profile.json")
    assert Profile.read(tmp_path / "new" / "profile.json") == known
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["profile.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    profile().write(tmp_path / "profile.json")

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        profile(row=0.5).write(tmp_path / "profile.json")
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]
    assert Profile.read(tmp_path / "profile.json") == profile()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("setting", []),
        ("rows", [2, 3, 4, 5, 6]),
        ("rows", [1, 2, 2, 8, 64]),
        ("rows", "12345"),
        ("target_seconds", [1, 2, 3]),
        ("target_seconds", [1, 2, 1, 3, 4]),
        ("target_seconds", [0, 0, 0, 0, 0]),
        ("draft_seconds", [1, 2, 3, 4, float("nan")]),
        ("draft_seconds", [1, 2, 3, 4, float("inf")]),
        ("draft_seconds", [1, 2, 3, 4, 10**400]),
        ("trust", []),
        ("trust", [True] * DEPTH),
        ("offspring", [[0.5]]),
        ("offspring", [[0.5, 0.1], [0.5]] + [[0.5, 0.1]] * 3),
        ("gains", {"a": 1}),
        ("gains", [[-1.0] * NODES] * DEPTH),
    ],
)
def test_a_damaged_profile_is_refused_by_name(tmp_path, name, value):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({**dataclasses.asdict(profile()), name: value}))
    with pytest.raises(ValueError, match=f"profile.json: {name}: wanted"):
        Profile.read(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *((text, "JSON: ") for text in ("", "{", "[" * 100_000, "9" * 5000, "\udcff")),
        ("[1, 2]", "a JSON object, got list"),
        ('{"rows": [1]}', r"a profile with \[.*\], got \['rows'\]"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, text, wanted):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=f"profile.json: wanted {wanted}"):
        Profile.read(path)


def test_a_measured_profile(dense, tmp_path):
    done = []
    found = tune(
        *dense, PROMPTS[:2], rows=5, rounds=1, max_new_tokens=12,
        progress=lambda stage, at, of: done.append((stage, at, of)),
    )  # fmt: skip
    assert found.rows == [1, 2, 3, 4, 5]
    assert found.setting == setting_of(*dense)
    assert done == [("passes", 1, 2), ("passes", 2, 2), ("prompts", 1, 2), ("prompts", 2, 2)]
    gains = np.array(found.gains)
    assert (np.diff(gains, axis=1) >= 0).all()
    assert gains[0, -1] > 0
    assert all(row == sorted(row, reverse=True) for row in found.offspring)
    found.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == found
    wanted = baseline.generate(dense[0], PROMPTS[:2], **LENGTHS)
    assert sizes_of(dense, found, PROMPTS[:2])[2].tokens == wanted.tokens


def test_a_profile_measured_with_cycles_of_one_size(dense, monkeypatch):
    monkeypatch.setattr(
        "eagle2.decode.make_cycle", lambda *args: StaticCycle(*args, capture=lambda step: step)
    )
    found = tune(*dense, PROMPTS[:1], rows=3, rounds=1, max_new_tokens=12)
    assert found.gains[1][1] > found.gains[1][0] == 0


@pytest.mark.parametrize("options", [{"rows": 0}, {"rounds": 0}])
def test_nothing_to_measure_is_refused(dense, options):
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}: wanted 1 or more, got 0"):
        tune(*dense, **{"prompts": PROMPTS, **options})


def test_answers_too_short_are_refused(dense):
    with pytest.raises(ValueError, match="prompts: wanted some whose answers"):
        tune(*dense, PROMPTS[:1], rows=1, rounds=1, max_new_tokens=1)


def test_a_profile_is_of_one_setting(dense, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = dataclasses.replace(profile(), setting=setting_of(*dense))
    known.write(place(known.setting))
    assert Profile.find(*dense) == known
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    with pytest.raises(FileNotFoundError, match="threads 77.*eagle2 tune"):
        Profile.find(*dense)


def test_tune_then_generate(folders, monkeypatch, capsys, tmp_path):  # noqa: F811
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    answer = ["generate", "w5 w6", *folders, "--max-new-tokens", 12, "--compare", "--tree"]
    assert run(monkeypatch, *answer, "auto") == 1
    assert "make one by: eagle2 tune" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n')
    measure = ["tune", *folders, "--rows", 3, "--prompts", prompts]
    assert run(monkeypatch, *measure, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == [1, 2, 3]
    assert run(monkeypatch, *answer, "auto") == 0
    assert run(monkeypatch, *answer, shown["file"]) == 0
    assert capsys.readouterr().out.count("same text: yes") == 2
    assert run(monkeypatch, *measure, "--out", tmp_path / "own.json") == 0
    assert "best trees of one size" in capsys.readouterr().out
    assert (tmp_path / "own.json").exists()


def test_tune_without_its_head_is_refused(folders, monkeypatch, capsys):  # noqa: F811
    assert run(monkeypatch, "tune", *folders[:2]) == 1
    assert "--model and --head: wanted both" in capsys.readouterr().err
    assert run(monkeypatch, "tune", "--help") == 0
