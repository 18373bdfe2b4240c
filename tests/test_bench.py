"""The benches: eagle_steps does what the operators do, and a wrong result gets no time."""

import json
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from eagle2.requests import Sampling

import eagle2_kernels
from eagle2_kernels import reference
from eagle2_kernels.reference.words import unpack

sys.path.append(str(Path(__file__).parents[1] / "bench"))
import cases
import cycle
import eagle_steps
import flex
import timing
import tree_ops

TINY = {"top_k": 4, "depth": [4], "nodes": [12], "vocab": [300], "threads": [1], "seconds": 1e-3}


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    for module in (cases, cycle):
        monkeypatch.setattr(module, "LAYERS", 2)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def drafted(seed, vocab=97, top_k=4, depth=4, nodes=12, early_stop=False):
    """Our tree and the level logits that it came from."""
    torch.manual_seed(seed)
    shape = timing.Shape(top_k=top_k, depth=depth, nodes=nodes, vocab=vocab, early_stop=early_stop)
    levels = [shape.normal(1, 1 if level == 0 else top_k, vocab) for level in range(depth)]
    hidden = torch.zeros(1, top_k + depth, cycle.FEATURES)
    root = torch.tensor([7])
    tree, *_ = cycle.Cycle(shape, 200, 1).draft(eagle2_kernels, levels, hidden, root, 20)
    return tree, [level[0] for level in levels]


def laid_out(levels, top_k, nodes, sampled=False):
    found = eagle_steps.draft(levels, torch.zeros(1, top_k, 8), top_k)
    return eagle_steps.lay_out(found, torch.tensor([7]), top_k, nodes, sampled)


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize(
    ("top_k", "depth", "nodes"), [(4, 4, 12), (10, 7, 60), (1, 3, 4), (3, 1, 3), (8, 5, 70)]
)
def test_eagle_steps_build_our_tree(top_k, depth, nodes, early_stop):
    for seed in range(5):
        tree, levels = drafted(seed, 97, top_k, depth, nodes, early_stop)
        theirs = laid_out(levels, top_k, nodes, sampled=seed % 2 == 1)
        assert torch.equal(theirs.tokens, tree.tokens)
        assert torch.equal(theirs.positions, tree.depths[0].long())
        assert torch.equal(theirs.mask[0, 0] > 0, unpack(tree.ancestors[0], nodes))
        parents, lines = tree.parents[0].tolist(), []
        for leaf in sorted(set(range(nodes)) - set(parents)):
            line = [leaf]
            while line[0]:
                line.insert(0, parents[line[0]])
            lines.append(line + [-1] * (int(tree.depths.max()) + 1 - len(line)))
        assert sorted(theirs.retrieve_indices.tolist()) == sorted(lines)


def test_eagle_steps_accept_our_greedy_path():
    lengths = Counter()
    for seed in range(40):
        tree, levels = drafted(seed, vocab=9, top_k=4, depth=3, nodes=20)
        logits = torch.randn(1, 20, 9)
        theirs = laid_out(levels, 4, 20)
        best, accepted, next_token = eagle_steps.verify(theirs, logits, 0.0)
        place = tree.depths.long()
        path, length, bonus, _ = eagle2_kernels.accept(tree, logits, *Sampling.of(1), place, 3)
        assert accepted == int(length)
        assert torch.equal(next_token, bonus)
        found = theirs.retrieve_indices[best, : accepted + 1]
        assert found.tolist() == path[0, : accepted + 1].tolist()
        lengths[accepted] += 1
    assert len(lengths) > 2


def emitted(tree, path, bonus):
    """The first two tokens that a cycle commits; one where no draft was accepted."""
    return tuple([*(int(tree.tokens[0, node]) for node in path[1:]), bonus][:2])


def check_law(counts, law):
    """Chi-square of the cells with five draws or more expected: below 1.8 per degree of freedom."""
    draws = counts.total()
    assert set(counts) <= set(law)
    cells = {cell: p * draws for cell, p in law.items() if p * draws >= 5}
    distance = sum((counts[cell] - n) ** 2 / n for cell, n in cells.items())
    assert distance < 1.8 * (len(cells) - 1)


def check_laws(counts, law):
    """Of the first two tokens, and of the first alone."""
    check_law(counts, law)
    first, first_law = Counter(), Counter()
    for cell, n in counts.items():
        first[cell[0]] += n
    for cell, p in law.items():
        first_law[cell[0]] += p
    check_law(first, first_law)


def test_eagle_steps_sample_our_law():
    tree, levels = drafted(3, vocab=6, top_k=3, depth=2, nodes=8)
    theirs, draws = laid_out(levels, 3, 8, sampled=True), 2500
    logits = torch.randn(1, 8, 6)
    logits[0, tree.parents[0, 1:].long(), tree.tokens[0, 1:]] += 1.5  # children are likely
    probs, law = logits.double().softmax(-1)[0], {}
    children = {int(tree.tokens[0, n]): n for n in range(8) if tree.parents[0, n] == 0}
    for token in range(6):
        if token not in children:
            law[(token,)] = float(probs[0, token])
            continue
        for then in range(6):
            law[token, then] = float(probs[0, token] * probs[children[token], then])
    random.seed(0)
    counts = Counter()
    for _ in range(draws):
        best, accepted, next_token = eagle_steps.verify(theirs, logits, 1.0)
        path = theirs.retrieve_indices[best, : accepted + 1].tolist()
        counts[emitted(tree, path, int(next_token))] += 1
    check_laws(counts, law)

    many = type(tree)(*(field.expand(draws, *field.shape[1:]) for field in tree))
    sampling = Sampling.of(draws, 1.0, seed=list(range(draws)))
    place = many.depths.long()
    path, length, bonus, _ = eagle2_kernels.accept(
        many, logits.expand(draws, -1, -1), *sampling, place
    )
    ours = Counter(
        emitted(tree, nodes[: n + 1], token)
        for nodes, n, token in zip(path.tolist(), length.tolist(), bonus.tolist(), strict=True)
    )
    check_laws(ours, law)


