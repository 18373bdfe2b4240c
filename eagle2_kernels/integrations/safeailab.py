"""Our operators inside a live model of SafeAILab/EAGLE (EAGLE-1, -2 and -3, main of 2026).

    from eagle2_kernels.integrations import safeailab
    safeailab.patch(ea_model)  # an EaModel; eagenerate and ea_generate go on as they are

Batch 1, as there. The networks, the loop and the meaning of every returned value stay; the tree
part of `topK_genrate`, the mask and the retrieve indices, `evaluate_posterior` and
`update_inference_inputs` become ours. Trees differ from the original's on ties only (it selects
with torch.topk in the head's own dtype and can lose a node's parent). Sampling follows the same law
with other random numbers, those of torch.
"""

import inspect
import sys
import weakref
from functools import partial, wraps
from types import ModuleType

import torch
from torch import Tensor, nn

from .. import ops
from ..layouts import to_safeailab
from ..tree import Candidates, Tree

FUNCTIONS = ("evaluate_posterior", "update_inference_inputs")
_models = weakref.WeakSet()  # those that are patched
_originals: dict[ModuleType, dict] = {}


def patch(ea_model: nn.Module) -> None:
    """Make this model's tree management ours; again does nothing.

    The two functions that its module calls are replaced in the module. For other models of the
    module `update_inference_inputs` stays what it was.

    Raises:
        ValueError: no EaModel, or one of a version whose functions take other arguments.
    """
    if ea_model in _models:
        return
    module = _module_of(ea_model)
    layer = ea_model.ea_layer
    draft_to_target = None
    if hasattr(layer, "d2t"):  # kept as offsets
        draft_to_target = layer.d2t + torch.arange(len(layer.d2t), device=layer.d2t.device)
    layer.topK_genrate = partial(draft_tree, layer, draft_to_target)
    if module not in _originals:
        originals = {name: getattr(module, name) for name in FUNCTIONS}
        _originals[module] = originals
        module.evaluate_posterior = evaluate_posterior
        original = originals["update_inference_inputs"]
        module.update_inference_inputs = wraps(original)(partial(_update_if_patched, original))
    _models.add(ea_model)


def unpatch(ea_model: nn.Module) -> None:
    """Undo `patch`; a model that is not patched stays as it is."""
    if ea_model not in _models:
        return
    _models.discard(ea_model)
    del ea_model.ea_layer.topK_genrate
    module = _module_of(ea_model, check=False)
    if not any(_module_of(other, check=False) is module for other in _models):
        for name, original in _originals.pop(module).items():
            setattr(module, name, original)


def _module_of(ea_model: nn.Module, check: bool = True) -> ModuleType:
    """Where the model's class was written: the module whose functions its loop calls."""
    modules = [sys.modules[kind.__module__] for kind in type(ea_model).__mro__]
    found = [module for module in modules if all(hasattr(module, name) for name in FUNCTIONS)]
    if not found or not hasattr(ea_model, "ea_layer"):
        raise ValueError(f"ea_model: wanted SafeAILab's EaModel, got {type(ea_model).__name__}")
    for name in FUNCTIONS if check else ():
        there = [*inspect.signature(getattr(found[0], name)).parameters]
        here = [*inspect.signature(globals()[name]).parameters]
        if there != here:
            raise ValueError(
                f"ea_model: wanted {name}({', '.join(here)}), got ({', '.join(there)})"
            )
    return found[0]


