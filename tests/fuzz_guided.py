"""The cases of fuzz_operators.py, led by coverage.

    python tests/fuzz_guided.py -max_total_time=600 -rss_limit_mb=0

Needs atheris, libFuzzer for Python, whose options it takes; its own tables grow by some 20 kB with
every input. An input is what a case draws from, so a mutation changes a shape, a stride or a
number; a failure is written to a file that repeats it.
"""

import sys
import zlib

import atheris
import numpy as np

with atheris.instrument_imports(include=["eagle2_kernels"]):
    import fuzz_operators as fuzz

NAMES = list(fuzz.CHECKS)
ROWS = 4  # cases of an input, about


class Drawn:
    """As much of numpy's Generator as the cases use, out of bytes; at their end, seeded by them."""

    def __init__(self, data: bytes):
        self.data, self.rest = data, np.random.default_rng(zlib.crc32(data))

    def words(self, size) -> np.ndarray:
        """uint32 of this shape."""
        count = int(np.prod(size))
        found, self.data = self.data[: 4 * count], self.data[4 * count :]
        return np.frombuffer(found + self.rest.bytes(4 * count - len(found)), "<u4").reshape(size)

    def integers(self, low, high, size=None, endpoint=False):
        shape = np.broadcast_shapes(np.shape(low), np.shape(high)) if size is None else size
        span = np.subtract(high, low, dtype=float) + endpoint
        if np.max(span, initial=0) > 2**32:  # all of int64, nothing else is as wide
            drawn = self.words((*np.atleast_1d(shape), 2)).copy().view("<i8")[..., 0]
        else:
            drawn = low + self.words(shape) % span.astype(np.int64)
        return drawn if np.shape(drawn) else int(drawn)

    def random(self, size):
        return self.words(size) / 2.0**32

    def normal(self, mean=0.0, deviation=1.0, size=None):
        size = np.broadcast_shapes(np.shape(mean), np.shape(deviation)) if size is None else size
        with np.errstate(invalid="ignore"):  # signalling NaNs
            bits = self.words(size).view("<f4").astype(float)
        usual = self.rest.normal(size=size)
        return mean + deviation * np.where(np.abs(bits) < 8, bits, usual)

    def choice(self, values, size=None):
        return np.asarray(values)[self.integers(0, len(values), () if size is None else size)]


def case(data: bytes) -> None:
    drawn = Drawn(data)
    fuzz.run(NAMES[drawn.integers(0, len(NAMES), ())], drawn, ROWS)


if __name__ == "__main__":
    atheris.Setup(sys.argv, case)
    atheris.Fuzz()