def test_eagle_steps_move_the_rows_that_we_move():
    k, v = torch.randn(2, 3, 1, 20, 2, 8)
    kv = torch.cat((k, v)).transpose(2, 3).contiguous()  # [2 * layers, 1, heads, S, E]
    features = torch.randn(1, 8, 5)
    paths = torch.tensor([[0, 2, -1, -1], [0, 1, 4, 7]])
    kept = eagle_steps.commit(kv, features, paths, 1, 3, 9)
    one = torch.tensor([9], dtype=torch.int32)
    eagle2_kernels.compact_kv(k, v, paths[1:].int(), torch.full_like(one, 3), one)
    assert torch.equal(kv.transpose(2, 3), torch.cat((k, v)))
    assert torch.equal(kept, features[:, paths[1]])


def test_every_operator_is_timed(tmp_path, capsys):
    tree_ops.main(**TINY, batch=[1, 2], dtype=["float32"], json_file=tmp_path / "rows.json")
    found = json.loads((tmp_path / "rows.json").read_text())
    assert {row["op"] for row in found["rows"]} == {*tree_ops.OPERATORS}
    assert {*tree_ops.OPERATORS} == {*eagle2_kernels.ops.OPERATORS, "operators", "cycle"}
    for row in found["rows"]:
        assert row["median_us"] > 0
        assert row["baseline_us"] > 0
        assert row["threads"] == 1
    assert {"commit", "torch", "cpu"} <= set(found["context"])
    forms = {row["form"] for row in found["rows"]}
    assert forms == {name for name in tree_ops.USUAL["cpu"] if tree_ops.FORMS[name]}
    assert "cycle" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    wrong = SimpleNamespace(
        select_leaves=lambda scores, k: eagle2_kernels.select_leaves(scores, k).roll(1, 1),
        verify=eagle2_kernels.verify,
    )
    monkeypatch.setitem(tree_ops.FORMS, "public", wrong)
    with pytest.raises(SystemExit, match="select_leaves, public"):
        tree_ops.main(
            op=["select_leaves", "verify"], form=["public"], **TINY, json_file=tmp_path / "rows"
        )
    found = json.loads((tmp_path / "rows").read_text())
    assert {row["op"] for row in found["rows"]} == {"verify"}


def test_a_tree_unlike_eagles_is_not_timed(monkeypatch):
    lay_out = eagle_steps.lay_out

    def unlike(*arguments):
        found = lay_out(*arguments)
        return found._replace(tokens=found.tokens.roll(1, 1))

    monkeypatch.setattr(eagle_steps, "lay_out", unlike)
    with pytest.raises(SystemExit, match="nodes of eagle_steps"):
        tree_ops.main(op=["cycle"], form=["public"], **TINY)


def test_a_case_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setitem(
        tree_ops.FORMS, "public", SimpleNamespace(rerank=fail, verify=eagle2_kernels.verify)
    )
    with pytest.raises(SystemExit, match="rerank: out of memory"):
        tree_ops.main(op=["rerank", "verify"], form=["public"], **TINY, json_file=tmp_path / "rows")
    found = json.loads((tmp_path / "rows").read_text())
    assert {row["op"] for row in found["rows"]} == {"verify"}
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_a_form_of_tree_attention(tmp_path):
    shape = timing.Shape(batch=3, top_k=9, depth=3, vocab=50)
    counts = torch.tensor([70, 66, 9], dtype=torch.int32)
    tree = reference.rerank(cases.draft(shape), shape.row(7, torch.int64), counts, 70)
    q, cache = torch.randn(3, 70, 6, 16), torch.randn(2, 3, 210, 2, 16)
    prefix_len = torch.tensor([130, 0, 9], dtype=torch.int32)
    rest = (q, *cache, prefix_len, tree.ancestors, tree.num_nodes, 0.25)
    found, wanted = flex.tree_attention(*rest), reference.tree_attention(*rest)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)
    given = {"heads": ["4,2,16"], "prefix": [150], "json_file": tmp_path / "rows"}
    tree_ops.main(op=["tree_attention", "verify"], form=["flex"], **TINY, **given)
    (row,) = json.loads((tmp_path / "rows").read_text())["rows"]
    assert (row["op"], row["form"]) == ("tree_attention", "flex")


@pytest.mark.parametrize("reads", [True, False])
def test_a_call_that_reads_back_is_found_before_it_is_captured(monkeypatch, reads):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def variant(arguments):
        assert arguments == (3,)
        if reads and modes == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timing.reads_back(variant, (3,)) == reads
    assert modes == ["error", "default"]


def test_a_missing_form_is_named(monkeypatch, capsys):
    monkeypatch.setitem(tree_ops.FORMS, "cpu", None)
    monkeypatch.setitem(eagle2_kernels.missing_forms, "cpu", "it was not built")
    tree_ops.main(op=["verify"], form=["cpu", "public"], **TINY)
    assert "cpu: missing, it was not built" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (torch.tensor([1.0]), torch.tensor([1.1])),
        (torch.tensor([1]), torch.tensor([2])),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(1)),
        ((torch.zeros(1), 3), (torch.zeros(1), 4)),
    ],
)
def test_results_that_differ_are_seen(got, wanted):
    with pytest.raises(timing.WrongResult):
        timing.require("it", got, wanted)
    timing.require("it", wanted, wanted)
