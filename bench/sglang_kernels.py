"""What the kernels of the SGLang plugin compile to, a JSON object a line; needs no GPU.

python bench/sglang_kernels.py
"""

import json

import torch
from compile_report import INT32, INT64, launches, meta, report

from eagle2_kernels.integrations import sglang_triton_link, sglang_triton_walk


@launches
def link_tree():
    for nodes, mode in ((8, 2), (16, 2), (32, 2), (60, 0), (60, 1)):
        lists = meta(2, 71, dtype=INT64), meta(2, nodes - 1, dtype=INT64), meta(2, dtype=INT64)
        mask, links = meta(65536, dtype=torch.uint8), [meta(2, nodes, dtype=INT64)] * 3
        written = mask, meta(2 * nodes, dtype=INT64), *links
        yield (
            f"n={nodes} mode={mode}",
            lambda x=(*lists, *written), m=mode: sglang_triton_link.link_tree(*x, 10, 7, m),
        )


@launches
def walks():
    nodes, steps = 60, 8
    out = meta(2 * nodes, dtype=INT32), meta(2, steps, dtype=INT32), meta(2, dtype=INT32)
    tree = [meta(2, nodes, dtype=INT64)] * 4
    yield "greedy", lambda: sglang_triton_walk.walk_greedy(*out, *tree, tree[0])
    coins = meta(2, nodes), meta(2)
    for vocab, drafted in ((128256, False), (128256, True), (32001, False), (32001, True)):
        probs = meta(2, nodes, vocab)
        laws = probs, probs if drafted else None
        yield (
            f"V={vocab} draft={drafted}",
            lambda x=laws: sglang_triton_walk.walk_sampled(*out, *tree, *coins, *x, 1.0, 1.0),
        )


if __name__ == "__main__":
    for row in report([link_tree.__name__, walks.__name__]):
        print(json.dumps(row._asdict()), flush=True)
