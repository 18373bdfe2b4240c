"""A form of the GPU as the tests see it: tensors of the CPU in, tensors of the CPU out."""

import torch
from torch import Tensor


class OnGpu:
    """The operators of `form`, run on copies of the arguments' storages, strides and all.

    Storages are copied back afterwards, so whatever a kernel wrote is seen, guard rows too.
    """

    def __init__(self, form):
        self.form = form

    def __getattr__(self, name: str):
        operator = getattr(self.form, name)

        def call(*arguments, **options):
            storages = {}
            moved = map_tensors(lambda x: to_gpu(x, storages), (arguments, options))
            result = operator(*moved[0], **moved[1])
            torch.cuda.synchronize()
            for here, there in storages.values():
                here.copy_(there)
            return map_tensors(Tensor.cpu, result)

        return call


def to_gpu(x: Tensor, storages: dict) -> Tensor:
    storage = x.untyped_storage()
    if storage.data_ptr() not in storages or not storage.data_ptr():
        here = torch.empty(0, dtype=torch.uint8).set_(storage)
        storages[storage.data_ptr()] = here, here.cuda()
    there = storages[storage.data_ptr()][1].untyped_storage()
    out = torch.empty(0, dtype=x.dtype, device="cuda")
    return out.set_(there, x.storage_offset(), x.shape, x.stride())


def map_tensors(function, value):
    """`value` with `function` applied to every tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, entry) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, entry) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(function, entry) for entry in value)
    return value
