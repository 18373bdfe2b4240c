"""What the commands decode with: a target, its head, the size of the trees."""

import functools
from pathlib import Path

import torch
from transformers import PreTrainedModel

from . import embedded
from .decode import generate as decode
from .drafter import TreeConfig
from .heads import load_head
from .networks import Head
from .profile import Profile
from .requests import Generation
from .target import Target


class Engine:
    """A target, its head and the size of its trees, as the options name them."""

    def __init__(
        self, model: Path | None, head: Path | None, tree: str | None, threads: int | None
    ):
        if (model is None) != (head is None):
            raise ValueError("--model and --head: wanted both or neither, got one")
        if threads:
            torch.set_num_threads(threads)
        self.model, self.tokenizer = embedded.load_target(model)
        self.head = load_head(head or embedded.HEAD, self.model.dtype)
        self.shape, self.default = tree, TreeConfig() if model else embedded.TREE
        self.target = Target(self.model)

    @functools.cached_property
    def tree(self) -> TreeConfig:
        """Of `auto`, by the profile for the weights as they are now, packed or not."""
        return tree_config(self.shape, self.default, self.model, self.head)

    def generate(self, rows: list[list[int]], **options) -> Generation:
        return decode(self.model, self.head, rows, tree=self.tree, **options)


def tree_config(
    text: str | None, default: TreeConfig, model: PreTrainedModel, head: Head
) -> TreeConfig:
    if text is None:
        return default
    if text == "auto":
        return TreeConfig.auto(Profile.find(model, head))
    if text.endswith(".json"):
        return TreeConfig.auto(Profile.read(Path(text)))
    try:
        top_k, depth, num_nodes = map(int, text.split(","))
    except ValueError:
        wanted = "TOP_K,DEPTH,NUM_NODES, auto, or a profile's FILE.json"
        raise ValueError(f"--tree: wanted {wanted}, got {text!r}") from None
    return TreeConfig(top_k, depth, num_nodes)
