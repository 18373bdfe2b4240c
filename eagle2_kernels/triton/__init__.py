"""The Triton form, for CUDA and ROCm tensors: in each file the kernel, then its launcher.

Launchers read nothing back to the host, and what they allocate depends on shapes only. Lengths and
strides are run-time arguments; what is a `tl.constexpr` takes few values, so few kernels are built.
"""

from .compact_kv import compact_kv
from .expand import expand
from .rerank import rerank
from .select_leaves import select_leaves
from .verify import verify

__all__ = ["compact_kv", "expand", "rerank", "select_leaves", "verify"]
