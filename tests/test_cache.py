import torch
from eagle2.cache import KVCache


def filled(batch=2, capacity=4):
    cache = KVCache.allocate(1, batch, capacity, 1, 8, torch.float32, torch.device("cpu"))
    for tensor in cache:
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor))
    return cache


def test_live_rows_are_written_and_nothing_else():
    cache, before = filled(), filled()
    start, count = torch.tensor([2, 1]).int(), torch.tensor([1, 0]).int()
    rows = -torch.ones(2, 3, 1, 8)
    cache.write(0, rows, 2 * rows, cache.slots(start, count, 3).index)
    for tensor, old, value in zip(cache, before, (-1, -2), strict=True):
        assert (tensor[0, 0, 2] == value).all()
        tensor[0, 0, 2] = old[0, 0, 2]
        assert torch.equal(tensor[:, :, :4], old[:, :, :4])


def test_a_row_in_the_last_slot_survives_padding_behind_it():
    cache = filled(batch=1)
    start, count = torch.tensor([3]).int(), torch.tensor([1]).int()
    rows = -torch.ones(1, 3, 1, 8)
    cache.write(0, rows, rows, cache.slots(start, count, 3).index)
    assert (cache.k[0, 0, 3] == -1).all()


def test_first_slots_fill_every_row_from_the_start():
    cache = filled()
    rows = torch.full((2, 3, 1, 8), 5.0)
    cache.write(0, rows, rows, cache.first_slots(3).index)
    assert (cache.v[0, :, :3] == 5).all()
    assert torch.equal(cache.v[0, :, 3], filled().v[0, :, 3])
