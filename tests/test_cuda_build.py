"""How setup.py treats nvcc, what nvcc makes of each kernel, what the module says where it loads."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cuda_on_host
import pytest
from setuptools import Distribution

import eagle2_kernels

ROOT = Path(__file__).parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
KERNELS = sorted(ROOT.glob("csrc/cuda/*.cu"))
MOST_REGISTERS = 64


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path):
    """A machine without nvcc; in the folder that is returned a test may put one."""
    monkeypatch.delenv("EAGLE2_NO_CUDA", raising=False)
    monkeypatch.delenv("EAGLE2_CUDA_ARCHS", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    return tmp_path


def put(folder, name, script):
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.skipif(sys.platform != "linux", reason="_cuda is built on Linux alone")
def test_nvcc_is_found_on_the_path_then_in_cuda_home(no_nvcc, monkeypatch):
    assert SETUP["find_nvcc"]() is None
    (no_nvcc / "toolkit/bin").mkdir(parents=True)
    second = put(no_nvcc / "toolkit/bin", "nvcc", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(no_nvcc / "toolkit"))
    assert SETUP["find_nvcc"]() == second
    first = put(no_nvcc, "nvcc", "exit 0")
    assert SETUP["find_nvcc"]() == first
    monkeypatch.setenv("EAGLE2_NO_CUDA", "1")
    assert SETUP["find_nvcc"]() is None


def test_without_nvcc_setup_asks_for_one_extension(no_nvcc):
    names = [ext.name for ext in runpy.run_path(str(ROOT / "setup.py"))["EXTENSIONS"]]
    assert names == ["eagle2_kernels._C"]


def test_architectures_are_the_chosen_or_those_that_nvcc_knows(no_nvcc, monkeypatch):
    nvcc = put(no_nvcc, "nvcc", "echo sm_75; echo sm_80; echo sm_90; echo sm_1200")
    assert SETUP["architectures"](nvcc) == [80, 90]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0+PTX")  # torch's own extensions are not meant
    assert SETUP["architectures"](nvcc) == [80, 90]
    monkeypatch.setenv("EAGLE2_CUDA_ARCHS", "120,90")
    assert SETUP["architectures"](nvcc) == [90, 120]
    assert SETUP["code_flags"]([90, 120]) == [
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    monkeypatch.setenv("EAGLE2_CUDA_ARCHS", "9.0")
    with pytest.raises(
        ValueError, match="EAGLE2_CUDA_ARCHS: wanted numbers such as 80,90, got '9.0'"
    ):
        SETUP["architectures"](nvcc)


def test_r50_a_failing_nvcc_leaves_the_other_extension(no_nvcc, monkeypatch, capfd):
    put(no_nvcc, "nvcc", '[ "$1" = --list-gpu-code ] && echo sm_80')
    empty_files = put(no_nvcc, "c++", 'while [ "$1" != -o ]; do shift; done; : > "$2"')
    for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED"):
        monkeypatch.setenv(name, empty_files)
    monkeypatch.chdir(ROOT)
    names = runpy.run_path(str(ROOT / "setup.py"))
    distribution = Distribution({"ext_modules": names["EXTENSIONS"], "name": "x"})
    build = names["OptionalBuild"](distribution)
    build.build_lib, build.build_temp = str(no_nvcc / "lib"), str(no_nvcc / "objects")
    build.ensure_finalized()
    build.run()
    assert [file.name.split(".")[0] for file in (no_nvcc / "lib").glob("*/*")] == ["_C"]
    warned = [line for line in capfd.readouterr().err.splitlines() if "warning: " in line]
    assert len(warned) == 1
    assert "installed without its CUDA C++ kernels (command" in warned[0]


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_kernels_compile_without_spills(file, tmp_path):
    """For every architecture that is built by default."""
    nvcc = SETUP["find_nvcc"]()
    if nvcc is None:
        pytest.skip("needs nvcc")
    numbers = SETUP["architectures"](nvcc)
    command = [nvcc, "-std=c++17", "-O3", *SETUP["code_flags"](numbers), "--threads=2"]
    command += ["-Werror=all-warnings", "-Xptxas=-v", f"-I{ROOT / 'csrc'}", "-c", file]
    done = subprocess.run([*command, "-o", tmp_path / "object"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = re.findall(
        r"for '(sm_\d+)'\n.*\n\s*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes "
        r"spill loads\nptxas info\s*: Used (\d+) registers",
        done.stderr,
    )
    assert {target for target, *_ in said} == {f"sm_{number}" for number in numbers}
    kernels = done.stderr.count("Compiling entry function")
    assert len(said) == kernels >= len(numbers)
    for target, *lost, registers in said:
        assert lost == ["0", "0", "0"], (target, done.stderr)
        assert int(registers) <= MOST_REGISTERS, (target, done.stderr)


def test_the_module_loads_without_a_gpu():
    _cuda = pytest.importorskip("eagle2_kernels._cuda", exc_type=ImportError)
    assert re.fullmatch(r"sm_\d+(/sm_\d+)*", _cuda.architectures)
    if _cuda.driver_version() == 0:
        assert "cannot run here: built for sm_" in eagle2_kernels.missing_forms["cuda"]
        with pytest.raises(RuntimeError, match="driver version is insufficient"):
            _cuda.select_leaves((0, 1, 1), 1, 4, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("driver", "said"),
    [(0, "is not there"), (11080, "is for CUDA 11.8"), (12000, None), (13020, None)],
)
def test_a_driver_of_an_older_major_version_is_the_reason(driver, said):
    _cuda = SimpleNamespace(
        architectures="sm_80/sm_90", runtime_version=12060, driver_version=lambda: driver
    )
    built = "built for sm_80, sm_90 and PTX with CUDA 12.6"
    if said is None:
        assert cuda_on_host.form_over(_cuda).built_for() == built
    else:
        with pytest.raises(ImportError, match=f"{built}; NVIDIA's driver {said}"):
            cuda_on_host.form_over(_cuda)


def test_r51_asking_for_the_driver_does_not_start_it(tmp_path):
    """A process that has imported the package may still fork: a stand-in reports every call."""
    built = pytest.importorskip("eagle2_kernels._cuda", exc_type=ImportError).__file__
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    (tmp_path / "driver.c").write_text("""
        #include <stdio.h>
        #include <string.h>
        int cuDriverGetVersion(int* version) { return *version = 12080, 0; }
        static int table() { return 1; }
        static int other() { return puts("another call"), 1; }
        int cuGetProcAddress_v2(const char* name, void** found, int version, long flags, void* s) {
          if (!*name || !strcmp(name, "cuGetProcAddress")) *found = cuGetProcAddress_v2;
          else if (!strcmp(name, "cuDriverGetVersion")) *found = cuDriverGetVersion;
          else *found = strcmp(name, "cuGetExportTable") ? other : table;
          return 0;
        }
    """)
    library = tmp_path / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", tmp_path / "driver.c", "-o", library]
    subprocess.run(command, check=True)
    probe = "import sys; sys.path[0] = sys.argv[1]; import _cuda; print(_cuda.driver_version())"
    done = subprocess.run(
        [sys.executable, "-c", probe, Path(built).parent],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "12080\n", done.stderr
