"""How the tests bring a GPU's form their tensors: strides, shared storages and writes survive."""

from types import SimpleNamespace

import pytest
import torch
from on_gpu import OnGpu

from eagle2_kernels import Candidates


@pytest.fixture
def nearby(monkeypatch):
    """Copies stay on the CPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **kw: real(*size, **kw))


def test_strides_and_views_of_one_storage(nearby):
    base = torch.arange(12).view(3, 4)

    def operator(a, b, pair):
        assert [x.stride() for x in (a, b)] == [(1, 4), (2,)]
        assert a.data_ptr() != base.data_ptr()
        a[1, 0] = 50  # base[0, 1]
        return pair._replace(tokens=b + 1), a.sum()

    form = OnGpu(SimpleNamespace(operator=operator))
    pair = Candidates(base, None, None)
    found, total = form.operator(base.T, base[1, ::2], pair)
    assert isinstance(found, Candidates)
    assert found.tokens.tolist() == [5, 7]
    assert int(total) == 66 - 1 + 50
    assert base[0].tolist() == [0, 50, 2, 3]
