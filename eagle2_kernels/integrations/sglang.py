"""EAGLE trees inside SGLang 0.5.23, as a plugin: exact order, trees that are always connected.

    SGLANG_PLUGINS=eagle2_kernels python -m sglang.launch_server --speculative-algorithm EAGLE ...

The functions below have the signatures, dtypes and shapes of those they replace, read nothing back
to the host, and can be captured in a CUDA graph. They differ from SGLang's where its choices are
not defined: on ties, on scores closer than float32 rounding, on NaN and on p > 1. There SGLang can
keep a node whose parent it dropped, and then read or write out of bounds.

Scores are sums of logarithms here: `select_top_k_tokens` and `organize_draft_results` go together.
"""

import os
from functools import wraps

import torch
from torch import Tensor

from ..layouts import FULL_MASK, QLEN_ONLY_BITPACKING
from . import sglang_ops  # noqa: F401
from .sglang_cpu import item_size
from .sglang_draft import organize_draft_results, select_top_k_tokens

PLUGIN = "eagle2_kernels"
walks = torch.ops.eagle2_sglang


def build_tree_kernel_efficient(
    bonus_tokens: Tensor,
    parent_list: Tensor,
    top_scores_index: Tensor,
    draft_tokens: Tensor,
    seq_lens: Tensor,
    seq_lens_sum: int,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int = FULL_MASK,
    tree_mask_buf: Tensor | None = None,
    fill_prefix_mask: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mask, positions and links of the chosen nodes.

    A node whose parent was not chosen gets no links, so it is never accepted. Whatever the lists
    say, the climb to the root ends after spec_steps steps.

    Raises:
        ValueError: packing with more than 32 nodes.
    """
    batch, device, nodes = len(seq_lens), seq_lens.device, num_verify_tokens
    mask_mode = int(tree_mask_mode)
    if mask_mode == QLEN_ONLY_BITPACKING and nodes > 32:
        raise ValueError(f"num_verify_tokens: wanted 32 or fewer to pack them, got {nodes}")
    tree_mask = tree_mask_buf
    if tree_mask is None and mask_mode == QLEN_ONLY_BITPACKING:
        packed = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[item_size(nodes)]
        tree_mask = torch.empty(batch * nodes, dtype=packed, device=device)
    elif tree_mask is None:
        keys = batch * nodes + (seq_lens_sum if mask_mode == FULL_MASK else 0)
        tree_mask = torch.empty(nodes * keys, dtype=torch.bool, device=device)
    if mask_mode == FULL_MASK and fill_prefix_mask:
        tree_mask.fill_(True)
    links = torch.empty((3, batch, nodes), dtype=torch.int64, device=device)
    positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
    cells = tree_mask.view(-1).view(torch.uint8)
    walks.link_tree(
        parent_list, top_scores_index, seq_lens, cells, positions, *links, topk, spec_steps,
        mask_mode,
    )  # fmt: skip
    tokens = torch.cat((bonus_tokens[:, None], draft_tokens), 1).flatten()
    return tree_mask, positions, *links, tokens


def both_spellings(function):
    """Keywords may say `retrive_`, as SGLang's kernels do, or `retrieve_`."""

    @wraps(function)
    def respelled(*args, **keywords):
        keywords = {key.replace("retrive_", "retrieve_"): x for key, x in keywords.items()}
        return function(*args, **keywords)

    return respelled


@both_spellings
def verify_tree_greedy_func(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk along the target's argmax; the first matching sibling wins."""
    tree = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    walks.walk_greedy(
        predicts, accept_index, accept_token_num, *map(rows, tree), target_predict.contiguous()
    )
    return predicts, accept_index, accept_token_num


@both_spellings
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept a child by its share of the target's law; lossless with both thresholds at 1.

    A child without probability is never accepted. Refused children are remembered by their number,
    so draft_probs may be None instead of zeros, and is not written. Always deterministic.
    """
    tree = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    walks.walk_sampled(
        predicts, accept_index, accept_token_num, *map(rows, tree), rows(uniform_samples),
        uniform_samples_for_final_sampling.contiguous(), rows(target_probs),
        None if draft_probs is None else rows(draft_probs), threshold_single, threshold_acc,
    )  # fmt: skip


def rows(x: Tensor) -> Tensor:
    """As it is where its innermost dimension is dense, else a dense copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def move_accept_tokens_to_target_kvcache(
    batch, accept_index: Tensor, num_correct_drafts: Tensor, token_to_kv_pool_allocator
) -> None:
    """Move the cache rows of the accepted path to the front of each request's window.

    What is not accepted moves slot 0, where SGLang writes what nobody reads, onto itself.
    """
    window = batch.out_cache_loc.view(len(batch.seq_lens), -1).long()
    step = torch.arange(accept_index.shape[1], device=window.device)
    kept = (accept_index >= 0) & (step <= num_correct_drafts[:, None])
    source = window.flatten()[accept_index.clamp(min=0).long()]
    target = window.gather(1, step.clamp(max=window.shape[1] - 1).expand_as(kept))
    token_to_kv_pool_allocator.get_kvcache().move_kv_cache(
        torch.where(kept, target, 0).flatten(), torch.where(kept, source, 0).flatten()
    )


REPLACEMENTS = {
    "sglang.srt.speculative.eagle_utils.organize_draft_results": organize_draft_results,
    "sglang.srt.speculative.eagle_utils.build_tree_kernel_efficient": build_tree_kernel_efficient,
    "sglang.srt.speculative.spec_utils.select_top_k_tokens": select_top_k_tokens,
    "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache":
        move_accept_tokens_to_target_kvcache,
    "sglang.kernels.ops.speculative.spec_tree.verify_tree_greedy_func": verify_tree_greedy_func,
    "sglang.kernels.ops.speculative.sampling.tree_speculative_sampling_target_only":
        tree_speculative_sampling_target_only,
}  # fmt: skip


def register() -> None:
    """Entry point of SGLang's plugin group `sglang.srt.plugins`.

    SGLang loads every installed plugin; this one does something only where SGLANG_PLUGINS, SGLang's
    own list of wanted plugins, names it.
    """
    if PLUGIN not in [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")]:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, function in REPLACEMENTS.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    if torch.version.hip:
        _sample_on_rocm(HookRegistry, HookType)


def _sample_on_rocm(HookRegistry, HookType) -> None:
    """SGLang has no sampling verification for ROCm and verifies greedily there; this one has."""
    from sglang.srt.speculative import eagle_utils

    # not through the registry: it would replace every None of every module
    if eagle_utils.tree_speculative_sampling_target_only is None:
        eagle_utils.tree_speculative_sampling_target_only = tree_speculative_sampling_target_only
    HookRegistry.register(
        "sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        lambda *, is_all_greedy, **platform: is_all_greedy,
        HookType.REPLACE,
    )
