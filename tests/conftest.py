import os

import cuda_on_host
import pytest
import torch
from hypothesis import settings
from on_gpu import OnGpu

os.environ["TRITON_INTERPRET"] = str(int(not torch.cuda.is_available()))  # before the kernels come

import eagle2_kernels
from eagle2_kernels import missing_forms, ops, reference

HAS_GPU = torch.cuda.is_available()
FORMS = {"reference": reference}
if "cpu" not in missing_forms:
    FORMS["cpu"] = eagle2_kernels.cpu
if "triton" not in missing_forms:
    triton = eagle2_kernels.triton
    FORMS["triton"] = OnGpu(triton) if HAS_GPU else triton
if HAS_GPU and "cuda" not in missing_forms:
    FORMS["cuda"] = OnGpu(eagle2_kernels.cuda)
elif not HAS_GPU and cuda_on_host.has_compiler():
    FORMS["cuda"] = cuda_on_host.OnHost()
INTERPRETED = set() if HAS_GPU else {"triton", "cuda"}
MARKS = dict.fromkeys(("triton", "cuda"), [pytest.mark.gpu] if HAS_GPU else [])


def forms_with(*operators, but=()):
    """Parameters (form, operator): each of these operators in each form that has it."""
    return [
        pytest.param(module, name, marks=MARKS.get(form, []), id=f"{form}-{name}")
        for form, module in FORMS.items()
        for name in operators
        if form not in but and hasattr(module, name)
    ]


settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


def pytest_generate_tests(metafunc):
    """Each form that is here and has the operator which the test file is named after."""
    operator = metafunc.definition.path.stem.removeprefix("test_")
    here = [f for f in FORMS if operator not in ops.OPERATORS or hasattr(FORMS[f], operator)]
    for fixture, left_out in (("form", set()), ("fast_form", INTERPRETED)):
        if fixture in metafunc.fixturenames:
            names = [pytest.param(f, marks=MARKS.get(f, [])) for f in here if f not in left_out]
            metafunc.parametrize(fixture, names, indirect=True, scope="module")


@pytest.fixture(scope="module")
def form(request):
    return FORMS[request.param]


@pytest.fixture(scope="module")
def fast_form(request):
    """As `form`, for tests of thousands of rows: not through an interpreter or on the host."""
    return FORMS[request.param]


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
