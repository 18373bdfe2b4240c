import os

import pytest
import torch
from hypothesis import settings

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

import eagle2_kernels
from eagle2_kernels import missing_forms, ops, reference
from on_gpu import OnGpu

FORMS = {"reference": reference}
if "cpu" not in missing_forms:
    FORMS["cpu"] = eagle2_kernels.cpu
if "triton" not in missing_forms:
    triton = eagle2_kernels.triton
    FORMS["triton"] = OnGpu(triton) if HAS_GPU else triton
INTERPRETED = set() if HAS_GPU else {"triton"}
MARKS = {"triton": [pytest.mark.gpu] if HAS_GPU else []}

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


def parameters(names):
    return [pytest.param(name, marks=MARKS.get(name, [])) for name in names]


@pytest.fixture(scope="module", params=parameters(FORMS))
def form(request):
    """Each form that is here and has the operator which the test file is named after."""
    return pick_form(request)


@pytest.fixture(scope="module", params=parameters(f for f in FORMS if f not in INTERPRETED))
def fast_form(request):
    """As `form`, for tests of thousands of rows: not through Triton's interpreter."""
    return pick_form(request)


def pick_form(request):
    module = FORMS[request.param]
    operator = request.path.stem.removeprefix("test_")
    if operator in ops.OPERATORS and not hasattr(module, operator):
        pytest.skip(f"the {request.param} form has no {operator}")
    return module


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory holds NaN and largest integers."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["portable", "avx2", "avx512"])
def level(request):
    """The C++ form held to one instruction set."""
    _C = pytest.importorskip("eagle2_kernels._C", exc_type=ImportError)
    number = ["portable", "avx2", "avx512"].index(request.param)
    if number > _C.cpu_level():
        pytest.skip(f"this CPU has no {request.param}")
    _C.cap_level(number)
    yield eagle2_kernels.cpu
    _C.cap_level(2)
