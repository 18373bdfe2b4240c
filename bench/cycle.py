"""All tree management of a cycle, the networks' answers given, against `eagle_steps.py`."""

import random
from types import SimpleNamespace

import cases
import eagle_steps
import torch
from cases import ACCEPTED, LAYERS, PREFIX
from eagle2.cache import KVCache
from eagle2.decode import budgets, commit
from eagle2.drafter import Drafter, TreeConfig
from eagle2.heads import HeadConfig
from eagle2.requests import Requests, Statistics
from eagle2.rows import take_rows
from timing import Case, Shape, require, set_count
from torch import Tensor

import eagle2_kernels
from eagle2_kernels import reference
from eagle2_kernels.reference.words import unpack

HEADS, HEAD_DIM, FEATURES = 32, 128, 4096


class Networks:
    """Stands for target and head: answers each pass of the drafter with what it was given."""

    dtype, device, hidden_size, num_layers = torch.float32, torch.device("cpu"), FEATURES, 1
    draft_to_target = embed_tokens = None

    def __init__(self, vocab: int):
        self.vocab_size = vocab
        self.config = HeadConfig(vocab, FEATURES, 1, HEADS, HEADS)
        self.fc = SimpleNamespace(weight=torch.empty(0))
        self.levels: list[Tensor] = []  # [1, L, V] each
        self.hidden = torch.empty(0)  # [1, L, F]
        self.level = 0

    def embed(self, tokens: Tensor) -> Tensor:
        return tokens

    def features(self, features: Tensor) -> Tensor:
        return features

    def to_logits(self, lm_head):
        return lm_head

    def lm_head(self, hidden: Tensor) -> Tensor:
        self.level += 1
        return self.levels[self.level - 1][:, : hidden.shape[1]]

    def __call__(self, tokens, features, positions, attend) -> Tensor:
        return self.hidden[:, : tokens.shape[1]]


class Cycle:
    """What `decode` does in a cycle but for the networks, on given logits.

    Args:
        shape: batch 1, on the CPU, float32.
        capacity: committed slots.
        kv_heads: G.
    """

    def __init__(self, shape: Shape, capacity: int, kv_heads: int):
        self.shape, self.networks, self.capacity = shape, Networks(shape.vocab), capacity
        self.config = TreeConfig(shape.top_k, shape.depth, shape.nodes, shape.early_stop)
        where = (torch.float32, torch.device("cpu"))
        self.cache = KVCache.allocate(LAYERS, 1, capacity, kv_heads, HEAD_DIM, *where)
        self.drafters = {}
        self.requests, self.statistics = Requests([[1]], 2**60, [], 2**61), Statistics()
        self.sampling = cases.sampling(shape)

    def draft(self, ops, levels, hidden, root, prefix):
        networks = self.networks
        networks.levels, networks.hidden, networks.level = levels, hidden, 0
        if ops not in self.drafters:
            self.drafters[ops] = Drafter(networks, networks, self.config, 1, self.capacity, ops)
        sizes, depth = budgets(self.requests, [prefix], self.capacity, self.config)
        num_nodes = torch.tensor(sizes, dtype=torch.int32)
        prefix_len = torch.tensor([prefix], dtype=torch.int32)
        candidates = self.drafters[ops].draft(
            hidden[:, :1], prefix_len, prefix, num_nodes, depth, lambda stage: None
        )
        return ops.rerank(candidates, root, num_nodes, max(sizes)), prefix_len, depth, sizes

    def run(self, ops, levels, logits, hidden, features, root, prefix):
        """Returns tokens and parents of the tree, path, accepted drafts and next token."""
        tree, prefix_len, depth, sizes = self.draft(ops, levels, hidden, root, prefix)
        self.cache.slots(prefix_len, tree.num_nodes, tree.tokens.shape[1])
        positions = prefix_len[:, None] + tree.depths.long() + 1
        accepted = ops.accept(tree, logits, *self.sampling, positions, depth)
        path, accept_length, bonus, tokens = accepted
        ops.compact_kv(self.cache.k, self.cache.v, path, accept_length, prefix_len)
        counts = commit(
            self.requests, self.statistics, tokens.tolist(), accept_length.tolist(), sizes
        )
        width = max(counts)
        confirmed = take_rows(features, path[:, :width].clamp(min=0).long())
        count = torch.tensor(counts, dtype=torch.int32)
        self.drafters[ops].extend(
            tokens[:, :width].clamp(min=0), confirmed, prefix_len, count, prefix
        )
        return tree.tokens, tree.parents, path, accept_length, bonus


def cycle(shape: Shape) -> Case:
    """Tree management of a cycle; its trees and paths are those of the public reference's steps."""
    k, nodes, vocab = shape.top_k, shape.nodes, shape.vocab
    count = min(set_count(4 * vocab * (1 + (shape.depth - 1) * k + nodes)), 5)
    slots = PREFIX + (count + 1) * nodes
    kv_heads = 8 if vocab > 100_000 else HEADS
    ours = Cycle(shape, slots, kv_heads)
    kv = torch.zeros(2 * LAYERS, 1, kv_heads, slots, HEAD_DIM)
    temperature, root = float(shape.law != "greedy"), torch.tensor([7])

    def theirs(levels, logits, hidden, features, root, prefix):
        rows = [level[0] for level in levels]
        return eagle_steps.cycle(
            rows, logits, hidden[:, :k], features, kv, root, prefix, k, nodes, temperature
        )

    sets = []
    for number in range(count):
        levels = [shape.normal(1, 1 if level == 0 else k, vocab) for level in range(shape.depth)]
        logits, hidden = shape.normal(1, nodes, vocab), torch.randn(1, k + shape.depth, FEATURES)
        prefix = PREFIX + number * nodes
        tree, *_ = ours.draft(reference, levels, hidden, root, prefix)
        cases.arrange(tree, logits)
        sets.append((levels, logits, hidden, torch.randn(1, nodes, FEATURES), root, prefix))
    random.seed(0)
    *_, path, accepted, bonus = ours.run(eagle2_kernels, *sets[-1])
    found = theirs(*sets[-1])
    require("cycle, nodes of eagle_steps", found.tree.tokens, tree.tokens)
    seen = unpack(tree.ancestors, nodes)[None].float()
    require("cycle, mask of eagle_steps", found.tree.mask, seen)
    require("cycle, accepted drafts", int(accepted), min(ACCEPTED, int(tree.depths.max())))
    require("cycle, path of eagle_steps", found.path, path[0, : int(accepted) + 1].long())
    if temperature == 0:
        require("cycle, next token of eagle_steps", found.next_token, bonus)
    goal = {"greedy": 25, "sampled": 10}[shape.law]
    return Case(sets, ours.run, "eagle_steps", theirs, goal=goal)
