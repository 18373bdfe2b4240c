"""Trees sized by what passes cost: the text stays, the sizes are the best by the profile."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from eagle2 import Profile, TreeConfig, baseline, custom_generate, generate, tune
from eagle2.budget import best_nodes, best_width
from eagle2.cycle import StaticCycle
from eagle2.drafter import check_head
from eagle2.profile import place, setting_of
from eagle2.target import Target
from eagle2.tune import Fate, expectations, rising, row_counts
from hypothesis import given
from hypothesis import strategies as st
from test_cli import folders, run  # noqa: F401
from tiny import PROMPTS, make_eagle3_pair, make_pair

LENGTHS = {"max_new_tokens": 24}
TOP_K, DEPTH, NODES = 4, 5, 24


def profile(row=0.02, step=0.05, **changes) -> Profile:
    """Plain passes of one second; each row more, and each draft step, take these shares of it."""
    rows = [1, 2, 4, 8, 64]
    ranks, levels = np.arange(1, NODES + 1), np.arange(1, DEPTH + 1)[:, None]
    fields = {
        "setting": {"model": "made up"},
        "versions": {},
        "rows": rows,
        "target_seconds": [1 + row * (n - 1) for n in rows],
        "draft_seconds": [step * (1 + row * (n - 1)) for n in rows],
        "trust": [1.0] * DEPTH,
        "offspring": [[0.6, 0.2, 0.1, 0.05]] * DEPTH,
        "gains": (levels * (1 - 0.8 ** (ranks - 1)) * 0.5).tolist(),
    }
    return Profile(**{**fields, **changes})


def sizes_of(pair, known, prompts=PROMPTS[:1], **settings):
    """Nodes and levels of every tree, and the answer."""
    seen = []
    answer = generate(
        *pair,
        prompts,
        tree=TreeConfig.auto(known, num_nodes=NODES),
        on_cycle=lambda tree, path: seen.append((tree.tokens.shape[1], int(tree.depths.max()))),
        **{**LENGTHS, **settings},
    )
    return *zip(*seen, strict=True), answer


@pytest.fixture(scope="module", params=[make_pair, make_eagle3_pair])
def pair(request):
    return request.param(context=3.0)


@pytest.fixture(scope="module")
def dense():
    return make_pair(context=3.0)


@pytest.mark.parametrize(("row", "step"), [(0.0, 0.001), (0.05, 0.1), (2.0, 0.01), (0.0, 3.0)])
def test_the_text_is_the_same_whatever_passes_cost(pair, row, step):
    wanted = baseline.generate(pair[0], PROMPTS, **LENGTHS)
    assert sizes_of(pair, profile(row, step), PROMPTS)[2].tokens == wanted.tokens
    sampled = {"temperature": 1.0, "seed": 3, "prompts": PROMPTS[:1]}
    wanted = baseline.generate(pair[0], PROMPTS[:1], temperature=1.0, seed=3, **LENGTHS)
    assert sizes_of(pair, profile(row, step), **sampled)[2].tokens == wanted.tokens


def test_sampled_text_of_a_batch_is_the_same(dense):
    law = {"temperature": [0.0, 1.0, 1.3], "seed": [1, 2, 3], "top_p": 0.9}
    wanted = baseline.generate(dense[0], PROMPTS, **law, **LENGTHS)
    assert sizes_of(dense, profile(), PROMPTS, **law)[2].tokens == wanted.tokens


def test_rows_that_end_early_and_a_full_context():
    pair = make_pair(context=3.0, max_position_embeddings=31)
    plain = baseline.generate(pair[0], PROMPTS, max_new_tokens=100)
    ends = [plain.tokens[0][5], plain.tokens[2][9]]
    for settings in ({}, {"eos_token_id": ends}):
        wanted = baseline.generate(pair[0], PROMPTS, max_new_tokens=100, **settings)
        found = sizes_of(pair, profile(), PROMPTS, max_new_tokens=100, **settings)[2]
        assert found.tokens == wanted.tokens


def test_trees_grow_while_rows_and_steps_are_cheap(dense):
    def means(row, step):
        nodes, depths, _ = sizes_of(dense, profile(row, step))
        return np.mean(nodes), np.mean(depths)

    free, dear_rows, dear_steps = means(0.0, 0.001), means(0.3, 0.001), means(0.0, 0.4)
    assert free[0] > NODES / 2
    assert dear_rows[0] < free[0] / 2
    assert dear_steps[1] < free[1]


def test_rows_that_cost_whole_passes_leave_the_root_alone(dense):
    nodes, _, answer = sizes_of(dense, profile(row=3.0))
    assert set(nodes) == {1}
    assert answer.statistics.tau == 1


def test_transformers_own_generate(dense):
    ids = torch.tensor(PROMPTS[:1])
    wanted = dense[0].generate(ids, **LENGTHS, do_sample=False)
    method = custom_generate(dense[1], TreeConfig.auto(profile()))
    found = dense[0].generate(ids, **LENGTHS, do_sample=False, custom_generate=method)
    assert torch.equal(found, wanted)


def test_a_row_of_a_batch_costs_the_batch(dense):
    eight = profile(target_seconds=[1, 1, 1, 1, 1000])
    assert max(sizes_of(dense, eight)[0]) == 8
    assert max(sizes_of(dense, eight, PROMPTS)[0]) == 8 // 3


probabilities = st.lists(st.floats(0, 1), max_size=12).map(lambda x: sorted(x, reverse=True))
costs = st.lists(st.floats(1e-3, 5), min_size=5, max_size=5).map(sorted)
paces = st.floats(0.01, 10)


@given(probabilities, costs, costs, paces, st.integers(1, 14), st.integers(1, 3))
def test_the_number_of_nodes_is_the_best_one(values, target, draft, pace, most, batch):
    known = profile(target_seconds=target, draft_seconds=draft)
    rows = np.array([values] * batch)
    prices = pace * known.target(batch * np.arange(1, most + 1))
    found, profit = best_nodes(rows, prices)

    def worth(nodes):
        return batch * sum(values[: nodes - 1]) - pace * float(known.target(batch * nodes))

    profits = [worth(nodes) for nodes in range(1, min(most, len(values) + 1) + 1)]
    assert profits[found - 1] == pytest.approx(max(profits), abs=1e-9)
    assert profit == pytest.approx(max(profits), abs=1e-9)


@given(probabilities, st.lists(probabilities, min_size=1, max_size=4), costs, costs, paces)
def test_the_number_of_leaves_is_the_best_one(values, families, target, draft, pace):
    known = profile(target_seconds=target, draft_seconds=draft)
    children = np.array([family[:3] + [0.0] * (3 - len(family[:3])) for family in families])
    prices, widths = pace * known.target(np.arange(1, 11)), np.arange(len(families) + 1)
    steps = pace * known.draft(widths) * (widths > 0)
    found = best_width(np.array([values]), children[None], prices, steps)
    profits = []
    for width in range(len(families) + 1):
        nodes = sorted([*values, *children[:width].ravel()], reverse=True)
        step = float(known.draft(width)) if width else 0.0
        profits.append(
            max(
                sum(nodes[: n - 1]) - pace * (float(known.target(n)) + step)
                for n in range(1, min(10, len(nodes) + 1) + 1)
            )
        )
    assert profits[found] == pytest.approx(max(profits), abs=1e-9)


@given(costs, costs, st.integers(1, 70), st.integers(1, 70))
def test_more_rows_never_cost_less(target, draft, few, more):
    known = profile(target_seconds=target, draft_seconds=draft)
    few, more = sorted((few, more))
    assert known.target(few) <= known.target(more) + 1e-12
    assert known.draft(few) <= known.draft(more) + 1e-12
    assert [known.target(n) for n in known.rows] == pytest.approx(target)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_noise_is_levelled_out(seconds):
    found = rising(seconds)
    assert found == sorted(found)
    assert sum(found) == pytest.approx(sum(seconds))
    assert rising(sorted(seconds)) == pytest.approx(sorted(seconds))


def test_noise_is_levelled_out_by_hand():
    assert rising([1, 3, 2, 4]) == [1, 2.5, 2.5, 4]


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


def test_trees_of_one_size_are_the_best_of_the_profile():
    known = profile()
    for batch in (1, 4):
        pace = {
            (depth, nodes): batch
            * (1 + known.gains[depth - 1][nodes - 1])
            / (
                known.draft(batch)
                + (depth - 1) * known.draft(batch * TOP_K)
                + known.target(batch * nodes)
            )
            for depth in range(1, DEPTH + 1)
            for nodes in range(1, NODES + 1)
        }
        depth, nodes, best = known.fixed(batch)
        assert best == pytest.approx(max(pace.values()))
        assert pace[depth, nodes] == pytest.approx(best)


def test_no_pass_is_larger_than_was_measured(dense):
    free = {"row": 0.0, "step": 0.001}
    assert max(sizes_of(dense, profile(**free), PROMPTS)[0]) == 64 // 3
    assert profile(**free).fixed(16)[1] <= 4
    few = profile(rows=[1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="wanted 6 rows .* batch of 3, got 5.*tune --rows 192"):
        sizes_of(dense, few, PROMPTS)
    with pytest.raises(ValueError, match="wanted 6 rows"):
        few.fixed(3)


def test_cycles_of_one_size_take_the_fixed_one(dense, monkeypatch):
    made = []

    def make_cycle(*arguments):
        made.append(StaticCycle(*arguments, capture=lambda step: step))
        return made[-1]

    monkeypatch.setattr("eagle2.decode.make_cycle", make_cycle)
    wanted = baseline.generate(dense[0], PROMPTS, **LENGTHS)
    nodes, _, found = sizes_of(dense, profile(), PROMPTS)
    assert found.tokens == wanted.tokens
    depth, size, _ = profile().fixed(len(PROMPTS))
    assert (made[0].config.depth, made[0].config.num_nodes) == (depth, size)
    assert set(nodes) == {size}


def test_ranks_are_refused(dense):
    target = Target(dense[0])
    target.group = object()
    with pytest.raises(ValueError, match="tree: wanted trees of one size .* spread over ranks"):
        check_head(dense[1], target, TreeConfig.auto(profile()))


def test_trees_beyond_the_profile_are_refused():
    with pytest.raises(ValueError, match="profile: wanted top_k and depth within its 4 and 5"):
        TreeConfig(top_k=5, depth=5, profile=profile())


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
    "text", ["", "{", "[1, 2]", '{"rows": [1]}', "[" * 100_000, "9" * 5000, "\udcff"]
)
def test_what_is_no_profile_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="profile.json: wanted a profile"):
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


@pytest.mark.parametrize("options", [{"prompts": []}, {"rows": 0}, {"rounds": 0}])
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
