"""Every known fault of such systems has a test with its number in the name; some have it here.

The numbers are ranks: the lower, the likelier a fresh implementation has the fault. Here are those
that belong to no one operator.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import HAS_GPU, INTERPRETED, forms_with
from eagle2 import TreeConfig, baseline, decode
from eagle2.cycle import Cycle
from eagle2.requests import Requests, Sampling
from eagle2.target import Target
from eagle2.turns import Turns
from test_ops import make_arguments
from tiny import PROMPTS, make_pair
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
)

import eagle2_kernels
from eagle2_kernels import ops, reference
from eagle2_kernels.layouts import from_parents

ROOT = Path(__file__).parents[1]
FAULTS = {2, 4, 5, 8, 10, 11, 13, 14, 16, *range(18, 54)}


def numbered_tests():
    """(number, name) of every test that has a fault's number in its name."""
    for file in ROOT.glob("tests/test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in re.findall(r"_r(\d\d)(?=_|$)", node.name):
                    yield int(number), f"{file.name}::{node.name}"


def test_every_fault_has_a_test():
    assert {number for number, _ in numbered_tests()} == FAULTS


READ_FLOATS = ("expand", "tree_attention", "sample", "compact_kv")


@pytest.mark.parametrize(("one_form", "name"), forms_with(*READ_FLOATS))
def test_r08_bfloat16_is_computed_in_float32(one_form, name):
    """Triton's interpreter holds bfloat16 as integers: a kernel that forgot a cast shows here."""
    half, whole = (make_arguments(1, torch.bfloat16)[name] for _ in range(2))
    whole = [x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
             for x in whole]  # fmt: skip
    got, wanted = (getattr(one_form, name)(*ops.packed(name, x)) for x in (half, whole))
    if name == "compact_kv":
        got, wanted = half[:2], whole[:2]
    got, wanted = (x if isinstance(x, tuple | list) else (x,) for x in (got, wanted))
    for one, other in zip(got, wanted, strict=True):
        if name == "tree_attention":  # whose weights are rounded to be multiplied
            torch.testing.assert_close(one, other.to(one.dtype), atol=1e-2, rtol=1e-2)
        else:
            assert torch.equal(one, other.to(one.dtype))


# `accept` launches what `sample` and `verify` do
@pytest.mark.parametrize("name", [name for name in ops.OPERATORS if name != "accept"])
@pytest.mark.skipif(HAS_GPU, reason="looks into Triton's interpreter")
def test_r38_no_sum_runs_over_booleans(name, monkeypatch):
    """On a GPU a running sum of one-bit numbers is their exclusive or; here it is not."""
    triton = pytest.importorskip("eagle2_kernels.triton")
    from triton.runtime.interpreter import ReduceScanOpInterface as Scan

    kinds, plain = [], Scan.apply

    def apply(self, values):
        kinds.extend(
            str(x.dtype.scalar) for x in (values if isinstance(values, tuple) else [values])
        )
        return plain(self, values)

    monkeypatch.setattr(Scan, "apply", apply)
    getattr(triton, name)(*ops.packed(name, make_arguments(1)[name]))
    assert kinds or name in ("compact_kv", "verify")
    assert "int1" not in kinds


class Poisoned(Cycle):
    """Cycles before each of which every cache row beyond the committed ones turns to NaN."""

    seen = 0

    def run(self, state, *rest):
        Poisoned.seen += 1
        for cache in (self.cache, self.drafter.cache):
            for row, length in enumerate(state.prefix_len.tolist()):
                cache.k[:, row, length:] = cache.v[:, row, length:] = torch.nan
        return super().run(state, *rest)


@pytest.mark.parametrize("context", [0.0, 3.0, 12.0])
def test_r23_a_cycle_keeps_no_row_but_the_accepted(context):
    """Whether it accepts all, some or none: the rows of the rest are never read again."""
    model, head = make_pair(context)
    wanted = baseline.generate(model, PROMPTS, max_new_tokens=33)
    target, config = Target(model), TreeConfig(3, 3, 14)
    requests = Requests(PROMPTS, 33, [], target.context_limit)
    Poisoned.seen = 0
    got = decode.decode(target, head, requests, Sampling.of(3), config, cycles=Poisoned)
    assert got.tokens == wanted.tokens
    assert Poisoned.seen > 4


def test_r23_no_cache_of_transformers_is_rolled_back():
    """Their roll-back changes between versions: the caches here are our own."""
    gone = r"\.crop\(|\bto_legacy_cache|\bfrom_legacy_cache|\bDynamicCache\b"
    sources = {f: f.read_text() for f in ROOT.glob("python/eagle2/**/*.py")}
    assert [file.name for file, source in sources.items() if re.search(gone, source)] == []
    assert len(sources) > 20


def turns_of(ids, processors, do_sample=False, limit=12):
    config = GenerationConfig(do_sample=do_sample)
    criteria = StoppingCriteriaList([MaxLengthCriteria(limit)])
    return Turns(torch.tensor(ids), None, LogitsProcessorList(processors), criteria, config, None)


def say(turns, tree, logits):
    """The new tokens and the path when rows stand at the roots of a tree."""
    path, accepted, *_ = turns.accept(tree, logits, 4)
    said = [ids[0, turns.width :].tolist() for ids in turns.ids]
    return said, [row[: n + 1] for row, n in zip(path.tolist(), accepted.tolist(), strict=True)]


GRAMMAR = {9: [1, 2], 1: [3], 2: [0], 3: [0], 0: [0]}  # after a token, what may follow; 9 = root


def test_r25_a_grammar_s_mask_follows_the_path():
    tree = from_parents([[-1, 0, 0, 1, 2]], [[9, 1, 2, 3, 3]])
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0]).expand(1, 5, 4)
    grammar = PrefixConstrainedLogitsProcessor(lambda row, ids: GRAMMAR[int(ids[-1])], 1)
    assert say(turns_of([[9]], [grammar]), tree, logits) == ([[2, 0]], [[0, 2]])
    # the end token is all that may follow it
    ended = from_parents([[-1, 0, 1]], [[0, 0, 3]])
    assert say(turns_of([[0]], [grammar]), ended, logits[:, :3]) == ([[0, 0]], [[0, 1]])


