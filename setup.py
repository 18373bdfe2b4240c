"""Builds eagle2_kernels._C where there is a C++ compiler; the rest is in pyproject.toml."""

import sys
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import setup

OPENMP = ["-fopenmp"] if sys.platform == "linux" else []


class OptionalBuild(build_ext):
    """An install without a compiler succeeds: the reference then serves the CPU."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            reason = str(error).splitlines()[0]
            print(
                f"warning: eagle2_kernels is installed without its C++ kernels ({reason}). "
                "Everything works, slower. Install a C++17 compiler and Python's headers, then "
                "install again.",
                file=sys.stderr,
            )


ParallelCompile("NPY_NUM_BUILD_JOBS").install()
setup(
    ext_modules=[
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
    ],
    cmdclass={"build_ext": OptionalBuild},
)
