"""One rank of a tensor-parallel target: what it says, as JSON. Started by torchrun.

torchrun --nproc-per-node 2 tests/rank_worker.py MODEL OUT
"""

import json
import sys
from pathlib import Path

import eagle2
import torch
import torch.distributed as dist
from eagle2 import baseline
from eagle2.target import Target
from tiny import PROMPTS, make_pair
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

VOCAB = 64  # divides by the ranks
SAMPLED = {"temperature": 0.9, "top_k": 20, "seed": [1, 2, 3]}
PLAIN = {"max_new_tokens": 14, "pad_token_id": 0}


def pair():
    return make_pair(context=3.0, vocab_size=VOCAB)


def texts(model, head):
    """Greedy and sampled, ours and transformers' own loop around our trees."""
    said = {}
    for name, law in (("greedy", {}), ("sampled", SAMPLED)):
        result = eagle2.generate(model, head, PROMPTS, max_new_tokens=14, **law)
        said[name] = result.tokens
        said[f"{name} cycles"] = result.statistics.cycles
        said[f"{name} plain"] = baseline.generate(model, PROMPTS, max_new_tokens=14, **law).tokens
    prompt = torch.tensor(PROMPTS[:1])
    drafting = eagle2.custom_generate(head)
    for name in ("greedy", "sampled"):
        answer = model.generate(
            prompt, **PLAIN, do_sample=name == "sampled", custom_generate=drafting
        )
        said[f"generate {name}"] = answer.tolist()
    return said


def main():
    torch.set_num_threads(1)
    config = DistributedConfig(tp_size=2)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=config)
    head, rank = pair()[1], dist.get_rank()
    target = Target(model)
    report = {"kv_heads": target.kv_heads}
    torch.manual_seed(rank)  # random numbers of ranks differ
    report["texts"] = texts(model, head)

    # a rank whose logits are not those of the first
    original = Target.logits
    if rank:
        Target.logits = lambda self, hidden: original(self, hidden).roll(1, -1)
    report["texts of unequal logits"] = texts(model, head)
    Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