def test_r25_what_the_mask_forbids_is_never_sampled():
    """A child that its coin turns down gives way to the other one that is allowed, or to none."""
    grammar = PrefixConstrainedLogitsProcessor(lambda row, ids: GRAMMAR[int(ids[-1])], 1)
    tree, seen = from_parents([[-1, 0]], [[9, 1]]), set()
    torch.manual_seed(0)
    for _ in range(60):
        (said,), _ = say(turns_of([[9]], [grammar], do_sample=True), tree, torch.zeros(1, 2, 4))
        seen.add(tuple(said))
    assert seen == {(1, 3), (2,)}


def test_r26_minimum_length_counts_along_the_path():
    """The root is the first of three new tokens: the end token is masked at depths 0 and 1."""
    end, prompt = 2, [[7]]
    tree = from_parents([[-1, 0, 1, 2]], [[4, 5, 6, 7]])
    logits = torch.zeros(1, 4, 8)
    logits[..., end] = 9
    logits[0, [0, 1, 2], [5, 6, 7]] = 5
    turns = turns_of(prompt, [MinNewTokensLengthLogitsProcessor(1, 3, end)])
    turns.ids[0] = torch.tensor([[7, 4]])  # the root has been said
    assert say(turns, tree, logits) == ([[4, 5, 6, end]], [[0, 1, 2]])


@pytest.mark.parametrize(("first", "second"), [(6, 0), (3, 6)])
def test_r26_a_penalty_is_for_what_is_on_the_path(first, second):
    tree = from_parents([[-1, 0, 0]], [[4, 6, 3]])
    logits = torch.ones(1, 3, 8)
    logits[..., 6] = 1.5
    logits[0, 0, 3] = 1.0 if first == 6 else 3.0
    penalty = RepetitionPenaltyLogitsProcessor(2.0)
    (said,), _ = say(turns_of([[4]], [penalty]), tree, logits)
    assert said == [first, second]


