"""Kernels are launched on the GPU that the tensors are on."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from eagle2 import baseline, decode
from eagle2.tune import measure

import eagle2_kernels
from eagle2_kernels import Tree, missing_forms
from eagle2_kernels.device import on_its_device
from eagle2_kernels.ops import OPERATORS

SECOND = SimpleNamespace(device=torch.device("cuda", 1))


@pytest.fixture
def current(monkeypatch):
    """The devices that are current, in a list."""
    devices = []

    @contextlib.contextmanager
    def device(chosen):
        devices.append(chosen)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return devices


@pytest.mark.parametrize("first", [SECOND, (SECOND, None), Tree(SECOND, *[None] * 5)])
def test_the_tensors_gpu_is_current_while_it_runs(current, first):
    run = on_its_device(lambda tensor, more: (tensor, more, [*current]))
    assert run(first, 3) == (first, 3, [SECOND.device])
    assert run(tensor=first, more=4)[2] == [SECOND.device]
    assert not current


@pytest.mark.parametrize("first", [torch.zeros(1), (torch.zeros(1), None), None, "folder"])
def test_nothing_changes_for_what_is_not_on_a_gpu(current, first):
    assert on_its_device(lambda first: (first, [*current]))(first) == (first, [])


def guarded(function) -> bool:
    return function.__code__ is on_its_device(len).__code__


def test_every_launcher_is_guarded_and_all_that_captures_graphs():
    assert all(map(guarded, (decode.decode, baseline.decode, measure)))
    if "triton" in missing_forms:
        pytest.skip(missing_forms["triton"])
    assert all(guarded(getattr(eagle2_kernels.triton, name)) for name in OPERATORS)
