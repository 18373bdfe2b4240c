"""Check first, then time: variants take turns on rotating inputs, medians are reported."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_S = 2e-3  # a variant runs this long, or once, before the next one takes its turn
SIGMA = 6.0  # of random logits
# inputs of one case, all sets together: more than a cache holds; most sets
ROTATED = {"cpu": (64 << 20, 32), "cuda": (256 << 20, 128)}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class WrongResult(Exception):
    """A form does not give what the reference gives: there is no time to report."""


class Shape(NamedTuple):
    """What one case is about; every operator looks at what concerns it."""

    device: str = "cpu"
    top_k: int = 10
    batch: int = 1
    vocab: int = 32000
    dtype: str = "float32"
    depth: int = 6
    nodes: int = 60
    heads: tuple[int, int, int] = (32, 8, 128)  # H, G, E
    prefix: int = 2048
    law: str = "greedy"  # or "sampled": T=1, or "filtered": T=1 with top-k 50 and top-p 0.9
    early_stop: bool = False
    warm: bool = False  # one set of inputs, which stays in the cache as logits just computed do
    threads: int = 1

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).mul_(SIGMA).to(getattr(torch, self.dtype))

    def row(self, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((self.batch,), value, dtype=dtype, device=self.device)


class Case(NamedTuple):
    """One operator at one shape. A set is the tuple of arguments of one call."""

    sets: list[tuple]
    run: Callable  # (form, *set) -> results
    baseline: str  # what it is
    run_baseline: Callable  # (*set)
    read: Callable | None = None  # (*set), one plain read of the same data
    fresh: Callable = lambda *arguments: arguments  # copies a set that `run` writes to
    goal: float | None = None  # wanted ratio


def set_count(size: int, device: str = "cpu") -> int:
    """How many sets of inputs of `size` bytes to rotate."""
    total, most = ROTATED[device]
    return min(max(total // max(size, 1), 2), most)


def rotate(make, most: int = 128) -> list[tuple]:
    """Sets of inputs, each from a call of `make`."""
    first = make()
    tensors = [x for x in first if isinstance(x, Tensor)]
    size = sum(x.numel() * x.element_size() for x in tensors)
    device = tensors[0].device.type if tensors else "cpu"
    return [first, *(make() for _ in range(min(set_count(size, device), most) - 1))]


def require(what: str, got, wanted) -> None:
    """Raise WrongResult unless the results agree: integers exactly, floats to a tolerance."""
    if isinstance(wanted, tuple | list):
        for number, pair in enumerate(zip(got, wanted, strict=True)):
            require(f"{what}, result {number}", *pair)
    elif isinstance(wanted, Tensor):
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            raise WrongResult(f"{what}: {got.dtype} {[*got.shape]} is not as in the reference")
        gap = TOLERANCE.get(wanted.dtype, 0)
        if not torch.allclose(got, wanted, gap, gap):
            raise WrongResult(f"{what}: differs from the reference")
    elif got != wanted:
        raise WrongResult(f"{what}: got {got}, wanted {wanted}")


class HostClock:
    """Wall-clock time of calls, one after another."""

    wait = staticmethod(lambda: None)

    def block(self, name: str, variant, sets: list, calls: int, start: int) -> float:
        """Seconds per call of `variant` on sets[start], sets[start + 1], ..."""
        started = time.perf_counter()
        for call in range(calls):
            variant(sets[(start + call) % len(sets)])
        return (time.perf_counter() - started) / calls

    def how(self, name: str) -> str:
        return "host"


class ReplayClock(HostClock):
    """Device time of calls captured into a CUDA graph, one on each set, and replayed.

    A variant that reads back to the host cannot be captured; it is launched call by call.
    """

    wait = staticmethod(torch.cuda.synchronize)

    def __init__(self):
        self.graphs: dict[str, torch.cuda.CUDAGraph | None] = {}

    def block(self, name: str, variant, sets: list, calls: int, start: int) -> float:
        if name not in self.graphs:
            self.graphs[name] = capture(variant, sets)
        graph = self.graphs[name]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if graph is None:
            for call in range(calls):
                variant(sets[(start + call) % len(sets)])
        else:
            rounds = max(1, calls // len(sets))
            for _ in range(rounds):
                graph.replay()
            calls = rounds * len(sets)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / calls

    def how(self, name: str) -> str:
        return "replay" if self.graphs.get(name) else "launch"


def capture(variant, sets: list) -> torch.cuda.CUDAGraph | None:
    """A graph of one call on each set; None if the calls cannot be captured."""
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return None  # for a memory checker: then every tensor is an allocation
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        variant(sets[0])  # compiles, allocates workspaces
        if reads_back(variant, sets[0]):
            return None
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph, stream=stream):
            for arguments in sets:
                variant(arguments)
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def reads_back(variant, arguments: tuple) -> bool:
    """Whether a call waits for the GPU. A capture that fails on it would leave torch's random
    generator as if captured, and the next random numbers an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        variant(arguments)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def measure(name: str, case: Case, reference, forms: dict, seconds: float, clock) -> dict:
    """Median microseconds of every form, of "baseline" and of "read", where there is one.

    Args:
        name: of the operator, for messages.
        case: what to run.
        reference: the form that says what is right.
        forms: name -> form.
        seconds: to spend on each variant.
        clock: HostClock or ReplayClock.

    Raises:
        WrongResult: a form's results are not the reference's.
    """
    wanted = None
    for form_name, form in {"reference": reference, **forms}.items():
        arguments = case.fresh(*case.sets[0])
        started = time.perf_counter()
        got = case.run(form, *arguments)
        clock.wait()
        if wanted is None:
            wanted, spent = got, time.perf_counter() - started
        require(f"{name}, {form_name}", got, wanted)
    del got, wanted, arguments
    variants = {n: lambda s, form=form: case.run(form, *s) for n, form in forms.items()}
    variants["baseline"] = lambda s: case.run_baseline(*s)
    if case.read:
        variants["read"] = lambda s: case.read(*s)
    if spent < seconds or "reference" not in forms:
        return interleave(variants, case.sets, seconds, clock)
    del variants["reference"]  # too slow to be run again
    return {"reference": spent * 1e6, **interleave(variants, case.sets, seconds, clock)}


def interleave(variants: dict, sets: list, seconds: float, clock) -> dict:
    """Median microseconds per call of each variant; arguments as in `measure`."""
    samples, plan = {}, {}
    for place, (name, variant) in enumerate(variants.items()):
        clock.block(name, variant, sets, 1, place)
        spent = clock.block(name, variant, sets, 1, place + 1)
        calls = min(max(round(BLOCK_S / spent), 1), 500)
        samples[name] = []
        plan[name] = calls, min(max(int(seconds / (spent * calls)), 5), 100)
    most = max(rounds for _, rounds in plan.values())
    for turn in range(most):
        for place, (name, variant) in enumerate(variants.items()):
            calls, rounds = plan[name]
            if turn * rounds // most != (turn - 1) * rounds // most:
                # variants are spread over the sets, so that none finds what the last one read
                start = turn * calls + place * len(sets) // len(variants)
                samples[name].append(clock.block(name, variant, sets, calls, start))
    return {name: statistics.median(taken) * 1e6 for name, taken in samples.items()}


def context() -> dict:
    """Commit, versions and machine, to be kept with the figures."""
    return {
        "commit": git("rev-parse", "--short", "HEAD") or "unknown",
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "torch_cpu": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
