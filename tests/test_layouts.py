"""Every layout is read back by a decoder written from its engine's description."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from eagle2_kernels import Candidates, Tree, layouts, ops, reference

NODES = [1, 7, 31, 32, 33, 60, 64, 65, 100, 128]
GOLDEN = json.loads((Path(__file__).parent / "sglang.json").read_text())["build_tree"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_parents(num_nodes, seed):
    """Lists of num_nodes, all but one, half and no nodes; chains, stars and what lies between."""
    draw = random.Random(seed)
    counts = [num_nodes, max(num_nodes - 1, 1), -(-num_nodes // 2), 0]
    rows = [[-1, *(draw.randrange(node) for node in range(1, count))][:count] for count in counts]
    rows.append([-1, *range(num_nodes - 1)])
    return [*rows, [-1, *[0] * (num_nodes - 1)]]


def make_tree(num_nodes, seed=0, device="cpu"):
    parents = random_parents(num_nodes, seed)
    tokens = [[100 * row + node for node in range(len(line))] for row, line in enumerate(parents)]
    return layouts.from_parents(parents, tokens, device=device), parents


def make_prefixes(rows, device="cpu", dtype=torch.int32):
    return torch.tensor([0, 1, 7, 20, 64, 3][:rows], dtype=dtype, device=device)


def see(parents):
    """By walking up: who sees whom, [n, n]."""
    seen = np.eye(len(parents), dtype=bool)
    for node in range(len(parents)):
        up = parents[node]
        while up >= 0:
            seen[node, up] = True
            up = parents[up]
    return seen


def parents_of(seen):
    """Back from a mask: the parent is the last of a node's ancestors."""
    return [max(np.flatnonzero(line[:node]), default=-1) for node, line in enumerate(seen)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_nodes", NODES)
def test_bool_and_bias(num_nodes, device):
    tree, parents = make_tree(num_nodes, 1, device)
    prefix = make_prefixes(len(parents), device)
    keys = 64 + num_nodes + 5
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        bias = layouts.to_additive_bias(tree, dtype)
        assert bias.dtype == dtype
        assert torch.equal(bias[:, 0] == 0, layouts.to_bool(tree))
        assert bias[bias != 0].eq(torch.finfo(dtype).min).all()
    wide = layouts.to_bool(tree, prefix, keys).cpu().numpy()
    assert torch.equal(
        layouts.to_additive_bias(tree, torch.float32, prefix, keys).cpu()[:, 0] == 0,
        torch.from_numpy(wide),
    )
    for row, line in enumerate(parents):
        n, p = len(line), int(prefix[row])
        seen = layouts.to_bool(tree)[row].cpu().numpy()
        assert not seen[n:].any()
        assert not seen[:, n:].any()
        assert (seen[:n, :n] == see(line)).all()
        assert parents_of(seen[:n, :n]) == line
        assert wide[row, :n, :p].all()
        assert (wide[row, :n, p : p + n] == see(line)).all()
        assert wide[row].sum() == n * p + see(line).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_nodes", NODES)
def test_flashinfer(num_nodes, device):
    tree, parents = make_tree(num_nodes, 2, device)
    prefix = make_prefixes(len(parents), device)
    counts = np.array([len(line) for line in parents])
    keys = prefix.cpu().numpy() + counts
    sizes = -(-counts * keys // 8)
    mask, indptr = layouts.to_flashinfer(tree, prefix, int(sizes.sum()) + 3)
    assert (mask.dtype, indptr.dtype) == (torch.uint8, torch.int32)
    assert indptr.tolist() == [0, *np.cumsum(sizes)]
    assert mask[-3:].tolist() == [0, 0, 0]
    for row, line in enumerate(parents):
        n, kv = counts[row], keys[row]
        piece = mask[indptr[row] : indptr[row + 1]].cpu().numpy()
        bits = np.unpackbits(piece, bitorder="little")
        assert not bits[n * kv :].any()
        table = bits[: n * kv].reshape(n, kv).astype(bool)
        assert table[:, : kv - n].all()
        assert parents_of(table[:, kv - n :]) == line
        assert (table[:, kv - n :] == see(line)).all()
        dense = np.concatenate((np.ones((n, kv - n), bool), see(line)), 1)
        assert (piece == np.packbits(dense, bitorder="little")).all()


def unpack_words(words, bits):
    """Lines of words, least significant bit first, to booleans."""
    words = words.cpu().numpy()
    kind = np.dtype(f"u{bits // 8}")
    return np.unpackbits(words.view(kind).view(np.uint8), axis=-1, bitorder="little").astype(bool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_nodes", NODES)
def test_trtllm_and_xqa(num_nodes, device):
    tree, parents = make_tree(num_nodes, 3, device)
    width = -(-num_nodes // 32)
    padded, xqa = layouts.to_trtllm(tree), layouts.to_xqa(tree)
    compact, starts = layouts.to_trtllm_compact(tree)
    assert padded.shape == (len(parents), num_nodes, width)
    assert padded.dtype == compact.dtype == starts.dtype == torch.int32
    assert compact.shape == (len(parents) * num_nodes, width)
    assert xqa.shape == (len(parents), num_nodes, (num_nodes + 31) // 32 * 2)
    assert xqa.dtype == torch.uint16
    assert padded.is_contiguous()
    assert xqa.is_contiguous()
    for words, bits in ((padded, 32), (xqa, 16)):
        table = unpack_words(words, bits)
        for row, line in enumerate(parents):
            n = len(line)
            assert parents_of(table[row, :n, :n]) == line
            assert (table[row, :n, :n] == see(line)).all()
            assert table[row].sum() == see(line).sum()
    counts = [len(line) for line in parents]
    assert starts.tolist() == [0, *np.cumsum(counts)]
    table = unpack_words(compact, 32)
    for row, line in enumerate(parents):
        n, first = counts[row], int(starts[row])
        assert parents_of(table[first : first + n, :n]) == line
        assert (table[first : first + n, :n] == see(line)).all()
    assert table.sum() == sum(see(line).sum() for line in parents)


def sglang_parents(next_token, next_sibling):
    parents = [-1] * len(next_token)
    for node, child in enumerate(next_token):
        while child >= 0:
            parents[child] = node
            child = next_sibling[child]
    return parents


def sglang_tables(tree_mask, mode, prefix, nodes):
    """[nodes, nodes] of every row, and what is said of the prefix."""
    tables, prefixes, start = [], [], 0
    if mode == layouts.QLEN_ONLY_BITPACKING:
        size = tree_mask.element_size()
        bits = np.unpackbits(
            tree_mask.cpu().numpy().view(np.uint8).reshape(-1, size), axis=1, bitorder="little"
        )
        assert not bits[:, nodes:].any()
        return [*bits[:, :nodes].astype(bool).reshape(-1, nodes, nodes)], []
    mask = tree_mask.cpu().numpy()
    for p in prefix:
        p = p if mode == layouts.FULL_MASK else 0
        table = mask[start : start + nodes * (p + nodes)].reshape(nodes, p + nodes)
        start += table.size
        tables.append(table[:, p:])
        prefixes.append(table[:, :p])
    assert start == len(mask)
    return tables, prefixes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("num_nodes", [*NODES, 8, 9, 16, 17])
def test_sglang(num_nodes, mode, device):
    tree, parents = make_tree(num_nodes, 4, device)
    prefix = make_prefixes(len(parents), device, torch.int64)
    if mode == layouts.QLEN_ONLY_BITPACKING and num_nodes > 32:
        with pytest.raises(ValueError, match=f"got {num_nodes}"):
            layouts.to_sglang(tree, prefix, mode)
        return
    got = layouts.to_sglang(tree, prefix, mode, int(prefix.sum()))
    tree_mask, positions, index, next_token, next_sibling, draft_tokens = got
    assert {field.dtype for field in got[1:]} == {torch.int64}
    packed = [torch.uint8, torch.uint16, torch.uint32][(num_nodes > 8) + (num_nodes > 16)]
    assert tree_mask.dtype == (packed if mode == 2 else torch.bool)
    assert index.flatten().tolist() == list(range(len(parents) * num_nodes))
    tables, prefixes = sglang_tables(tree_mask, mode, prefix.tolist(), num_nodes)
    assert all(seen.all() for seen in prefixes)
    places = positions.view(-1, num_nodes).tolist()
    for row, line in enumerate(parents):
        n = len(line)
        assert sglang_parents(next_token[row].tolist(), next_sibling[row].tolist())[:n] == line
        siblings = [(a, b) for a, b in enumerate(next_sibling[row].tolist()) if b >= 0]
        assert all(a < b and line[a] == line[b] for a, b in siblings)
        assert len(siblings) + len(set(line[1:])) == max(n - 1, 0)
        assert (next_token[row, n:] == -1).all()
        assert (next_sibling[row, n:] == -1).all()
        padded = np.eye(num_nodes, dtype=bool)
        padded[:n, :n] = see(line)
        assert (tables[row] == padded).all()
        depths = [*see(line).sum(1) - 1, *[0] * (num_nodes - n)]
        assert places[row] == [int(prefix[row]) + depth for depth in depths]
        wanted = [100 * row + node if node < n else 0 for node in range(num_nodes)]
        assert draft_tokens.view(-1, num_nodes)[row].tolist() == wanted


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_sglang_golden(case):
    expect = case["expect"]
    next_token, next_sibling = expect["retrive_next_token"], expect["retrive_next_sibling"]
    parents = [sglang_parents(*links) for links in zip(next_token, next_sibling, strict=True)]
    nodes = len(parents[0])
    tokens = expect.get("draft_tokens", list(range(nodes * len(parents))))
    rows = [tokens[nodes * row : nodes * (row + 1)] for row in range(len(parents))]
    tree = layouts.from_parents(parents, rows)
    prefix = torch.tensor(case["inputs"]["seq_lens"])
    names = ("full_mask", "qlen_only", "bitpacking")
    for mode, name in enumerate(names):
        got = layouts.to_sglang(tree, prefix, mode, int(prefix.sum()))
        if name in expect:
            assert got[0].numpy().tolist() == expect[name]
        assert got[1].tolist() == expect["positions"]
        if "retrive_index" in expect:
            assert got[2].tolist() == expect["retrive_index"]
        assert got[3].tolist() == next_token
        assert got[4].tolist() == next_sibling
        assert got[5].tolist() == tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_nodes", NODES)
def test_safeailab(num_nodes, device):
    tree, parents = make_tree(num_nodes, 5, device)
    mask, position_ids, lines, num_paths = layouts.to_safeailab(tree, num_nodes - 1)
    assert mask.shape == (len(parents), 1, num_nodes, num_nodes)
    assert (mask.dtype, position_ids.dtype, lines.dtype) == (
        torch.float32,
        torch.int64,
        torch.int64,
    )
    for row, line in enumerate(parents):
        n, count = len(line), int(num_paths[row])
        assert (mask[row, 0, :n, :n].cpu().numpy() == see(line)).all()
        assert mask[row].sum() == see(line).sum()
        assert position_ids[row, :n].tolist() == [*see(line).sum(1) - 1]
        paths = [[node for node in path if node >= 0] for path in lines[row].tolist()]
        assert [len(path) > 0 for path in paths] == [True] * count + [False] * (num_nodes - count)
        assert [path[-1] for path in paths[:count]] == sorted({*range(n)} - {*line})
        back = [-1] * n
        for path, padded in zip(paths[:count], lines[row].tolist(), strict=False):
            assert padded == path + [-1] * (num_nodes - len(path))
            for up, node in zip([-1, *path[:-1]], path, strict=True):
                back[node] = up
        assert back == line


def test_safeailab_hand_drawn():
    """Root; 1 and 2 below it; 3 and 4 below 1; 5 below 4."""
    tree = layouts.from_parents([[-1, 0, 0, 1, 1, 4]], [[9, 4, 3, 5, 6, 7]])
    mask, position_ids, lines, num_paths = layouts.to_safeailab(tree, 3)
    assert mask[0, 0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]
    assert position_ids.tolist() == [[0, 1, 1, 2, 2, 3]]
    assert num_paths.tolist() == [3]
    assert lines[0, :3].tolist() == [[0, 2, -1, -1], [0, 1, 3, -1], [0, 1, 4, 5]]


@pytest.mark.parametrize("num_nodes", NODES)
def test_from_parents_is_what_rerank_makes(num_nodes):
    generator = torch.Generator().manual_seed(num_nodes)
    scores = -torch.rand(3, num_nodes, generator=generator).cumsum(1)
    parents = torch.tensor([row[:num_nodes] for row in random_parents(num_nodes + 1, 6)[:1]] * 3)
    drafted = Candidates(torch.randint(99, (3, num_nodes)), scores, parents.int())
    counts = torch.tensor([num_nodes, -(-num_nodes // 2), 1]).int()
    tree = reference.rerank(drafted, torch.tensor([1, 2, 3]), counts, num_nodes)
    cut = [
        [line[:count] for line, count in zip(field.tolist(), counts.tolist(), strict=True)]
        for field in (tree.parents, tree.tokens, tree.scores)
    ]
    for name, made, wanted in zip(Tree._fields, layouts.from_parents(*cut), tree, strict=True):
        assert made.dtype == wanted.dtype, name
        assert torch.equal(made, wanted), name


@pytest.mark.parametrize(
    "parents",
    [
        [-1, 2, 1],
        [-1, 0, 7],
        [0, 0, 0],
        [-1, 2, 0],
        [-1, 1],
        [-1, -1],
        [-1, -2],
        [-1, 0.5],
        [-1, None],
        [-2],
        [-1, 0, 10**30],
    ],
)
def test_r44_malformed_lists_raise(parents):
    good = [-1, 0, 0, 1]
    tokens = [[1, 2, 3, 4], [0] * len(parents)]
    with pytest.raises(ValueError, match="parents: wanted .* of row 1"):
        layouts.from_parents([good, parents], tokens)


def test_from_parents_wants_equal_lengths():
    with pytest.raises(ValueError, match="tokens: wanted"):
        layouts.from_parents([[-1, 0]], [[1]])
    with pytest.raises(ValueError, match="tokens: wanted"):
        layouts.from_parents([[-1, 0]], [[1, 2], [3]])
    with pytest.raises(ValueError, match="scores: wanted"):
        layouts.from_parents([[-1, 0]], [[1, 2]], [[0.0]])


def test_from_parents_verifies():
    tree = layouts.from_parents([[-1, 0, 0, 1, 1, 4], []], [[9, 4, 3, 5, 6, 7], []])
    target = torch.tensor([[4, 6, 0, 9, 7, 8], [0] * 6])
    path, accepted, bonus = ops.verify(tree, target, 3)
    assert path.tolist() == [[0, 1, 4, 5], [-1] * 4]
    assert (accepted.tolist(), bonus.tolist()) == ([3, 0], [8, -1])


def exports(tree, prefix, total, size):
    """Every exporter, called with sizes that the host knows."""
    yield layouts.to_bool(tree)
    yield layouts.to_bool(tree, prefix, 200)
    yield layouts.to_additive_bias(tree, torch.float16, prefix, 200)
    yield from layouts.to_flashinfer(tree, prefix, size)
    yield layouts.to_trtllm(tree)
    yield from layouts.to_trtllm_compact(tree)
    yield layouts.to_xqa(tree)
    for mode in (0, 1, 2)[: 2 + (tree.tokens.shape[1] <= 32)]:
        yield from layouts.to_sglang(tree, prefix, mode, total)
    yield from layouts.to_safeailab(tree, tree.tokens.shape[1] - 1)


@pytest.mark.parametrize("num_nodes", [7, 65])
def test_no_host_reads(num_nodes):
    """Tensors without values: whoever asks for one fails."""
    real, parents = make_tree(num_nodes)
    prefix = make_prefixes(len(parents))
    with FakeTensorMode() as mode:
        tree = Tree(*map(mode.from_tensor, real))
        shapes = [[*x.shape] for x in exports(tree, mode.from_tensor(prefix), 95, 8192)]
    assert shapes == [[*x.shape] for x in exports(real, prefix, 95, 8192)]


@pytest.mark.parametrize("num_nodes", [1, 33])
def test_strides_and_empty_batches(num_nodes):
    tree, parents = make_tree(num_nodes, 8)
    prefix = make_prefixes(len(parents))
    wide = Tree(*(torch.stack((field, field), -1)[..., 0] for field in tree))
    every_other = torch.stack((prefix, prefix), 1)[:, 0]
    plain, strided = exports(tree, prefix, 95, 8192), exports(wide, every_other, 95, 8192)
    for a, b in zip(plain, strided, strict=True):
        assert np.array_equal(a.numpy(), b.numpy())
    empty = Tree(*(field[:0] for field in tree))
    for result in exports(empty, prefix[:0], 0, 0):
        assert result.numel() == 0 or result.tolist() == [0]


@pytest.mark.full
def test_full_mask_offsets_pass_31_bits():
    """2.3 GB: the last row lies behind cell 2^31."""
    tree = layouts.from_parents([[-1, *[0] * 127]] * 2, [[0] * 128] * 2)
    prefix = torch.tensor([2**24 + 2**20, 3])
    mask, *_ = layouts.to_sglang(tree, prefix, layouts.FULL_MASK, int(prefix.sum()))
    assert mask.numel() > 2**31
    table = mask[-128 * 131 :].view(128, 131)
    assert table[:, :4].all()
    assert torch.equal(table[:, 3:], layouts.to_bool(tree)[1])


def test_wrong_arguments_are_named():
    tree, parents = make_tree(7)
    with pytest.raises(ValueError, match="prefix_len"):
        layouts.to_flashinfer(tree, torch.zeros(3), 100)
    with pytest.raises(ValueError, match="mask_mode"):
        layouts.to_sglang(tree, make_prefixes(len(parents)), 3)
    with pytest.raises(ValueError, match="prefix_sum"):
        layouts.to_sglang(tree, make_prefixes(len(parents)), layouts.FULL_MASK)
