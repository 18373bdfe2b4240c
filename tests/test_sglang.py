"""SGLang's choices while drafting and its trees; SGLang itself is not needed."""

import time

import numpy as np
import pytest
import torch
from sglang_cases import GOLDEN, cases, over_each_form, verify  # noqa: F401

from eagle2_kernels import layouts
from eagle2_kernels.integrations import sglang


def tensors(lists, dtype):
    return [torch.tensor(values, dtype=dtype) for values in lists]


def build(inputs, selected, parent_list, mode, **options):
    batch, nodes = len(selected), inputs["num_verify_tokens"]
    seq_lens = torch.tensor(inputs["seq_lens"])
    return sglang.build_tree_kernel_efficient(
        torch.tensor(inputs.get("bonus_tokens", [0] * batch), dtype=torch.int32),
        torch.as_tensor(parent_list),
        torch.as_tensor(selected),
        torch.as_tensor(options.pop("draft_tokens", [[0] * (nodes - 1)] * batch)),
        seq_lens,
        int(seq_lens.sum()),
        inputs["topk"],
        inputs["spec_steps"],
        nodes,
        mode,
        **options,
    )


def check_build(got, expect, mode):
    name = ("full_mask", "qlen_only", "bitpacking")[mode]
    mask, positions, index, next_token, next_sibling, tokens = got
    if name in expect:
        assert mask.numpy().astype(int).tolist() == expect[name]
    assert positions.tolist() == expect["positions"]
    if "retrive_index" in expect:
        assert index.tolist() == expect["retrive_index"]
    assert next_token.tolist() == expect["retrive_next_token"]
    assert next_sibling.tolist() == expect["retrive_next_sibling"]
    if "draft_tokens" in expect:
        assert tokens.tolist() == expect["draft_tokens"]
    assert {x.dtype for x in got[1:]} == {torch.int64}


@pytest.mark.parametrize("mode", [0, 1, 2])
@cases("build_tree")
def test_build_tree(walks, case, mode):
    inputs = case["inputs"]
    if "score_list" in inputs:
        parent_list, selected, drafted = sglang.organize_draft_results(
            tensors(inputs["score_list"], torch.float32),
            tensors(inputs["token_list"], torch.int64),
            tensors(inputs["parents_list"], torch.int64),
            inputs["num_verify_tokens"],
        )
        for got, name in ((parent_list, "parent_list"), (selected, "top_scores_index"),
                          (drafted, "draft_tokens")):  # fmt: skip
            assert got.dtype == torch.int64
            assert got.tolist() == case["organize"][name]
    else:
        selected, parent_list = inputs["selected_index"], inputs["parent_list"]
        drafted = np.zeros_like(selected)
    check_build(
        build(inputs, selected, parent_list, mode, draft_tokens=drafted), case["expect"], mode
    )


@cases("build_tree_malformed")
def test_malformed_lists_end_within_a_second(walks, case):
    """R44: orphans get no links, the climb is bounded, neighbours are not touched."""
    inputs, expect = case["inputs"], case["expect"]
    selected, parent_list = inputs["selected_index"], inputs["parent_list"]
    start = time.perf_counter()
    for mode in (0, 1, 2):
        got = build(inputs, selected, parent_list, mode)
        check_build(got, expect, mode)
        tables = read_mask(got[0], mode, inputs["seq_lens"], inputs["num_verify_tokens"])
        assert np.array_equal(tables, expect["mask_logical"])
    greedy = verify(got[5].view(2, -1), got[2], got[3], got[4], torch.zeros(2, 4).long(), 4)
    assert max(greedy[2]) <= 3
    assert time.perf_counter() - start < 1 if walks == "cpu" else 20