def test_r26_what_is_not_supported_is_refused():
    model, head = make_pair()
    with pytest.raises(TypeError, match="repetition_penalty"):
        decode.generate(model, head, PROMPTS, repetition_penalty=2.0)


@pytest.mark.parametrize("vocab", [1000, 1025])
@pytest.mark.parametrize(("one_form", "name"), forms_with("sample"))
def test_r53_filters_of_their_own_in_each_row(one_form, name, vocab):
    check_mixed_filters(getattr(one_form, name), vocab)


@pytest.mark.parametrize("vocab", [32_000, 201_088])
@pytest.mark.parametrize(("one_form", "name"), forms_with("sample", but=INTERPRETED))
def test_r53_filters_of_their_own_over_long_rows(one_form, name, vocab):
    check_mixed_filters(getattr(one_form, name), vocab)


def check_mixed_filters(sample, vocab):
    """In one call, each row as it is alone."""
    logits = torch.randn(3, 1, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    rows = (torch.ones(3), torch.tensor([1, vocab, 50], dtype=torch.int32), torch.ones(3) * 0.9)
    law = (logits, *rows, torch.zeros(3), torch.arange(3), torch.full((3, 1), 5))
    together = sample(*law)
    alone = [reference.sample(*(x[row : row + 1] for x in law)) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert together[0] == logits[0, 0].argmax()


RACE = """
import sys
sys.path[:0] = [sys.argv[1]]
from compile_report import LAUNCHES, compiled_only
for name in ("verify", "select_leaves"):
    for _, call in LAUNCHES[name]():
        with compiled_only("sm_90") as kernels:
            call()
        print(sorted(kernel.hash for _, kernel in kernels))
"""


@pytest.mark.full
def test_r52_processes_that_share_an_empty_kernel_cache(tmp_path):
    pytest.importorskip("eagle2_kernels.triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RACE, str(ROOT / "bench")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen(command, env=env, **pipes) for _ in range(8)]
    said = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0] * 8, said
    assert len({out for out, _ in said}) == 1
    assert said[0][0].count("[") > 4
    assert [*tmp_path.iterdir()]


@pytest.mark.gpu
def test_r34_operators_are_captured_and_replayed():
    """One graph of expand, leaves, rerank, verify and compaction; replayed with other data."""
    generator = torch.Generator().manual_seed(0)
    logits, cache = torch.zeros(2, 1, 97).cuda(), torch.zeros(2, 2, 32, 2, 8).cuda()
    zeros, roots = torch.zeros(2, 1).cuda(), torch.arange(2).cuda()
    prefix = torch.tensor([3, 7], dtype=torch.int32).cuda()

    def cycle():
        tokens, scores = eagle2_kernels.expand(logits, zeros, 8)
        eagle2_kernels.select_leaves(scores[:, 0], 4)
        parents = torch.full((2, 8), -1, dtype=torch.int32, device="cuda")
        level = eagle2_kernels.Candidates(tokens[:, 0], scores[:, 0], parents)
        tree = eagle2_kernels.rerank(level, roots, 6)
        path, accepted, bonus = eagle2_kernels.verify(tree, tree.tokens.roll(-1, 1), 2)
        eagle2_kernels.compact_kv(cache, cache.clone(), path, accepted, prefix)
        return *tree, path, accepted, bonus

    for _ in range(2):
        cycle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cycle()
    for _ in range(3):
        logits.copy_(torch.randn(logits.shape, generator=generator))
        start = torch.randn(cache.shape, generator=generator)
        cache.copy_(start)
        wanted = cycle()
        after = cache.clone()
        cache.copy_(start)
        graph.replay()
        assert all(map(torch.equal, captured, wanted))
        assert torch.equal(cache, after)
