import pytest
import torch
from hypothesis import settings

import eagle2_kernels
from eagle2_kernels import missing_forms, ops, reference

FORMS = {"reference": reference}
if "cpu" not in missing_forms:
    FORMS["cpu"] = eagle2_kernels.cpu

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


@pytest.fixture(scope="module", params=FORMS)
def form(request):
    """Each form that is here and has the operator which the test file is named after."""
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