def test_flat_numbers_out_of_range_are_orphans(walks):
    """A candidate beyond the list, and one whose parent is said to be -1: no links, one step up."""
    inputs = {"num_verify_tokens": 4, "seq_lens": [3, 4], "topk": 2, "spec_steps": 3}
    selected = [[0, 2, 10**9], [0, 1, 10]]
    got = build(inputs, selected, [[-1, -1, 0], [-1, 0, 1]], 1)
    assert got[1].tolist() == [3, 4, 4, 4, 4, 5, 5, 5]
    assert got[3].tolist() == [[1, -1, -1, -1]] * 2
    assert got[4].tolist() == [[-1] * 4, [-1, 2, -1, -1]]
    seen = np.eye(4, dtype=int)
    seen[:, 0] = 1
    assert (read_mask(got[0], 1, inputs["seq_lens"], 4) == seen).all()


def read_mask(mask, mode, seq_lens, nodes):
    """The cells of the tree, [bs, n, n]; those of the prefix have to be set."""
    if mode == 2:
        raw = mask.numpy().view(np.uint8).reshape(len(seq_lens) * nodes, -1)
        bits = np.unpackbits(raw, axis=1, bitorder="little")
        assert not bits[:, nodes:].any()
        return bits[:, :nodes].reshape(-1, nodes, nodes)
    tables, start = [], 0
    for length in seq_lens:
        length = length if mode == 0 else 0
        table = mask[start : start + nodes * (length + nodes)].view(nodes, -1)
        assert table[:, :length].all()
        tables.append(table[:, length:].numpy())
        start += table.numel()
    return np.stack(tables)


