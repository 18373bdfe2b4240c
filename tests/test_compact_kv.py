"""compact_kv in every form, against moving rows one by one."""

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eagle2_kernels

BYTES = [torch.int8, torch.bfloat16, torch.float32, torch.float64]
LAYERS, GROUPS, DIM = 3, 2, 8


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def make_caches(batch=2, slots=20, dtype=torch.float32, layers=LAYERS, heads=(GROUPS, DIM)):
    """Every element is another number, as far as the dtype holds them."""
    shape = (2, layers, batch, slots, *heads)
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype).unbind(0)


def paths(*rows):
    width = max(map(len, rows))
    return int32(*(list(row) + [-1] * (width - len(row)) for row in rows))


def accepted(*rows):
    return int32(*(len(row) - 1 for row in rows))


def brute_compact(cache, rows, prefix):
    out = cache.clone()
    for b, row in enumerate(rows):
        for step, node in enumerate(row):
            out[:, b, prefix[b] + step] = cache[:, b, prefix[b] + node]
    return out


def check(form, rows, prefix, **sizes):
    caches = make_caches(batch=len(rows), **sizes)
    wanted = [brute_compact(cache, rows, prefix) for cache in caches]
    caches = [cache.clone() for cache in caches]
    form.compact_kv(*caches, paths(*rows), accepted(*rows), int32(*prefix))
    for got, cache in zip(caches, wanted, strict=True):
        assert torch.equal(got, cache)


@pytest.mark.parametrize("dtype", BYTES)
def test_rows_move_and_the_others_stay(form, dtype):
    check(form, [[0, 2, 5, 6], [0, 1, 4], [0]], [3, 0, 7], dtype=dtype)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.bool, torch.float8_e4m3fn]
)
def test_any_dtype(form, dtype):
    caches = [cache.clone() for cache in make_caches(dtype=torch.int64)]
    raw = [(cache % 2).to(torch.uint8) for cache in caches]
    size = torch.empty((), dtype=dtype).element_size()
    caches = [x.repeat_interleave(size, -1).contiguous().view(dtype) for x in raw]
    wanted = [x.clone() for x in caches]
    for cache in wanted:
        cache[:, :, 4] = cache[:, :, 6]
    form.compact_kv(*caches, paths([0, 3], [0, 3]), int32(1, 1), int32(3, 3))
    for got, cache in zip(caches, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), cache.view(torch.uint8))


def test_nan_bits_are_kept(form):
    caches = [cache.clone() for cache in make_caches(batch=1)]
    odd = torch.tensor([0x7FC01234, -1, 0x7F800001], dtype=torch.int32)
    caches[0].view(torch.int32)[:, 0, 5, 0, :3] = odd
    form.compact_kv(*caches, paths([0, 4]), int32(1), int32(1))
    assert (caches[0].view(torch.int32)[:, 0, 2, 0, :3] == odd).all()


def test_every_row_to_the_slot_just_read(form):
    check(form, [[*range(0, 18, 2)], [*range(1)], [0, *range(2, 17)]], [1, 5, 3], slots=22)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64])
def test_long_paths_of_wide_rows(form, dtype):
    rows = [[0, *range(3, 43)], [0, *range(1, 30), 35, 41], [0]]
    check(form, rows, [2, 5, 1], slots=48, layers=1, dtype=dtype, heads=(5, 72))


@settings(max_examples=40)
@given(st.data())
def test_any_path(form, data):
    rows, prefix = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        rows.append([0, *sorted(data.draw(st.sets(st.integers(1, 12))))])
        prefix.append(data.draw(st.integers(0, 7)))
    check(form, rows, prefix, layers=data.draw(st.integers(1, 3)))


def test_nothing_to_move(form):
    check(form, [[0], [0]], [3, 19])
    check(form, [[0, 2]], [0], layers=0)
    check(form, [[0, 2]], [0], heads=(0, 8))
    none = torch.zeros(LAYERS, 0, 20, GROUPS, DIM)
    form.compact_kv(none, none.clone(), torch.zeros(0, 3).int(), int32(), int32())


def test_accept_length_says_how_many(form):
    caches = make_caches()
    kept = [cache.clone() for cache in caches]
    form.compact_kv(*caches, paths([0, 3, 5], [0, 3, 5]), int32(0, 1), int32(2, 2))
    for got, cache in zip(caches, kept, strict=True):
        assert torch.equal(got[:, 0], cache[:, 0])
        assert torch.equal(got[:, 1, 3], cache[:, 1, 5])
        assert torch.equal(got[:, 1, 4:], cache[:, 1, 4:])


