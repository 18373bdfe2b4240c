"""What is built, and what it is built from: the extension, the GPU headers, sdist and wheel."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch  # noqa: F401  its OpenMP runtime has to be there first

ROOT = Path(__file__).parent.parent


def test_threads_are_those_of_torch():
    pytest.importorskip("eagle2_kernels._C", exc_type=ImportError)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs Linux")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "libgomp" in line}
    assert len(loaded) <= 1


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_headers_compile_for_the_gpu(tmp_path):
    source = tmp_path / "probe.cu"
    source.write_text("""
        #include "order.h"
        #include "tree.h"
        __global__ void probe(const int64_t* tokens, const int32_t* parents, int32_t* path,
                              uint64_t* words, float* score) {
          eagle2::mark_ancestor(words, eagle2::index_of(eagle2::order_key(*score, 3)));
          *score = eagle2::effective_score(*score, parents[1], 1, score);
          eagle2::Vector<const int64_t> targets = {tokens, 1};
          path[0] = eagle2::accept_walk({tokens, 1}, {parents, 1}, 9, 4, path, targets)
                        .accept_length;
        }
    """)
    command = ["nvcc", "-std=c++17", "-Werror=all-warnings", "-I", ROOT / "csrc", "-c", source]
    subprocess.run([*command, "-o", tmp_path / "probe.o"], check=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The committed files alone, as a fresh clone holds them."""
    source = tmp_path_factory.mktemp("clone") / "source"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    return source


@pytest.mark.full
def test_sdist_and_wheel_hold_what_belongs(clone, tmp_path):
    subprocess.run([sys.executable, "-m", "build", "-o", tmp_path, clone], check=True)
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(file.relative_to(clone)) for file in clone.glob("csrc/**/*.*")}
    assert sources | {"LICENSE", "pyproject.toml", "setup.py"} <= shipped

    names = zipfile.ZipFile(wheel).namelist()
    modules = [*clone.glob("eagle2_kernels/**/*.py"), *clone.glob("python/eagle2/**/*.py")]
    wanted = {str(file.relative_to(clone)).removeprefix("python/") for file in modules}
    wanted |= {"eagle2/py.typed", "eagle2_kernels/py.typed"}
    weights = clone / "python/eagle2/smollm2"
    wanted |= {f"eagle2/smollm2/{file.name}" for file in weights.glob("*")}
    built = {name for name in names if name.startswith("eagle2_kernels/_C.")}
    assert len(built) == 1
    assert {name for name in names if ".dist-info/" not in name} == wanted | built


@pytest.mark.full
def test_r50_install_without_a_compiler_succeeds(clone, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", tmp_path]
    env = {**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    done = subprocess.run([*command, clone], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "without its C++ kernels" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not [*tmp_path.glob("eagle2_kernels/_C.*")]
    # an editable install's finder would lend its own _C
    probe = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if '__editable__' not in str(f)]; "
        "import eagle2_kernels; print(eagle2_kernels.missing_forms['cpu'])"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", probe], env=env, cwd=tmp_path, text=True, capture_output=True
    )
    assert "C++" in said.stdout, said.stderr
