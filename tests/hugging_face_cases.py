"""`model.generate` through draft trees, each way to plug them in."""

import eagle2
import pytest
import torch
from eagle2 import TreeConfig
from tiny import make_pair

PROMPT = torch.tensor([[5, 6, 7, 8]])
# left-padded: rows of 5, 3 and 1 tokens
PADDED = torch.tensor([[11, 12, 13, 14, 15], [0, 0, 5, 6, 7], [0, 0, 0, 0, 9]])
MASK = (PADDED != 0).long()
TREE = TreeConfig(3, 4, 16)
COMMON = {"max_new_tokens": 20, "pad_token_id": 0, "do_sample": False}


@pytest.fixture(scope="module", name="pair")
def a_pair():
    return make_pair(context=3.0)


@pytest.fixture(name="ours", params=["custom_generate", "attached"])
def each_way(request, pair):
    """`generate` of the model with draft trees, each way to plug them in."""
    model, head = pair

    def generate(**options):
        if request.param == "custom_generate":
            options["custom_generate"] = eagle2.custom_generate(head, TREE)
            return model.generate(**options)
        with eagle2.attached(model, head, TREE):
            return model.generate(**options)

    generate.way = request.param
    return generate


def inputs(batch):
    if batch == 1:
        return {"input_ids": PROMPT}
    return {"input_ids": PADDED, "attention_mask": MASK}
