"""EAGLE-2 draft trees: path scores, leaves, rerank, tree attention, verification, KV compaction."""

from . import ops, reference
from .ops import (
    accept,
    compact_kv,
    enter_level,
    expand,
    rerank,
    sample,
    select_leaves,
    tree_attention,
    verify,
)
from .tree import Candidates, Tree

# form -> why it is not here; a form that is missing is replaced by the reference
missing_forms: dict[str, str] = {}

try:
    from . import cpu
except ImportError as error:
    missing_forms["cpu"] = f"the C++ extension was not built or does not load: {error}"
else:
    ops.dispatch(cpu, "CPU")

try:
    from . import triton
except ImportError as error:
    missing_forms["triton"] = f"Triton is not here or does not load: {error}"
else:
    ops.dispatch(triton, "CUDA")

try:
    # not dispatched: for each of its operators a GPU run has to show first that it beats Triton
    from . import cuda as cuda
except ImportError as error:
    missing_forms["cuda"] = f"the CUDA extension is missing or cannot run here: {error}"

__all__ = [
    "Candidates",
    "Tree",
    "accept",
    "compact_kv",
    "enter_level",
    "expand",
    "missing_forms",
    "ops",
    "reference",
    "rerank",
    "sample",
    "select_leaves",
    "tree_attention",
    "verify",
]
