"""EAGLE-2 draft trees: path scores, leaves, rerank, tree attention, verification, KV compaction."""

import functools
import importlib
import importlib.util
from types import ModuleType, SimpleNamespace

import torch

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


@functools.cache
def _triton() -> ModuleType:
    """The Triton form, or the reference where it does not load.

    Loaded at its first use: Triton takes several times as long as everything else here.
    """
    try:
        return importlib.import_module(".triton", __name__)
    except ImportError as error:
        missing_forms["triton"] = f"Triton does not load: {error}"
        return reference


def __getattr__(name: str) -> ModuleType:
    if name != "triton" or "triton" in missing_forms or _triton() is reference:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _triton()


if importlib.util.find_spec("triton") is None:
    missing_forms["triton"] = "Triton is not installed"
else:
    at_first_use = {
        name: lambda *args, name=name, **out: getattr(_triton(), name)(*args, **out)
        for name in ops.OPERATORS
    }
    ops.dispatch(SimpleNamespace(**at_first_use), "CUDA")

try:
    # not dispatched: for each of its operators a GPU run has to show first that it beats Triton
    from . import cuda as cuda
except ImportError as error:
    missing_forms["cuda"] = f"the CUDA extension is missing or cannot run here: {error}"


def form_for(device: torch.device) -> ModuleType:
    """The form whose operators run on a device, to be called without dispatcher and checks.

    For loops whose arguments are right by construction. Arguments and results are those of the
    public operators, but for None where a number is wanted; what is wrong is not found.
    """
    if device.type == "cpu" and "cpu" not in missing_forms:
        return cpu
    return _triton() if device.type == "cuda" and "triton" not in missing_forms else reference


__all__ = [
    "Candidates",
    "Tree",
    "accept",
    "compact_kv",
    "enter_level",
    "expand",
    "form_for",
    "missing_forms",
    "ops",
    "reference",
    "rerank",
    "sample",
    "select_leaves",
    "tree_attention",
    "verify",
]
