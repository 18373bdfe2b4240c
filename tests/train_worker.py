"""One process of a training run. Started by torchrun; given a STEP, the last one dies in it.

torchrun --nproc-per-node 2 tests/train_worker.py MODEL ANSWERS OUT [STEP]
"""

import os
import sys

import torch
from eagle2.objective import Objective
from eagle2.train import train
from torch import distributed
from transformers import AutoModelForCausalLM

OPTIONS = {
    "steps": 14, "batch_tokens": 96, "draft_vocab_size": 48, "warmup": 5, "learning_rate": 3e-3,
    "autocast": False, "checkpoint_every": 4,
}  # fmt: skip


def die_in(step: int) -> None:
    loss, calls = Objective.loss, []

    def counted(*arguments):
        calls.append(1)
        if len(calls) == step:
            os._exit(9)
        return loss(*arguments)

    Objective.loss = counted


def main():
    model, answers, out, *step = sys.argv[1:]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    if step and distributed.get_rank():
        die_in(int(step[0]))
    target = AutoModelForCausalLM.from_pretrained(model).requires_grad_(False)
    train(target, [answers], out, **OPTIONS)


if __name__ == "__main__":
    main()
