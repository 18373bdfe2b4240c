"""What the commands decode with: a target, its head, the size of the trees."""

from pathlib import Path

import torch

from . import embedded
from .decode import generate as decode
from .drafter import TreeConfig
from .heads import load_head
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
        self.tree = tree_config(tree, TreeConfig() if model else embedded.TREE)
        self.target = Target(self.model)

    def generate(self, rows: list[list[int]], **options) -> Generation:
        return decode(self.model, self.head, rows, tree=self.tree, **options)


def tree_config(text: str | None, default: TreeConfig) -> TreeConfig:
    if text is None:
        return default
    try:
        top_k, depth, num_nodes = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"--tree: wanted TOP_K,DEPTH,NUM_NODES, got {text!r}") from None
    return TreeConfig(top_k, depth, num_nodes)
