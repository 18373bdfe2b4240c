"""Published inputs and outputs of SGLang's tree functions, and the forms of our answer to them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HAS_GPU
from on_gpu import OnGpu

from eagle2_kernels.integrations import sglang, sglang_cpu, sglang_ops

GOLDEN = json.loads((Path(__file__).parent / "sglang.json").read_text())
FORMS = {"cpu": sglang_cpu}
if hasattr(sglang_ops, "sglang_triton_link"):
    triton = SimpleNamespace(
        **vars(sglang_ops.sglang_triton_link), **{
            name: getattr(sglang_ops.sglang_triton_walk, name)
            for name in ("walk_greedy", "walk_sampled")
        }
    )  # fmt: skip
    FORMS["triton"] = OnGpu(triton) if HAS_GPU else triton
MARKS = {"triton": [pytest.mark.gpu] if HAS_GPU else []}


@pytest.fixture(
    name="walks", params=[pytest.param(name, marks=MARKS.get(name, [])) for name in FORMS]
)
def over_each_form(request, monkeypatch):
    """The seams over each form of the three walks."""
    monkeypatch.setattr(sglang, "walks", FORMS[request.param])
    return request.param


def cases(section):
    return pytest.mark.parametrize("case", GOLDEN[section], ids=lambda case: case["name"])


def verify(candidates, index, next_token, next_sibling, target, steps, spelling="retrieve"):
    predicts = torch.full((candidates.numel(),), -1, dtype=torch.int32)
    accept_index = torch.full((len(candidates), steps), -1, dtype=torch.int32)
    accepted = torch.full((len(candidates),), -7, dtype=torch.int32)
    names = ("index", "next_token", "next_sibling")
    links = {f"{spelling}_{n}": x for n, x in zip(names, (index, next_token, next_sibling),
                                                  strict=True)}  # fmt: skip
    got = sglang.verify_tree_greedy_func(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted,
        candidates=candidates, target_predict=target, topk=4, **links,
    )  # fmt: skip
    assert got[0] is predicts
    assert got[1] is accept_index
    assert got[2] is accepted
    return [x.tolist() for x in got]
