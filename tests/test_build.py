"""What is built, and what it is built from: the extension, sdist and wheel."""

import os
import re
import runpy
import shutil
import site
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


def setup_py():
    """What setup.py defines, without a build."""
    return runpy.run_path(str(ROOT / "setup.py"))


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
    extensions = ["_C", "_cuda"] if setup_py()["find_nvcc"]() else ["_C"]
    built = {n for n in names if re.match(rf"eagle2_kernels/({'|'.join(extensions)})\.", n)}
    assert len(built) == len(extensions)
    assert {name for name in names if ".dist-info/" not in name} == wanted | built


@pytest.mark.full
def test_r50_install_without_a_compiler_succeeds(clone, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "-v", "--no-deps", "--target", tmp_path]
    env = {**os.environ, "CC": "/nowhere/cc", "CXX": "/nowhere/c++", "EAGLE2_NO_CUDA": "1"}
    done = subprocess.run([*command, clone], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "without its C++ kernels" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not [*tmp_path.glob("eagle2_kernels/_*.so")]
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


WHERE = """
import eagle2, eagle2_kernels
print(eagle2.__file__, eagle2_kernels.__file__, eagle2_kernels.cpu._C.__file__, sep="\\n")
"""


def installed(tmp_path, *what):
    """Files of both packages and of the extension, in an environment of its own.

    The libraries are those of this one, behind its own packages.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env["EAGLE2_NO_CUDA"] = "1"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *what], env=env, check=True)
    (own,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    said = subprocess.run([python, "-c", WHERE], env=env, cwd=tmp_path, text=True,
                          capture_output=True)  # fmt: skip
    assert said.returncode == 0, said.stderr
    return [Path(line) for line in said.stdout.split()]


@pytest.mark.full
def test_install_from_the_sdist(clone, tmp_path):
    command = [sys.executable, "-m", "build", "-q", "--sdist", "-o", tmp_path, clone]
    subprocess.run(command, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    for file in installed(tmp_path, sdist):
        assert file.is_relative_to(tmp_path / "venv"), file


@pytest.mark.full
def test_editable_install(clone, tmp_path):
    """It is the source that runs, with the extension built beside it."""
    source = tmp_path / "source"
    shutil.copytree(clone, source)
    eagle2, kernels, extension = installed(tmp_path, "-e", source)
    assert eagle2 == source / "python" / "eagle2" / "__init__.py"
    assert kernels == source / "eagle2_kernels" / "__init__.py"
    assert extension.parent == kernels.parent


def python_of(minor):
    """An interpreter of Python 3.minor on this machine."""
    kept = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
    return str(kept[-1]) if kept else shutil.which(f"python3.{minor}")  # not pyenv's shim


LOADS = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.cpu_level())
"""


@pytest.mark.full
@pytest.mark.parametrize("minor", range(10, 15))
def test_r50_wheel_of_each_python(minor, clone, tmp_path):
    """Built without torch; its extension loads."""
    python = python_of(minor)
    if python is None:
        pytest.skip(f"no Python 3.{minor} here")
    command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, clone]
    subprocess.run(command, env={**os.environ, "EAGLE2_NO_CUDA": "1"}, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-cp3{minor}-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.startswith("eagle2_kernels/_C."))
        extension = archive.extract(name, tmp_path)
    said = subprocess.run([python, "-c", LOADS, extension], capture_output=True, text=True)
    assert said.stdout.strip().isdigit(), said.stderr
