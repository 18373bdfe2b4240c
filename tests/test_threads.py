"""Threads, processes, gradient modes, compilation and seeds: the same results in all of them."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from test_ops import call, make_arguments
from tiny import PROMPTS, make_eagle3_pair, make_pair

import eagle2_kernels
from eagle2_kernels import Candidates, ops

SETTINGS = {"max_new_tokens": 20, "temperature": [0.0, 1.0, 0.8], "seed": [1, 2, 3]}


@pytest.fixture
def threads():
    """Set the number of torch's threads; it is given back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def results(name, batch=2):
    """What an operator returns, or what it writes."""
    arguments = make_arguments(batch)[name]
    found = call(name, arguments)
    return arguments[:2] if found is None else found if isinstance(found, tuple) else (found,)


def test_many_threads_call_the_operators(threads):
    threads(2)
    wanted = {name: results(name, 64) for name in ops.OPERATORS}
    start = threading.Barrier(8)

    def work(number):
        start.wait()
        for name in [*ops.OPERATORS][number:] + [*ops.OPERATORS][:number]:
            for _ in range(3):
                assert all(map(torch.equal, results(name, 64), wanted[name]))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_threads_that_share_a_model_take_turns():
    pair = make_eagle3_pair(context=1.0)
    wanted = generate(*pair, PROMPTS, **SETTINGS).tokens
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(generate, *pair, PROMPTS, **SETTINGS) for _ in range(6)]
        assert [job.result().tokens for job in jobs] == [wanted] * 6


def test_two_engines_in_two_threads():
    pairs = make_pair(context=1.0), make_eagle3_pair(context=1.0)
    wanted = [generate(*pair, PROMPTS, **SETTINGS).tokens for pair in pairs]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(generate, *pair, PROMPTS, **SETTINGS) for pair in pairs * 2]
        assert [job.result().tokens for job in jobs] == wanted * 2
    assert wanted[0] != wanted[1]


FORK = """
import os, torch, eagle2_kernels as ek
torch.set_num_threads(2)
logits = torch.randn(4, 8, 9000)
wanted = ek.expand(logits, torch.zeros(4, 8), 5)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # torch's own rule for a fork after its threads have run
    got = ek.expand(logits, torch.zeros(4, 8), 5)
    os._exit(0 if torch.equal(got[0], wanted[0]) else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(ek.expand(logits, torch.zeros(4, 8), 5)[0], wanted[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_fork_after_use():
    command = [sys.executable, "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ops.OPERATORS)
def test_gradient_modes(name, mode):
    wanted = results(name)
    with mode():
        got = results(name)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("name", ["expand", "tree_attention", "sample"])
def test_inputs_that_ask_for_gradients(name):
    arguments = [*make_arguments()[name]]
    wanted = call(name, arguments)
    arguments[0] = arguments[0].requires_grad_()
    got = call(name, arguments)
    for one, other in zip(*([x] if torch.is_tensor(x) else x for x in (got, wanted)), strict=True):
        assert torch.equal(one.detach(), other)


def test_compiled_with_sizes_that_change():
    """One graph for every batch and vocabulary."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def level(logits, roots):
        tokens, scores = eagle2_kernels.expand(logits, logits.new_zeros(logits.shape[:2]), 4)
        parents = torch.full_like(tokens[:, 0], -1, dtype=torch.int32)
        tree = eagle2_kernels.rerank(Candidates(tokens[:, 0], scores[:, 0], parents), roots, 4)
        return *tree, *eagle2_kernels.verify(tree, tree.tokens.roll(-1, 1), 2)

    torch._dynamo.reset()
    compiled = torch.compile(level, fullgraph=True, dynamic=True, backend=backend)
    for batch, vocab in ((2, 30), (3, 41), (5, 64)):
        inputs = torch.randn(batch, 1, vocab), torch.arange(batch)
        assert all(map(torch.equal, compiled(*inputs), level(*inputs)))
    assert len(graphs) == 1


@pytest.mark.parametrize("name", ops.OPERATORS)
def test_an_error_leaves_nothing_behind(name):
    wanted = results(name)
    arguments = [*make_arguments()[name]]
    arguments[0] = arguments[0][..., None]
    with pytest.raises(ValueError, match="wanted"):
        call(name, arguments)
    assert all(map(torch.equal, results(name), wanted))


@pytest.fixture(scope="module")
def pair():
    return make_pair(context=3.0)


def test_r48_one_text_whatever_the_tree_the_form_and_the_threads(pair, threads):
    """And whatever the company: rows alone, in pairs, in another order."""
    wanted = baseline.generate(pair[0], PROMPTS, **SETTINGS).tokens
    forms = {"C++": eagle2_kernels, "reference": eagle2_kernels.reference}
    for count, (form, operators), tree in (
        (1, ("C++", forms["C++"]), TreeConfig(1, 3, 4)),
        (1, ("C++", forms["C++"]), TreeConfig(8, 5, 59)),
        (2, ("C++", forms["C++"]), TreeConfig.static([[0], [1], [0, 0], [0, 1]])),
        (1, ("reference", forms["reference"]), TreeConfig(4, 3, 10)),
    ):
        threads(count)
        got = generate(*pair, PROMPTS, tree=tree, ops=operators, **SETTINGS).tokens
        assert got == wanted, (count, form, tree)
    for rows in ([0], [1], [2], [2, 0], [1, 1, 0]):
        some = {key: [SETTINGS[key][row] for row in rows] for key in ("temperature", "seed")}
        prompts = [PROMPTS[row] for row in rows]
        got = generate(*pair, prompts, max_new_tokens=20, tree=TreeConfig(4, 3, 10), **some).tokens
        assert got == [wanted[row] for row in rows]
