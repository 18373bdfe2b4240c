"""The Triton form, for CUDA and ROCm tensors: in each file the kernel, then its launcher.

Launchers read nothing back to the host; what they allocate depends on shapes only, and results go
into `out` where it is given. Lengths and strides are run-time arguments; what is a `tl.constexpr`
takes few values, so few kernels are built.
"""

from .accept import accept
from .compact_kv import compact_kv
from .enter_level import enter_level
from .expand import expand
from .rerank import rerank
from .sample import sample
from .select_leaves import select_leaves
from .tree_attention import tree_attention
from .verify import verify

__all__ = [
    "accept",
    "compact_kv",
    "enter_level",
    "expand",
    "rerank",
    "sample",
    "select_leaves",
    "tree_attention",
    "verify",
]
