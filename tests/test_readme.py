"""Every Python block of the README runs."""

import re
from pathlib import Path

import pytest
from eagle2 import embedded

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    if "embedded" in block:
        try:
            embedded.gguf_file()
        except FileNotFoundError as error:
            pytest.skip(str(error))
    exec(compile(block, str(README), "exec"), {})


def test_there_are_blocks():
    assert len(BLOCKS) == 2
