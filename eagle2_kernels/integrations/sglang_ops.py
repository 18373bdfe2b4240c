"""SGLang's three walks over a tree behind PyTorch's dispatcher: `torch.ops.eagle2_sglang`."""

import torch

from . import sglang_cpu

library = torch.library.Library("eagle2_sglang", "DEF")
library.define(
    "link_tree(Tensor parent_list, Tensor selected, Tensor seq_lens, Tensor(a!) tree_mask, "
    "Tensor(b!) positions, Tensor(c!) retrieve_index, Tensor(d!) next_token, "
    "Tensor(e!) next_sibling, int topk, int depth, int mask_mode) -> ()"
)
WALK = (
    "Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, "
    "Tensor candidates, Tensor retrieve_index, Tensor next_token, Tensor next_sibling"
)
library.define(f"walk_greedy({WALK}, Tensor target_predict) -> ()")
library.define(
    f"walk_sampled({WALK}, Tensor uniform_samples, Tensor uniform_samples_for_final_sampling, "
    "Tensor target_probs, Tensor? draft_probs, float threshold_single, float threshold_acc) -> ()"
)


NAMES = ("link_tree", "walk_greedy", "walk_sampled")
for name in NAMES:
    torch.library.register_fake(f"eagle2_sglang::{name}", lambda *args: None)


def dispatch(form, key: str) -> None:
    for name in NAMES:
        if function := getattr(form, name, None):
            library.impl(name, function, key)


dispatch(sglang_cpu, "CPU")
try:
    from . import sglang_triton_link, sglang_triton_walk
except ImportError:  # no Triton: CUDA tensors have no form here
    pass
else:
    dispatch(sglang_triton_link, "CUDA")
    dispatch(sglang_triton_walk, "CUDA")
