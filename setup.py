"""Builds eagle2_kernels._C where there is a C++ compiler and _cuda where there is nvcc.

EAGLE2_CUDA_ARCHS=80,90 chooses the architectures of _cuda, EAGLE2_NO_CUDA=1 leaves it out. The rest
is in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from sysconfig import get_path

import pybind11
from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import Extension, setup

OPENMP = ["-fopenmp"] if sys.platform == "linux" else []
ARCHITECTURES = (80, 90, 100, 120)
INSTEAD = {
    "eagle2_kernels._C": "C++ kernels ({}). Everything works, slower. Install a C++17 compiler and "
    "Python's headers, then install again.",
    "eagle2_kernels._cuda": "CUDA C++ kernels ({}). Everything works, GPUs are served by Triton. "
    "EAGLE2_NO_CUDA=1 leaves these kernels out.",
}


class OptionalBuild(build_ext):
    """An install where a compiler is missing or fails succeeds: other forms then serve."""

    def build_extension(self, ext):
        try:
            if ext.name.endswith("._cuda"):
                self.spawn(cuda_command(ext, self.get_ext_fullpath(ext.name)))
            else:
                super().build_extension(ext)
        except Exception as error:
            without = INSTEAD[ext.name].format(str(error).splitlines()[0])
            print(f"warning: eagle2_kernels is installed without its {without}", file=sys.stderr)


def find_nvcc() -> str | None:
    if sys.platform != "linux" or os.environ.get("EAGLE2_NO_CUDA", "0") not in ("", "0"):
        return None
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")


def architectures(nvcc: str) -> list[int]:
    """Those of EAGLE2_CUDA_ARCHS; else those of our list that this nvcc knows."""
    if chosen := os.environ.get("EAGLE2_CUDA_ARCHS"):
        if not re.fullmatch(r"\d+(,\d+)*", chosen):
            raise ValueError(f"EAGLE2_CUDA_ARCHS: wanted numbers such as 80,90, got {chosen!r}")
        return sorted({int(number) for number in chosen.split(",")})
    command = [nvcc, "--list-gpu-code"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [number for number in ARCHITECTURES if f"sm_{number}" in known]


def code_flags(numbers: list[int]) -> list[str]:
    """Machine code for each architecture; PTX of the first serves GPUs that are not in the list."""
    codes = {number: f"sm_{number}" for number in numbers}
    codes[numbers[0]] = f"[sm_{numbers[0]},compute_{numbers[0]}]"
    return [f"-gencode=arch=compute_{number},code={code}" for number, code in codes.items()]


def cuda_command(ext: Extension, module: str) -> list[str]:
    """One call of nvcc makes the module, which needs no CUDA library but the driver's own."""
    nvcc = find_nvcc()
    numbers = architectures(nvcc)
    command = [nvcc, "-shared", "-cudart=static", "-std=c++17", "-O3", "--threads=0"]
    command += ["-Xcompiler=-fPIC,-fvisibility=hidden", *(f"-I{path}" for path in ext.include_dirs)]
    command += [*code_flags(numbers), "-DEAGLE2_CUDA_ARCHS=" + "/".join(f"sm_{n}" for n in numbers)]
    Path(module).parent.mkdir(parents=True, exist_ok=True)
    return [*command, *ext.sources, "-o", module]


EXTENSIONS = [
    Pybind11Extension(
        "eagle2_kernels._C",
        ["csrc/module.cpp", *sorted(glob("csrc/cpu/*.cpp"))],
        include_dirs=["csrc"],
        depends=[*glob("csrc/*.h"), *glob("csrc/cpu/*.h")],
        extra_compile_args=["-O3", *OPENMP],
        extra_link_args=OPENMP,
        cxx_std=17,
        optional=True,
    )
]
if find_nvcc():
    EXTENSIONS.append(
        Extension(
            "eagle2_kernels._cuda",
            ["csrc/cuda/module.cpp", *sorted(glob("csrc/cuda/*.cu"))],
            include_dirs=["csrc", pybind11.get_include(), get_path("include")],
            optional=True,
        )
    )

if __name__ == "__main__":
    ParallelCompile("NPY_NUM_BUILD_JOBS").install()
    setup(ext_modules=EXTENSIONS, cmdclass={"build_ext": OptionalBuild})
