"""A short run of tests/fuzz_operators.py; the long one is a script."""

import fuzz_operators
import pytest

pytest.importorskip("eagle2_kernels.cpu", exc_type=ImportError)


@pytest.mark.parametrize("name", fuzz_operators.CHECKS)
def test_random_rows(name):
    for number in range(8):
        assert fuzz_operators.batch_of(name, seed=1, number=number, rows=128) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", fuzz_operators.CHECKS)
def test_many_random_rows(name):
    for number in range(500):
        fuzz_operators.batch_of(name, seed=2, number=number, rows=256)
