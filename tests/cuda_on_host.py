"""The CUDA C++ form without a GPU: its kernels compiled for the host, as on_host/ has it.

The files of csrc/cuda are compiled by g++ with on_host/cuda_runtime.h in place of CUDA's own, into
a module beside which eagle2_kernels/cuda.py is loaded once more.
"""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from unittest import mock

import pybind11

ROOT = Path(__file__).parents[1]
CXX = shlex.split(os.environ.get("CXX", "g++"))
KERNELS = sorted(ROOT.glob("csrc/cuda/*.cu"))


class OnHost:
    """The operators of csrc/cuda; they are built when the first one is called."""

    def __getattr__(self, name: str):
        if name not in {file.stem for file in KERNELS}:
            raise AttributeError(name)
        return lambda *arguments, **options: getattr(form(), name)(*arguments, **options)


def has_compiler() -> bool:
    return sys.platform == "linux" and shutil.which(CXX[0]) is not None


def form():
    name = "eagle2_kernels.cuda_on_host"
    if name not in sys.modules:
        module = form_over(load("on_host._cuda", build()))
        module._launch = lambda operator, tensor, *arguments: operator(*arguments, 0, 0)
        sys.modules[name] = module
    return sys.modules[name]


def form_over(_cuda):
    """eagle2_kernels/cuda.py with this module in place of the built one."""
    import eagle2_kernels  # not before conftest.py has chosen how Triton runs

    with (
        mock.patch.dict(sys.modules, {"eagle2_kernels._cuda": _cuda}),
        mock.patch.object(eagle2_kernels, "_cuda", _cuda, create=True),
    ):
        return load("eagle2_kernels.cuda_on_host", ROOT / "eagle2_kernels/cuda.py")


def load(name: str, file: Path):
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build() -> Path:
    """Once for each state of the sources, whichever test process comes first."""
    inputs = sorted(
        [*ROOT.glob("csrc/*.h"), *ROOT.glob("csrc/cuda/*"), *ROOT.glob("tests/on_host/*")]
    )
    state = hashlib.sha256(b"".join(file.read_bytes() for file in inputs))
    state.update(f"{sys.version} {pybind11.__version__} {CXX}".encode())
    folder = ROOT / "build/cuda_on_host" / state.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    module = folder / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not module.exists():
            compile_to(module)
    return module


def compile_to(module: Path) -> None:
    folders = [ROOT / "tests/on_host", ROOT / "csrc", pybind11.get_include()]
    folders.append(sysconfig.get_path("include"))
    command = [*CXX, "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-DEAGLE2_CUDA_ARCHS=the/host", *(f"-I{folder}" for folder in folders)]
    unfinished = module.with_suffix(".unfinished")
    command += ["-x", "c++", ROOT / "csrc/cuda/module.cpp", *KERNELS, "-o", unfinished]
    subprocess.run(command, check=True)
    unfinished.rename(module)
