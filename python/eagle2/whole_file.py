"""Files that appear whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write what is to replace `path`, which happens at the end of the context.

    Where it ends in an exception, `path` stays as it was. What a kill leaves behind, a file named
    `path.partial`, the next write takes over.
    """
    fresh = path.with_name(path.name + ".partial")
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