def test_padding_of_the_path_moves_nothing(form):
    caches = make_caches()
    kept = [cache.clone() for cache in caches]
    form.compact_kv(*caches, int32([-1, -1, -1], [0, -1, -1]), int32(2, 2), int32(2, 2))
    for got, cache in zip(caches, kept, strict=True):
        assert torch.equal(got, cache)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_paged(form, size):
    rows, prefix = [[0, 2, 5, 6], [0, 1, 4], [0, 7]], [3, 0, 9]
    caches = make_caches(batch=3, slots=32)
    wanted = [brute_compact(cache, rows, prefix) for cache in caches]
    columns = 32 // size
    table = torch.randperm(3 * columns + 1)[: 3 * columns].view(3, columns).int()
    blocks = [torch.zeros(LAYERS, 3 * columns + 1, size, GROUPS, DIM) for _ in caches]
    for block, cache in zip(blocks, caches, strict=True):
        block[:, table.long()] = cache.view(LAYERS, 3, columns, size, GROUPS, DIM)
    wide = torch.stack((table, table), 2).flatten(1)[:, ::2]
    form.compact_kv(*blocks, paths(*rows), accepted(*rows), int32(*prefix), wide)
    for block, cache in zip(blocks, wanted, strict=True):
        assert torch.equal(block[:, table.long()].flatten(2, 3), cache)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: x.movedim(3, 2).contiguous().movedim(2, 3),
        lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: torch.cat((x, x), 3)[:, :, :, :GROUPS],
        lambda x: x.movedim(1, 0).contiguous().movedim(0, 1),
    ],
)
def test_r16_any_strides(form, view):
    rows, prefix = [[0, 2, 5, 6], [0, 3]], [3, 1]
    caches = make_caches()
    wanted = [brute_compact(cache, rows, prefix) for cache in caches]
    strided = [view(cache) for cache in caches]
    lengths = torch.stack((accepted(*rows), int32(*prefix)), 1)
    path = paths(*rows).repeat_interleave(2, 1)[:, ::2]
    form.compact_kv(*strided, path, lengths[:, 0], lengths[:, 1])
    for got, cache in zip(strided, wanted, strict=True):
        assert torch.equal(got, cache)


def test_r14_layers_beyond_32_bits(form):
    # 4 GiB of which only the pages that are written come into being
    torch.utils.deterministic.fill_uninitialized_memory = False
    caches = make_caches(dtype=torch.float16)
    storage = torch.empty(2**31 + 2**20, dtype=torch.float16)
    far = storage.as_strided((LAYERS, 2, 20, GROUPS, DIM), (2**30, 320, 16, 8, 1)).copy_(caches[0])
    wanted = brute_compact(caches[0], [[0, 4], [0, 2]], [1, 5])
    form.compact_kv(far, caches[1], paths([0, 4], [0, 2]), int32(1, 1), int32(1, 5))
    assert torch.equal(far, wanted)


def test_r33_rows_outside_the_batch_stay(form):
    caches = make_caches(batch=4)
    kept = [cache.clone() for cache in caches]
    rows, prefix = [[0, 2], [0, 5, 6], [0, 1, 9]], [2, 0, 4]
    three = [cache[:, :3] for cache in caches]
    form.compact_kv(*three, paths(*rows), accepted(*rows), int32(*prefix))
    for got, cache in zip(caches, kept, strict=True):
        assert torch.equal(got[:, 3], cache[:, 3])
        assert torch.equal(got[:, :3], brute_compact(cache[:, :3], rows, prefix))


def test_r35_two_views_of_one_buffer(form):
    rows, prefix = [[0, 2, 5], [0, 3]], [3, 1]
    wanted = [brute_compact(cache, rows, prefix) for cache in make_caches()]
    buffer = torch.stack(make_caches())
    form.compact_kv(buffer[0], buffer[1], paths(*rows), accepted(*rows), int32(*prefix))
    assert torch.equal(buffer, torch.stack(wanted))


def test_r42_slots_outside_the_cache_are_never_touched(form):
    """A wrong path may move nothing, or raise; it may not write elsewhere."""
    buffer = torch.arange(3 * 10 * 4.0).view(3, 10, 1, 4)
    cache, kept = buffer[1:2][None], buffer.clone()
    for path, prefix in (([0, 900], 2), ([0, 5, 6], 9)):
        with suppress(IndexError):
            form.compact_kv(cache, cache.clone(), paths(path), accepted(path), int32(prefix))
    assert torch.equal(buffer, kept)


def test_shapes_that_do_not_belong_together_are_errors():
    k, v = make_caches()
    with pytest.raises(ValueError, match="v_cache"):
        eagle2_kernels.compact_kv(k, v[:, :, 1:], paths([0], [0]), int32(0, 0), int32(0, 0))
    with pytest.raises(ValueError, match="accept_length"):
        eagle2_kernels.compact_kv(k, v, paths([0], [0]), int32(0), int32(0, 0))


def test_threads_do_not_change_the_result(fast_form):
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        check(fast_form, [[0, 2, 5], [0, 3, 4, 7]] * 8, [3, 1] * 8, layers=24)
    torch.set_num_threads(threads)
