"""What decoding holds, by the formula of docs/memory.md, and that it holds no more in the end."""

import gc
import re
from pathlib import Path

import pytest
import torch
from eagle2 import TreeConfig, generate
from tiny import PROMPTS, VOCAB, make_pair

DOCS = Path(__file__).parents[1] / "docs" / "memory.md"


def live_storages():
    """Bytes of every storage that some tensor of this process holds, by address."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.fixture(scope="module")
def formula():
    names = {}
    for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL):
        exec(compile(block, str(DOCS), "exec"), names)
    return names


@pytest.mark.parametrize("tree", [TreeConfig(2, 3, 8), TreeConfig(10, 6, 60)])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_held_between_cycles(formula, tree, rows):
    model, head = make_pair(context=3.0)
    before, held = live_storages(), []

    def measure(drafted, path):
        if not held:
            now = live_storages()
            held.append(sum(size for place, size in now.items() if place not in before))

    new_tokens = 40
    generate(model, head, PROMPTS[:rows], max_new_tokens=new_tokens, tree=tree, on_cycle=measure)
    config, shape = model.config, head.config
    capacity = min(128, max(map(len, PROMPTS[:rows])) + new_tokens + tree.num_nodes)
    sizes = (rows, capacity, tree.top_k, tree.depth, tree.num_nodes)
    cache = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    own = (shape.num_key_value_heads, shape.head_dim)
    least = formula["held_bytes"](*sizes, *cache, *own, item=4)
    width = config.hidden_size
    most = least + formula["cycle_bytes"](
        rows, tree.top_k, tree.num_nodes, VOCAB, width, width, item=4
    )
    # beside it a few small tensors: lengths, sampling parameters, masks over the levels
    assert least <= held[0] <= most + 16_000


def test_an_example_of_the_docs(formula):
    assert formula["held_bytes"](1, 8192, 10, 6, 60, 32, 8, 128, 8, 128) == pytest.approx(
        1.1e9, rel=0.02
    )


def resident_kilobytes():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def check_that_nothing_stays(cycles):
    """Live tensors, tracked objects and resident memory after so many cycles of many calls."""
    model, head = make_pair(context=12.0)  # which accepts little: as many cycles as it can be
    done, seen = 0, []
    while done < cycles:
        settings = {"max_new_tokens": 60, "temperature": 1.0, "seed": done}
        result = generate(model, head, PROMPTS[:1], tree=TreeConfig(2, 2, 5), **settings)
        done += result.statistics.cycles
        del result
        seen.append((len(live_storages()), len(gc.get_objects()), resident_kilobytes()))
    tensors, objects, memory = zip(*seen[len(seen) // 3 :], strict=True)
    assert len(tensors) > 3
    assert len(set(tensors)) == 1
    assert objects[-1] - objects[0] < 200
    assert memory[-1] - memory[0] < 8_000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_five_hundred_cycles_leave_nothing():
    check_that_nothing_stays(500)


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_ten_thousand_cycles_leave_nothing():
    check_that_nothing_stays(10_000)
