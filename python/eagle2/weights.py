"""Tensors of a folder: `model.safetensors` or `pytorch_model.bin`, in one file or in shards."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from .checks import read_json

# what the readers make of a file that is not whole
DAMAGED = (SafetensorError, RuntimeError, EOFError, OSError, LookupError, ValueError)


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
            places = read_json(index).get("weight_map")
            if not isinstance(places, dict) or any(Path(f).name != f for f in places.values()):
                raise ValueError(f"{index}: wanted a weight_map of names of files beside it")
            return {tensor: path / file for tensor, file in places.items()}
        if (path / name).exists():
            return {"": path / name}
    raise FileNotFoundError(f"{path}: wanted model.safetensors or pytorch_model.bin, found neither")


def load(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: wanted weights, found no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path, str(device))
        found = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path}: wanted tensors alone: {error}") from None
    except DAMAGED as error:
        raise ValueError(f"{path}: damaged or cut short: {type(error).__name__} {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: wanted tensors by name, got {type(found).__name__}")
    return found
