"""Ways of decoding that the bench compares, by name."""

from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import eagle2
from ablations import without
from eagle2 import EAGLE1_CHOICES, TreeConfig
from eagle2.engine import tree_config

# those of EAGLE-1's nodes that the embedded model accepts most often, on prompts.jsonl: for
# machines where a row costs a lot
BEST5 = [[0], [1], [0, 0], [0, 0, 0], [2]]
STATIC = {"eagle1": EAGLE1_CHOICES, "static5": BEST5}
ABLATIONS = {"-value": ("value",), "-rerank": ("rerank",), "-value-rerank": ("value", "rerank")}
USUAL = ("1,4,5", "eagle1", "10,6,60", "3,4,6")


class Way(NamedTuple):
    """A tree, and operators to grow it with."""

    config: TreeConfig
    ops: ModuleType | SimpleNamespace | None = None

    def generate(self, model, head, row: list[int], **options):
        rows = [row]
        return eagle2.generate(model, head, rows, tree=self.config, ops=self.ops, **options)


def way(name: str, model=None, head=None) -> Way:
    """TOP_K,DEPTH,NUM_NODES, less a stage or two: 10,6,60-value-rerank; or a static tree's name.

    Also auto or a profile's file, for a model and its head as they are now.

    Raises:
        ValueError: it is none of these.
        FileNotFoundError: there is no profile.
    """
    if name in STATIC:
        return Way(TreeConfig.static(STATIC[name]))
    size, dash, stages = name.partition("-")
    if dash + stages in ABLATIONS:
        return Way(tree_config(size, None, model, head), without(*ABLATIONS[dash + stages]))
    try:
        return Way(tree_config(name, None, model, head))
    except ValueError as error:
        more = ", ".join((*STATIC, *(f"...{less}" for less in ABLATIONS)))
        raise ValueError(f"{error} (here also {more})") from None


def ways(names: list[str], ablate: bool, model, head) -> dict[str, Way]:
    """All that are named; with `ablate`, every tree of EAGLE-2 less each stage too."""
    found = {name: way(name, model, head) for name in names}
    if ablate:
        whole = [name for name in names if name[0].isdigit() and "-" not in name]
        wide = [name for name in whole if found[name].config.top_k > 1]
        found |= {name + less: way(name + less) for name in wide for less in ABLATIONS}
    return found