@torch.no_grad()
def draft_tree(
    layer: nn.Module,
    draft_to_target: Tensor | None,
    hidden_states: Tensor,
    input_ids: Tensor,
    head: nn.Module,
    logits_processor=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`topK_genrate`: draft_tokens [1, m], retrieve_indices [L, D], tree_mask [1, 1, m, m], depths.

    The retrieve indices and the mask are on the host, as the original's, and m can be smaller than
    total_tokens + 1 where the draft knows fewer continuations.
    """
    k, device = layer.top_k, hidden_states.device
    input_ids = input_ids.to(device)
    root, input_ids = input_ids[:, -1], input_ids[:, 1:]
    length = input_ids.shape[1]  # draft positions are one below the target's
    layer.reset()
    cache = getattr(layer, "stable_kv", None)
    known = 0 if cache is None else cache[0][0].shape[2]
    out, cache = layer(
        hidden_states, input_ids=input_ids[:, known:], past_key_values=cache, use_cache=True
    )
    layer.stable_kv = cache

    hidden = out[:, -1:]
    scores = torch.zeros((1, 1), device=device)
    numbers = torch.full((1, 1), -1, dtype=torch.int32, device=device)  # of the leaves: the root
    levels, drafted, mask = [], 0, None
    for level in range(layer.depth + 1):
        logits = layer.lm_head(layer.norm(hidden)) if hasattr(layer, "lm_head") else head(hidden)
        tokens, grown = (x.flatten(1) for x in ops.expand(logits, scores, k, draft_to_target))
        levels.append((tokens, grown, numbers.repeat_interleave(k, 1)))
        if level == layer.depth:
            break
        index = ops.select_leaves(grown, k)
        numbers, drafted = drafted + index, drafted + grown.shape[1]
        tokens, scores = tokens.gather(1, index.long()), grown.gather(1, index.long())
        rows, own = index[0].long() // k, layer.tree_mask_init
        mask = own if level == 0 else torch.cat((mask[:, :, rows], own), 3)
        layer.tree_mask = mask
        hidden, cache = layer(
            hidden[:, rows], input_ids=tokens, past_key_values=cache,
            position_ids=length + level + layer.position_ids, use_cache=True,
        )  # fmt: skip
    drafted = Candidates(*(torch.cat(fields, 1) for fields in zip(*levels, strict=True)))
    tree = ops.rerank(drafted, root, layer.total_tokens + 1)
    return _buffers(tree, layer.depth + 1, logits_processor is not None)


def _buffers(tree: Tree, depth: int, in_order: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tree as the original returns it, after one read to the host."""
    fields = (tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.num_nodes)
    read = torch.cat([field.flatten().long() for field in fields]).cpu()
    pieces = read.split([field.numel() for field in fields])
    tokens, parents, depths, ancestors, num_nodes = (
        piece.view(field.shape) for piece, field in zip(pieces, fields, strict=True)
    )
    host = Tree(tokens, parents, depths, ancestors, tree.scores, num_nodes)
    mask, _, lines, num_paths = to_safeailab(host, depth)
    count = int(num_nodes)
    lines = lines[0, : int(num_paths), : int(depths.max()) + 1]
    if in_order:
        paths = [[node if node >= 0 else count for node in line] for line in lines.tolist()]
        lines = lines[sorted(range(len(paths)), key=paths.__getitem__)]
    positions = tree.depths[0, :count].long()
    return tree.tokens[:, :count], lines, mask[:, :, :count, :count], positions


def evaluate_posterior(
    logits: Tensor, candidates: Tensor, logits_processor
) -> tuple[Tensor, Tensor | int, Tensor]:
    """best_candidate, accept_length and sample_p [V], of logits [L, D, V] and candidates [L, D].

    Sampling: at each node draw from the target's own law, go on if a child has what was drawn.
    Otherwise sample_p is that law without the children, so that drawing from it is exact.
    """
    candidates = candidates.to(logits.device)
    if logits_processor is None:
        matches = candidates[:, 1:] == logits[:, :-1].argmax(-1)
        lengths = matches.int().cumprod(1).sum(1)
        best, accept_length = lengths.argmax(), lengths.max()
        last = (best * logits.shape[1] + accept_length)[None]
        return best, accept_length, logits.flatten(0, 1).index_select(0, last)[0]

    best, accept_length = 0, 0
    alive = torch.ones(len(candidates), dtype=torch.bool, device=logits.device)
    while True:
        row = logits[best, accept_length][None]
        law = logits_processor(None, row)[0].float().softmax(-1)
        if accept_length + 1 == candidates.shape[1]:
            break
        tokens = candidates[:, accept_length + 1]
        match = alive & (tokens == torch.multinomial(law, 1))
        found, first = torch.stack((match.any().long(), match.int().argmax())).tolist()
        if not found:
            # the column behind the vocabulary, also known as -1, takes what fills paths up
            taken = torch.zeros(len(law) + 1, dtype=torch.bool, device=law.device)
            taken[torch.where(alive, tokens, -1)] = True
            law = law.masked_fill(taken[:-1], 0)
            break
        alive, best, accept_length = match, first, accept_length + 1
    return torch.tensor(best), accept_length, law / law.sum()


@torch.no_grad()
def update_inference_inputs(
    input_ids: Tensor,
    candidates: Tensor,
    best_candidate: Tensor,
    accept_length: Tensor | int,
    retrieve_indices: Tensor,
    logits_processor,
    new_token: Tensor | int,
    past_key_values_data_list: list[Tensor],
    current_length_data: Tensor,
    model: nn.Module,
    hidden_state_new: Tensor,
    sample_p: Tensor,
) -> tuple:
    """Commit the path: tokens, cache rows and features; then draw the next root and draft."""
    length = input_ids.shape[1]
    best, count = int(best_candidate), int(accept_length) + 1
    nodes = retrieve_indices[best, :count]
    path = retrieve_indices[best : best + 1].to(torch.int32)
    input_ids = torch.cat((input_ids, candidates[best, :count].to(input_ids.device)[None]), 1)
    for cache in past_key_values_data_list:  # [2 * layers, 1, kv heads, S, E], keys and values
        sizes = torch.tensor([[count - 1], [length]], dtype=torch.int32, device=cache.device)
        keys, values = cache[0::2].transpose(2, 3), cache[1::2].transpose(2, 3)
        ops.compact_kv(keys, values, path.to(cache.device), sizes[0], sizes[1])
    current_length_data.fill_(length + count)
    features = hidden_state_new[:, nodes.to(hidden_state_new.device)]
    token = (sample_p.argmax(-1, keepdim=True) if logits_processor is None
             else torch.multinomial(sample_p, 1))[None]  # fmt: skip
    drafted = model.ea_layer.topK_genrate(
        features,
        input_ids=torch.cat((input_ids, token.to(input_ids.device)), 1),
        head=model.base_model.lm_head,
        logits_processor=logits_processor,
    )
    return input_ids, *drafted, new_token + accept_length + 1, None, token


def _update_if_patched(original, *args, **keywords):
    model = inspect.signature(original).bind(*args, **keywords).arguments["model"]
    return (update_inference_inputs if model in _models else original)(*args, **keywords)
