"""Opt-in: the fastest configuration of a kernel on this GPU, in place of the fixed one.

With EAGLE2_SEARCH=1 every candidate is timed at the first launch of its kind, and the fastest is
kept while the process lives. A launch that a CUDA graph captures takes what is known by then.
Candidates add up in different orders, so their results may differ by rounding.
"""

import logging
import os
from collections.abc import Callable, Hashable, Sequence

import torch
from triton import OutOfResources
from triton.testing import do_bench_cudagraph

Configuration = tuple[int, ...]

SEARCHING = os.environ.get("EAGLE2_SEARCH") == "1"
log = logging.getLogger(__name__)
known: dict[Hashable, Configuration] = {}


def choose(
    kind: Hashable, candidates: Sequence[Configuration], launch: Callable[..., object]
) -> Configuration:
    """One of the candidates: the first, or after a search the fastest.

    Args:
        kind: what else the time depends on.
        candidates: configurations, the fixed one first.
        launch: launches with a configuration, each time with the same results.
    """
    if not SEARCHING:
        return candidates[0]
    if kind not in known and not torch.cuda.is_current_stream_capturing():
        times = {candidate: milliseconds(launch, candidate) for candidate in candidates}
        known[kind] = min(candidates, key=lambda candidate: times[candidate])
        log.info("%s: %s is the fastest of %s (ms)", kind, known[kind], times)
    return known.get(kind, candidates[0])


def milliseconds(launch: Callable[..., object], candidate: Configuration) -> float:
    try:
        return do_bench_cudagraph(lambda: launch(*candidate), rep=10)
    except OutOfResources:  # shared memory or registers that this GPU does not have
        return float("inf")
