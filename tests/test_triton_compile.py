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
SHARED = {"sm_90": 227, "gfx942": 64, "sm_80": 163, "sm_100": 227, "sm_120": 99}  # kB of a block
TARGETS = [*SHARED]
REGISTERS = 128  # of a thread: four blocks of 128 threads then fit a processor
MORE = {
    "tree_attention_kernel": 256,  # sums 128 rows by 128 channels in registers
    "walk_sampled_kernel": 144,  # one block of a row keeps a processor to itself
}
FIRST = ["--first", "7"]  # of the launches of attention; one of each kind
LAUNCHED = [name for name in ops.OPERATORS if name != "accept"]  # the kernels of the other two
SGLANG = ["sglang_link", "sglang_walk"]


@pytest.mark.parametrize(
    "targets", [TARGETS[:1], pytest.param(TARGETS[1:], marks=pytest.mark.full)], ids="-".join
)
@pytest.mark.parametrize(
    "name", [*LAUNCHED, *(pytest.param(name, marks=pytest.mark.full) for name in SGLANG)]
)
def test_compiles_without_spills(name, targets, tmp_path):
    check(name, targets, tmp_path, FIRST if name == "tree_attention" else [])


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_attention_compiles_without_spills(target, tmp_path):
    check("tree_attention", [target], tmp_path)


def check(name, targets, folder, options=()):
    rows = report([name], targets, folder, options)
    assert {row["target"] for row in rows} == set(targets)
    assert not [row for row in rows if row["spilled"]]
    assert not [row for row in rows if row["registers"] > MORE.get(row["kernel"], REGISTERS)]
    assert not [row for row in rows if row["shared"] > 1024 * SHARED[row["target"]]]


def report(names, targets, folder, options):
    file = folder / "rows.json"
    command = [sys.executable, str(BENCH / "tree_ops.py"), "--compile-report", "--json", str(file)]
    command += [word for name in names for word in ("--op", name)]
    command += [word for target in targets for word in ("--target", target)]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, *options], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return json.loads(file.read_text())["rows"]


def test_the_report_covers_every_operator(tmp_path):
    source = (BENCH / "launches.py").read_text()
    assert all(f"@launches\ndef {name}(" in source for name in (*LAUNCHED, *SGLANG))
    assert report([*LAUNCHED, *SGLANG], TARGETS, tmp_path, ["--first", "0"]) == []
