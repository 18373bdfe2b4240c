"""A target spread over two processes says what it says in one, on every rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from eagle2.ranks import agree
from rank_worker import pair, texts

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    pair()[0].save_pretrained(folder / "model")
    script = HERE / "rank_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", script, folder / "model", folder]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_each_rank_holds_half_of_the_kv_heads(reports):
    assert [report["kv_heads"] for report in reports] == [1, 1]


def test_the_text_of_one_process(reports):
    wanted = texts(*pair())
    assert wanted["greedy"] == wanted["greedy plain"]
    assert wanted["sampled"] == wanted["sampled plain"]
    assert wanted["greedy cycles"] < 3 * 13
    for report in reports:
        for name in wanted:
            if name != "generate sampled":  # drawn by torch's own generator
                assert report["texts"][name] == wanted[name], name


def test_ranks_agree(reports):
    first, second = reports
    assert first["texts"] == second["texts"]
    # and where one computes something else, the first one's word counts
    assert first["texts of unequal logits"] == second["texts of unequal logits"]
    for name in ("greedy", "sampled", "generate greedy"):
        assert first["texts of unequal logits"][name] == first["texts"][name]


def test_alone_there_is_nothing_to_agree_on():
    fields = torch.rand(3), torch.arange(4, dtype=torch.int32)
    assert all(a is b for a, b in zip(agree(fields, None), fields, strict=True))
