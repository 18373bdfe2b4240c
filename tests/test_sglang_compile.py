"""The kernels of the SGLang plugin compile for every target, within its registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle2_kernels import missing_forms

SCRIPT = Path(__file__).parents[1] / "bench" / "sglang_kernels.py"


@pytest.mark.full
@pytest.mark.skipif("triton" in missing_forms, reason="Triton is not here")
def test_compiles_without_spills():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, check=True, capture_output=True, text=True
    )
    assert "Warning" not in done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == {"sm_80", "sm_90", "sm_100", "sm_120", "gfx942"}
    assert {row["kernel"] for row in rows} == {
        "link_tree_kernel",
        "walk_greedy_kernel",
        "walk_sampled_kernel",
    }
    assert not [row for row in rows if row["spilled"]]
    # 256 threads of walk_sampled: one block of a row keeps a processor to itself
    most = {"walk_sampled_kernel": 144}
    assert not [row for row in rows if row["registers"] > most.get(row["kernel"], 96)]
