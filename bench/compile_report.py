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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import eagle2_kernels.triton as form
from eagle2_kernels import Candidates, Tree

TARGETS = {
    **{f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INT32, INT64, FLOAT32 = torch.int32, torch.int64, torch.float32
# operator -> what it launches: (description, call) pairs, from the smallest to the largest shapes
LAUNCHES: dict[str, Callable[[], Iterator[tuple[str, Callable]]]] = {}


class Row(NamedTuple):
    """One compiled kernel."""

    op: str
    shape: str
    kernel: str
    target: str
    registers: int  # per thread (vector registers on AMD)
    spilled: int  # bytes of stack on NVIDIA, registers on AMD
    shared: int  # bytes per block
    size: int  # bytes of binary
    instructions: int


def meta(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def meta_tree(batch: int, nodes: int) -> Tree:
    words = -(-nodes // 64)
    return Tree(
        meta(batch, nodes, dtype=INT64),
        meta(batch, nodes, dtype=INT32),
        meta(batch, nodes, dtype=INT32),
        meta(batch, nodes, words, dtype=INT64),
        meta(batch, nodes),
        meta(batch, dtype=INT32),
    )


def launches(function):
    LAUNCHES[function.__name__] = function
    return function


@launches
def expand():
    # the default, and the longest rows with the most children that a split keeps
    sizes = [(dtype, *size) for dtype in FLOATS for size in ((128256, 10), (262144, 64))]
    sizes += [(torch.bfloat16, *size) for size in ((100, 1), (4001, 20), (32000, 100))]
    for dtype, vocab, k in sizes:
        logits, leaf_scores, ids = meta(2, 10, vocab, dtype=dtype), meta(2, 10), None
        if k != 10:
            ids = meta(vocab, dtype=INT64)
        yield (
            f"{dtype} V={vocab} K={k}",
            lambda x=logits, s=leaf_scores, k=k, i=ids: form.expand(x, s, k, i),
        )
    logits = meta(32000, 10, 2).permute(2, 1, 0)
    yield "strided V=32000 K=10", lambda x=logits: form.expand(x, meta(10, 2).t(), 10)


@launches
def select_leaves():
    for scores in (meta(2, 100), meta(100, 2).t(), meta(2, 4096)):
        yield f"M={scores.shape[1]}", lambda s=scores: form.select_leaves(s, 2)


@launches
def enter_level():
    sizes = meta(2, dtype=INT32)
    for leaves, words in ((1, 1), (10, 1), (64, 5)):
        size = leaves * leaves
        kinds = (INT64, FLOAT32, INT32)
        rows = Candidates(*(meta(2, 6 * size, dtype=kind) for kind in kinds))
        level = [meta(2, leaves, leaves, dtype=kind) for kind in kinds[:2]]
        level += [meta(2, leaves, dtype=INT32), meta(2, leaves, words, dtype=INT64)]
        yield (
            f"L={leaves} K={leaves} W={words}",
            lambda r=rows, x=level, k=leaves: form.enter_level(r, 3, *x, 1, k, sizes),
        )


@launches
def rerank():
    roots, wanted = meta(2, dtype=INT64), meta(2, dtype=INT32)
    sizes = ((10, 1), (256, 60), (510, 60), (1000, 64), (1810, 256), (4096, 100), (8192, 8193))
    for columns, nodes in sizes:
        rows = Candidates(*(meta(2, columns, dtype=kind) for kind in (INT64, FLOAT32, INT32)))
        for drafted in (rows, Candidates(*(x.new_empty(columns, 2).t() for x in rows))):
            yield (
                f"C={columns} N={nodes}",
                lambda d=drafted, n=nodes: form.rerank(d, roots, wanted, n),
            )


@launches
def tree_attention():
    words, sizes = meta(1, 60, 1, dtype=INT64), meta(1, dtype=INT32)
    table = meta(1, 64, dtype=INT32)
    for dtype, (nodes, heads, groups, dim) in itertools.product(
        FLOATS, ((60, 32, 8, 128), (10, 32, 8, 128), (1, 9, 3, 64), (60, 8, 1, 256))
    ):
        q = meta(1, nodes, heads, dim, dtype=dtype)
        cache, blocks = (meta(n, 4096 // n, groups, dim, dtype=dtype) for n in (1, 64))
        rest = (sizes, words[:, :nodes], sizes, 0.1)
        shape = f"{dtype} N={nodes} H,G,E={heads},{groups},{dim}".replace("torch.", "")
        yield shape, lambda q=q, c=cache, r=rest: form.tree_attention(q, c, c, *r)
        yield (
            f"{shape} paged, window",
            lambda q=q, c=blocks, r=rest: form.tree_attention(q, c, c, *r, table, 512),
        )


@launches
def sample():
    def law(batch, nodes):
        kinds = (FLOAT32, INT32, FLOAT32, FLOAT32, INT64)
        return *(meta(batch, dtype=kind) for kind in kinds), meta(batch, nodes, dtype=INT64)

    for dtype in FLOATS:
        logits = meta(2, 60, 128256, dtype=dtype)
        yield f"{dtype} V=128256", lambda x=logits: form.sample(x, *law(2, 60))
    logits = meta(32001, 60, 2).permute(2, 1, 0)
    yield "strided V=32001", lambda x=logits: form.sample(x, *law(2, 60))


@launches
def verify():
    for nodes, depth in ((1, 0), (60, 6), (256, 10), (8193, 10)):
        tree, wanted = meta_tree(2, nodes), meta(2, nodes, dtype=INT64)
        yield f"N={nodes} D={depth}", lambda t=tree, w=wanted, d=depth: form.verify(t, w, d)


@launches
def compact_kv():
    lengths = [meta(2, dtype=INT32), meta(2, dtype=INT32)]
    for dtype, heads, depth in (
        *((dtype, (8, 128), 6) for dtype in (torch.int8, torch.float16, torch.float32)),
        (torch.float64, (8, 128), 60),
        (torch.bfloat16, (3, 72), 6),  # no vectors of 16 bytes
    ):
        cache, path = meta(2, 2, 256, *heads, dtype=dtype), meta(2, depth + 1, dtype=INT32)
        strided = cache.new_empty(*heads, 2, 2, 256).permute(2, 3, 4, 0, 1)
        table = meta(2, 16, dtype=INT32)
        for layout, x, blocks in (
            ("", cache, None),
            ("paged", cache, table),
            ("strided", strided, None),
            ("strided, paged", strided, table),
        ):
            yield (
                f"{dtype} G={heads[0]} E={heads[1]} D={depth} {layout}",
                lambda x=x, p=path, b=blocks: form.compact_kv(x, x, p, *lengths, b),
            )


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
        registers, vector, scalar = (
            int(re.search(rf"\.{key}:\s*(\d+)", text)[1])
            for key in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        instructions = len(re.findall(r"^\t[a-z]+_", text, re.MULTILINE))
        size = len(kernel.asm["hsaco"])
        return Row(op, shape, name, target, registers, vector + scalar, shared, size, instructions)
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


def report(ops: list[str] | None = None, targets: list[str] | None = None) -> Iterator[Row]:
    """A row for each different kernel of each operator on each target."""
    for op in ops or LAUNCHES:
        for target in targets or TARGETS:
            seen = set()
            for shape, call in LAUNCHES[op]():
                with compiled_only(target) as kernels:
                    call()
                for name, kernel in kernels:
                    if kernel.hash not in seen:
                        seen.add(kernel.hash)
                        yield measure(op, shape, name, target, kernel)
