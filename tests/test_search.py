"""The opt-in search for the fastest configuration of a kernel."""

import importlib

import pytest
import torch
from conftest import FORMS, MARKS
from test_tree_attention import check, make_case

from eagle2_kernels import missing_forms, reference

if "triton" in missing_forms:
    pytest.skip(missing_forms["triton"], allow_module_level=True)

search = importlib.import_module("eagle2_kernels.triton.search")
LAUNCHERS = {
    name: importlib.import_module(f"eagle2_kernels.triton.{name}")
    for name in ("expand", "tree_attention")
}
CANDIDATES = [(64, 4), (128, 4), (128, 8)]
TRIALS = pytest.mark.parametrize("number", range(4))
form = FORMS["triton"]
pytestmark = MARKS.get("triton", [])


@pytest.fixture
def timed(monkeypatch):
    """A search whose clock says what a launch returns; what was timed, in a list."""
    launched = []

    def milliseconds(run, rep):
        launched.append(run())
        return launched[-1]

    monkeypatch.setattr(search, "SEARCHING", True)
    monkeypatch.setattr(search, "known", {})
    monkeypatch.setattr(search, "do_bench_cudagraph", milliseconds)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return launched


def test_the_usual_configuration_is_taken_unless_asked(timed, monkeypatch):
    monkeypatch.setattr(search, "SEARCHING", False)
    assert search.choose("kind", CANDIDATES, lambda *_: pytest.fail("launched")) == (64, 4)


def test_the_fastest_is_found_once_for_each_kind(timed):
    times = {(64, 4): 3.0, (128, 4): 1.0, (128, 8): 2.0}
    for _ in range(2):
        assert search.choose("kind", CANDIDATES, lambda *c: times[c]) == (128, 4)
    assert timed == [3.0, 1.0, 2.0]
    assert search.choose("other kind", CANDIDATES, lambda *c: -times[c]) == (64, 4)


def test_what_does_not_fit_the_gpu_is_passed_over(timed):
    def launch(block, warps):
        if block > 64:
            raise search.OutOfResources(300_000, 232_448, "shared memory")
        return 5.0

    assert search.choose("kind", CANDIDATES[::-1], launch) == (64, 4)


def test_nothing_is_timed_while_a_graph_is_captured(timed, monkeypatch):
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert search.choose("kind", CANDIDATES, lambda *_: pytest.fail("launched")) == (64, 4)
        search.known["kind"] = (128, 8)
        assert search.choose("kind", CANDIDATES, lambda *_: pytest.fail("launched")) == (128, 8)


def take(monkeypatch, name, number):
    """Let the launcher take its candidate of this number, or the last."""

    def nth(kind, candidates, launch):
        hash(kind)
        return candidates[min(number, len(candidates) - 1)]

    monkeypatch.setattr(LAUNCHERS[name], "choose", nth)


@TRIALS
@pytest.mark.parametrize(("vocab", "k"), [(5000, 3), (9000, 64)])
def test_every_configuration_expands_as_the_reference(monkeypatch, number, vocab, k):
    take(monkeypatch, "expand", number)
    logits = torch.randn(1, 2, vocab, generator=torch.Generator().manual_seed(vocab))
    got, wanted = (f.expand(logits, torch.zeros(1, 2), k) for f in (form, reference))
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(got[1], wanted[1], atol=1e-5, rtol=1e-5)


@TRIALS
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 16), (torch.bfloat16, 64)])
def test_every_configuration_attends_as_the_reference(monkeypatch, number, dtype, dim):
    take(monkeypatch, "tree_attention", number)
    check(form, make_case(nodes=20, prefix=(300,), heads=2, groups=1, dim=dim, dtype=dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_search_on_the_gpu(monkeypatch, name):
    monkeypatch.setattr(search, "SEARCHING", True)
    monkeypatch.setattr(search, "known", {})
    logits = torch.randn(1, 10, 32000).bfloat16()
    if name == "expand":
        got, wanted = (f.expand(logits, torch.zeros(1, 10), 10) for f in (form, reference))
        assert torch.equal(got[0], wanted[0])
    else:
        check(form, make_case(nodes=60, prefix=(900,), dim=128, dtype=torch.bfloat16))
    ((kind, chosen),) = search.known.items()
    assert kind[0] == name
    assert len(chosen) > 1
