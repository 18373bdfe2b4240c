"""`import eagle2_kernels` is quiet, light, and works without Triton and without a GPU."""

import json
import os
import subprocess
import sys

import pytest

USE = """
import json, torch
wide = torch.zeros(1, 1, 9)
tokens, _ = eagle2_kernels.expand(wide, torch.zeros(1, 1), k=3)
print(json.dumps([tokens.flatten().tolist(), sorted(eagle2_kernels.missing_forms)]))
"""


def run(code, **environment):
    """What a fresh process prints last, as JSON."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout.splitlines()[-1])


def test_no_warning_and_no_transformers():
    code = "import torch, sys, warnings\nwarnings.simplefilter('error')\nimport eagle2_kernels\n"
    code += "import json\nprint(json.dumps([m for m in ('transformers', 'eagle2', 'triton')"
    assert run(code + " if m in sys.modules]))") == []


def test_triton_that_does_not_load_is_told_of_at_its_first_use(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('half of it is missing')")
    code = f"import json, sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport eagle2_kernels as ek\n"
    code += "print(json.dumps([hasattr(ek, 'triton'), ek.missing_forms['triton']]))"
    assert run(code) == [False, "Triton does not load: half of it is missing"]


@pytest.mark.parametrize("hidden", [[], ["triton"], ["triton", "eagle2_kernels._C"]])
def test_r51_without_triton_compiler_or_gpu(hidden):
    code = f"import sys\nsys.modules.update(dict.fromkeys({hidden}))\nimport eagle2_kernels\n"
    tokens, missing = run(code + USE, CUDA_VISIBLE_DEVICES="")
    assert tokens == [0, 1, 2]
    assert ("triton" in missing) >= ("triton" in hidden)
    assert ("cpu" in missing) >= ("eagle2_kernels._C" in hidden)
    assert "reference" not in missing
