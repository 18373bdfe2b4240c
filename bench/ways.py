"""Ways of decoding that the bench compares, by name."""

from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import eagle2
from ablations import without
from eagle2 import EAGLE1_CHOICES, TreeConfig

import eagle2_kernels

# the likeliest of EAGLE-1's nodes to be accepted, for machines where a row costs a lot
BEST5 = [[0], [1], [0, 0], [0, 0, 0], [2]]
STATIC = {"eagle1": EAGLE1_CHOICES, "static5": BEST5}
ABLATIONS = {"-value": ("value",), "-rerank": ("rerank",), "-value-rerank": ("value", "rerank")}
USUAL = ("1,4,5", "eagle1", "10,6,60", "3,4,6")


class Way(NamedTuple):
    """A tree, and operators to grow it with."""

    config: TreeConfig
    ops: ModuleType | SimpleNamespace = eagle2_kernels

    def generate(self, model, head, row: list[int], **options):
        rows = [row]
        return eagle2.generate(model, head, rows, tree=self.config, ops=self.ops, **options)


def way(name: str) -> Way:
    """TOP_K,DEPTH,NUM_NODES, less a stage or two: 10,6,60-value-rerank; or a static tree's name.

    Raises:
        ValueError: it is none of these.
    """
    if name in STATIC:
        return Way(TreeConfig.static(STATIC[name]))
    size, dash, stages = name.partition("-")
    try:
        top_k, depth, num_nodes = map(int, size.split(","))
        ops = without(*ABLATIONS[dash + stages]) if dash else eagle2_kernels
        return Way(TreeConfig(top_k, depth, num_nodes), ops)
    except (ValueError, KeyError):
        raise ValueError(
            f"--tree: wanted TOP_K,DEPTH,NUM_NODES, that with one of {', '.join(ABLATIONS)}, "
            f"or one of {', '.join(STATIC)}; got {name!r}"
        ) from None


def ways(names: list[str], ablate: bool) -> dict[str, Way]:
    """All that are named; with `ablate`, every dynamic tree less each stage too."""
    found = {name: way(name) for name in names}
    if ablate:
        wide = [name for name, (config, _) in found.items() if config.top_k > 1]
        wide = [name for name in wide if name not in STATIC and "-" not in name]
        found |= {name + less: way(name + less) for name in wide for less in ABLATIONS}
    return found
