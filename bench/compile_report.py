"""Compile every Triton kernel that the launchers can launch, for GPUs that need not be here.

    python bench/tree_ops.py --compile-report

The launchers run on tensors without memory, their launches are recorded and compiled instead of
run: so the list of specialisations is what the package really asks for. TRITON_INTERPRET must be
unset.
"""

import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import triton
from launches import LAUNCHES
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    **{f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


class Row(NamedTuple):
    """One compiled kernel."""

    op: str
    shape: str
    kernel: str
    target: str
    registers: int  # per thread (vector registers on AMD)
    spilled: int  # bytes of memory per thread
    shared: int  # bytes per block
    size: int  # bytes of binary
    instructions: int


class Elsewhere:
    """A driver for a target that is not here: enough of one to compile."""

    def __init__(self, number: int, target: GPUTarget):
        self.number, self.target = number, target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # compiled kernels are kept by device number

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiled_only(target: str) -> Iterator[list]:
    """Within it, a launch compiles for `target` and adds the kernel to the list, nothing more."""
    kernels, run = [], JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    driver.set_active(Elsewhere(list(TARGETS).index(target), TARGETS[target]))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = None


def measure(op: str, shape: str, name: str, target: str, kernel) -> Row:
    """What a compiled kernel needs of the chip."""
    shared = kernel.metadata.shared
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, scratch = (
            int(re.search(rf"\.{key}:\s*(\d+)", text)[1])
            for key in ("vgpr_count", "private_segment_fixed_size")
        )
        instructions = len(re.findall(r"^\t[a-z]+_", text, re.MULTILINE))
        size = len(kernel.asm["hsaco"])
        return Row(op, shape, name, target, registers, scratch, shared, size, instructions)
    cubin = kernel.asm["cubin"]
    usage = cuobjdump(cubin, "--dump-resource-usage")
    registers, stack = (int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    instructions = len(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", cuobjdump(cubin, "-sass"), re.MULTILINE)
    )
    return Row(op, shape, name, target, registers, stack, shared, len(cubin), instructions)


def cuobjdump(cubin: bytes, what: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def report(
    ops: list[str] | None = None, targets: list[str] | None = None, first: int | None = None
) -> Iterator[Row]:
    """A row for each different kernel of the first launches of each operator on each target."""
    for op in ops or LAUNCHES:
        for target in targets or TARGETS:
            seen = set()
            for shape, call in itertools.islice(LAUNCHES[op](), first):
                with compiled_only(target) as kernels:
                    call()
                for name, kernel in kernels:
                    if kernel.hash not in seen:
                        seen.add(kernel.hash)
                        yield measure(op, shape, name, target, kernel)
