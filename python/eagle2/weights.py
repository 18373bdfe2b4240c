"""Tensors of a folder: `model.safetensors` or `pytorch_model.bin`, in one file or in shards."""

import json
import pickle
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a file holds more than tensors.
    """
    return {
        name: tensor
        for file in sorted({*tensor_files(path).values()})
        for name, tensor in load(file).items()
    }


def read_tensor(path: Path, *names: str) -> Tensor:
    """The first of these tensors that a folder has; reads no other.

    Raises:
        FileNotFoundError: the folder holds no weights.
        ValueError: it has none of them.
    """
    files = tensor_files(path)
    whole = files.get("")
    for name in names:
        file = files.get(name, whole)
        if file is None:
            continue
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                if name in tensors.keys():
                    return tensors.get_tensor(name)
        elif name in (found := load(file)):
            return found[name]
    raise ValueError(f"{path}: wanted {' or '.join(names)}, found neither")


def tensor_files(path: Path) -> dict[str, Path]:
    """Which file holds which tensor; the name "" stands for all where there are no shards."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = path / f"{name}.index.json"
        if index.exists():
            places = json.loads(index.read_text())["weight_map"]
            return {tensor: path / file for tensor, file in places.items()}
        if (path / name).exists():
            return {"": path / name}
    raise FileNotFoundError(f"{path}: wanted model.safetensors or pytorch_model.bin, found neither")


def load(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: wanted tensors alone: {error}") from None