@pytest.mark.parametrize("nodes", [2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_build_is_the_exporter_on_random_trees(nodes, mode):
    """Draft, organize and build, against `to_sglang` of the same parents."""
    if mode == 2 and nodes > 32:
        with pytest.raises(ValueError, match=f"got {nodes}"):
            build_random(nodes, mode)
    else:
        check_random_tree(nodes, mode)


@pytest.mark.parametrize(("nodes", "mode"), [(9, 2), (31, 0), (32, 2), (33, 1), (65, 0)])
def test_every_form_builds_the_same(walks, nodes, mode):
    check_random_tree(nodes, mode, topk=7, steps=3)


def check_random_tree(nodes, mode, **drafting):
    got, parents, seq_lens = build_random(nodes, mode, **drafting)
    tokens = got[5].view(3, -1).tolist()
    tree = layouts.from_parents(parents, tokens)
    for a, b in zip(got, layouts.to_sglang(tree, seq_lens, mode, int(seq_lens.sum())), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a.numpy(), b.numpy())


def build_random(nodes, mode, topk=5, steps=6):
    generator = torch.Generator().manual_seed(nodes)
    lists = draft(random_steps(generator, topk, steps, 3), topk)
    parent_list, selected, drafted = sglang.organize_draft_results(*lists, nodes)
    inputs = {"num_verify_tokens": nodes, "seq_lens": [4, 0, 90], "topk": topk, "spec_steps": steps}
    got = build(inputs, selected, parent_list, mode, draft_tokens=drafted)
    parents = [
        [-1, *(0 if f < topk else 1 + row.index(above[f // topk]) for f in row)]
        for row, above in zip(selected.tolist(), parent_list.tolist(), strict=True)
    ]
    return got, parents, torch.tensor(inputs["seq_lens"])


def random_steps(generator, topk, steps, batch, vocab=50):
    """topk_p and topk_index of each draft step."""
    for step in range(steps):
        rows = batch * topk if step else batch
        p = (4 * torch.randn(rows, vocab, generator=generator)).softmax(-1)
        yield p.topk(topk)


def draft(steps, topk):
    scores = hidden = None
    lists = [], [], []
    for i, (p, index) in enumerate(steps):
        hidden = torch.arange(float(len(p)))[:, None] if i == 0 else hidden
        ids, hidden, scores, info = sglang.select_top_k_tokens(i, p, index, hidden, scores, topk)
        assert ids.shape == (len(scores) * topk,)
        for values, entry in zip(lists, info, strict=True):
            values.append(entry)
    return lists


def test_select_top_k_tokens():
    """Shapes, dtypes and values against the definition, in probability space."""
    generator, topk, batch = torch.Generator().manual_seed(3), 3, 2
    scores, cumulative = None, None
    for i, (p, index) in enumerate(random_steps(generator, topk, 4, batch)):
        # the draft network gives new states at every step
        hidden = before = torch.randn(len(p), 4, generator=generator)
        got = sglang.select_top_k_tokens(i, p, index, hidden, scores, topk)
        ids, hidden, scores, (info_scores, info_tokens, info_parents) = got
        assert (ids.dtype, info_tokens.dtype, info_parents.dtype) == (torch.int64,) * 3
        assert scores.dtype == info_scores.dtype == torch.float32
        assert scores.shape == (batch, topk)
        assert hidden.shape == (batch * topk, 4)
        if i == 0:
            assert info_scores.shape == (batch, 1, topk)
            assert info_parents.tolist() == [[-1, 0, 1, 2]] * batch
            assert ids.tolist() == index.flatten().tolist()
            assert torch.equal(hidden, before.repeat_interleave(topk, 0))
            cumulative = p
        else:
            assert info_scores.shape == (batch, topk, topk)
            grown = cumulative[..., None] * p.view(batch, topk, topk)
            best = grown.flatten(1).topk(topk)
            cumulative = best.values
            assert torch.equal(info_parents, best.indices + topk + (i - 1) * topk * topk)
            assert torch.equal(ids.view(batch, -1), index.view(batch, -1).gather(1, best.indices))
            rows = torch.arange(batch)[:, None] * topk + best.indices // topk
            assert torch.equal(hidden, before[rows.flatten()])
        torch.testing.assert_close(scores.exp(), cumulative)
        assert info_tokens.tolist() == index.view(batch, -1).tolist()
    assert sglang.select_top_k_tokens(0, p, index, None, None, topk)[1] is None


def test_scores_are_logarithms_of_what_can_be_a_probability():
    p = torch.tensor([[1.5, 1.0, 0.5, 0.0, torch.nan, torch.inf]])
    wanted = [0.0, 0.0, torch.tensor(0.5).log(), -torch.inf, -torch.inf, 0.0]
    for dtype in (torch.float32, torch.bfloat16):
        _, _, scores, (info, *_) = sglang.select_top_k_tokens(
            0, p.to(dtype), torch.zeros(1, 6).long(), None, None, 6
        )
        assert scores.tolist() == info[0].tolist() == [wanted]


def number(value):
    return float(value) if value == "nan" else value


@cases("missing_parents")
def test_no_parent_is_missing(walks, case):
    inputs, topk = case["inputs"], case["inputs"]["topk"]
    dtype = getattr(torch, inputs["dtype"])
    steps = []
    for step in inputs["step_probs"]:
        p = torch.tensor([[number(x) for x in row] for row in step]).to(dtype)
        # in this order: NaN counts as no probability, and the lowest index wins a tie
        p, index = torch.nan_to_num(p, nan=-1.0).sort(descending=True, stable=True)
        p = torch.where(p < 0, torch.nan, p)
        steps.append((p[:, :topk], index[:, :topk]))
    lists = draft(steps, topk)
    nodes = inputs["num_verify_tokens"]
    parent_list, selected, drafted = sglang.organize_draft_results(*lists, nodes)
    chosen, above = selected[0].tolist(), parent_list[0].tolist()
    assert chosen == sorted(set(chosen))
    assert len(chosen) == nodes - 1
    assert all(f < topk or above[f // topk] in chosen for f in chosen)
    got = build({**inputs, "seq_lens": [6]}, selected, parent_list, 1, draft_tokens=drafted)
    linked = [x for links in got[3:5] for x in links.flatten().tolist() if x >= 0]
    assert sorted(linked) == list(range(1, nodes))  # every node is reached, once


@pytest.mark.parametrize("broken", [[0, 2, 2], [7, 1, 1], [-5, 3, 2], [1, 2, 3]])
def test_organize_survives_malformed_parents(walks, broken):
    """R44: still n - 1 different candidates, and what is built ends."""
    scores = [torch.rand(1, 1, 2), torch.rand(1, 2, 2), torch.rand(1, 2, 2)]
    tokens = [torch.arange(2)[None], torch.arange(4)[None], torch.arange(4)[None]]
    parents = [torch.tensor([broken]), torch.tensor([[9, -3]]), torch.tensor([[0, 0]])]
    parent_list, selected, _ = sglang.organize_draft_results(scores, tokens, parents, 8)
    assert len({*selected[0].tolist()}) == 7
    inputs = {"num_verify_tokens": 8, "seq_lens": [3], "topk": 2, "spec_steps": 3}
    got = build(inputs, selected, parent_list, 1)
    assert (got[1] <= 6).all()
    with pytest.raises(ValueError, match="num_draft_token"):
        sglang.organize_draft_results(scores, tokens, parents, 12)


def test_a_candidate_with_a_stray_parent_comes_last():
    scores = [torch.tensor([[[-2.0, -3.0]]]), torch.tensor([[[-0.1, -0.2], [-4.0, -5.0]]])]
    tokens = [torch.arange(2)[None], torch.arange(4)[None]]
    parents = [torch.tensor([[-1, 7, 1]]), torch.tensor([[0, 0]])]  # 2 and 3 below 7
    for nodes, chosen in ((5, [0, 1, 4, 5]), (6, [0, 1, 2, 4, 5])):
        got = sglang.organize_draft_results(scores, tokens, parents, nodes)
        assert got[1].tolist() == [chosen]


def test_one_step_has_no_parent_list():
    lists = draft([torch.rand(2, 9).topk(4)], 4)
    parent_list, selected, _ = sglang.organize_draft_results(*lists, 4)
    assert parent_list.shape == (2, 0)
    assert parent_list.dtype == torch.int64
    assert selected.tolist() == [[0, 1, 2]] * 2
    inputs = {"num_verify_tokens": 4, "seq_lens": [1, 2], "topk": 4, "spec_steps": 1}
    got = build(inputs, selected, parent_list, 1)
    assert got[1].tolist() == [1, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_mask_buffers_are_filled_in_place(walks, mode):
    case = GOLDEN["build_tree"][1]
    inputs = case["inputs"]
    wanted = build(inputs, inputs["selected_index"], inputs["parent_list"], mode)[0]
    dtype = torch.uint8 if mode == 2 else torch.bool
    larger = torch.full((wanted.numel() + 50,), 1 if mode == 2 else True, dtype=dtype)
    options = {"tree_mask_buf": larger.clone()}
    got = build(inputs, inputs["selected_index"], inputs["parent_list"], mode, **options)[0]
    assert got.data_ptr() == options["tree_mask_buf"].data_ptr()
    assert torch.equal(got[: wanted.numel()], wanted)
    assert torch.equal(got[wanted.numel() :], larger[wanted.numel() :])
    if mode == 0:
        blank = torch.zeros(wanted.numel(), dtype=torch.bool)
        got = build(
            inputs, inputs["selected_index"], inputs["parent_list"], mode,
            tree_mask_buf=blank, fill_prefix_mask=False,
        )[0].view(4, -1)  # fmt: skip
        assert not got[:, :5].any()
        assert torch.equal(got[:, 5:], wanted.view(4, -1)[:, 5:])


def test_views_with_gaps(walks):
    """Slices of larger buffers, in both dimensions."""
    case = GOLDEN["build_tree"][2]
    inputs = case["inputs"]
    apart = [
        torch.stack((x, x + 1), -1)[..., 0]
        for x in map(torch.tensor, (inputs["selected_index"], inputs["parent_list"]))
    ]
    assert not apart[0].is_contiguous()
    check_build(build(inputs, *apart, 1), case["expect"], 1)


@cases("reconstruct_indices_from_tree_mask")
def test_links_of_a_mask(case):
    """What SGLang reconstructs from a mask is what the exporter says of the tree behind it."""
    inputs, expect = case["inputs"], case["expect"]
    nodes = inputs["draft_token_num"]
    seen = np.array(inputs["tree_mask"]).reshape(nodes, nodes)
    parents = [max(np.flatnonzero(line[:node]).tolist(), default=-1) for node, line in
               enumerate(seen)]  # fmt: skip
    tree = layouts.from_parents([parents], [[0] * nodes])
    got = layouts.to_sglang(tree, torch.tensor(inputs["verified_seq_len"]), 1)
    check_build(got, expect, 1)
