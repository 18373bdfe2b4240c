"""A draft head before training: everything that the target itself can give it."""

import numpy as np
import torch
from torch import Tensor, nn

from .features import Conversation
from .head_config import Eagle3Config, HeadConfig
from .networks import Eagle2Head, Eagle3Head, Head
from .objective import Batch, run_first
from .rope import SCALINGS, scaling_type


@torch.no_grad()
def start_head(
    model, conversations: list[Conversation], draft_vocab_size: int | None
) -> Eagle2Head:
    """A head made from the target: draft vocabulary, fc by ridge regression, its last layer.

    The layer reads features, not the residual stream, and has no input norm: that norm's scale
    goes into q, k and v. What it adds starts at zero: the first prediction is the ridge fit.
    """
    head = Eagle2Head(HeadConfig(**shape_like(model, draft_vocab_size)))
    choose_ids(head, conversations)
    source, layer = model.model.layers[-1], head.layers[0]
    scale = source.input_layernorm.weight / model.model.norm.weight
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight.copy_(getattr(source.self_attn, name).weight * scale)
    layer.mlp.gate_proj.weight.copy_(source.mlp.gate_proj.weight)
    layer.mlp.up_proj.weight.copy_(source.mlp.up_proj.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    weight, bias = ridge(conversations, model.get_input_embeddings())
    head.fc.weight.copy_(weight)
    head.fc.bias.copy_(bias)
    return head


@torch.no_grad()
def start_eagle3_head(
    model, conversations: list[Conversation], draft_vocab_size: int | None
) -> Eagle3Head:
    """An EAGLE-3 head of the target's shape: its norm and lm_head, the rest at random, seeded."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle3Head(Eagle3Config(**shape_like(model, draft_vocab_size)))
    choose_ids(head, conversations)
    ids = head.draft_to_target
    head.norm.weight.copy_(model.model.norm.weight)
    head.lm_head.weight.copy_(model.lm_head.weight if ids is None else model.lm_head.weight[ids])
    return head


def shape_like(model, draft_vocab_size: int | None) -> dict:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = scaling_type(rope) in SCALINGS and scaling_type(rope) != "default"
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": dict(rope) if scaled else None,
    }


def choose_ids(head: Head, conversations: list[Conversation]) -> None:
    """Let the head draft the ids most frequent in the answers."""
    count = head.config.draft_vocab_size
    if count is not None:
        ids = frequent_ids(conversations, head.config.vocab_size, count)
        head.d2t.copy_(ids - torch.arange(count))


def frequent_ids(conversations: list[Conversation], vocab_size: int, count: int) -> Tensor:
    """The ids most frequent in the answers, ascending, int64 [count]; ties go to the lower id."""
    seen = np.zeros(vocab_size, np.int64)
    for conversation in conversations:
        np.add.at(seen, conversation.ids[conversation.prompt_len :], 1)
    best = np.argsort(-seen, kind="stable")[:count]
    return torch.from_numpy(np.sort(best))


def ridge(conversations, embed: nn.Module, rows: int = 100_000, weight_decay: float = 1e-3):
    """Fit feature p + 1 to (embedding p + 1, feature p): weight [Hd, 2Hd], bias [Hd]."""
    size = embed.weight.shape[1]
    device = embed.weight.device
    gram = torch.zeros(2 * size + 1, 2 * size + 1, device=device)
    cross = torch.zeros(2 * size + 1, size, device=device)
    seen = 0
    for conversation in conversations:
        features = torch.from_numpy(conversation.features.astype(np.float32)).to(device)
        ids = torch.from_numpy(conversation.ids[1:]).to(device)
        answer = slice(conversation.prompt_len - 1, None)
        x = torch.cat((embed(ids), features[:-1]), 1)[answer]
        x = torch.cat((x, torch.ones(len(x), 1, device=device)), 1)
        gram += x.T @ x
        cross += x.T @ features[1:][answer]
        seen += len(x)
        if seen >= rows:
            break
    gram.diagonal().add_(weight_decay * gram.diagonal().mean())
    solution = torch.linalg.solve(gram.double(), cross.double()).float()
    return solution[:-1].T, solution[-1]


@torch.no_grad()
def curvature(weight: Tensor, features: Tensor) -> Tensor:
    """How sharply the target's law answers to a change of its feature: the mean covariance, under
    that law, of the lm_head rows `weight` [Vd, Hd] over features [N, Hd] -> [Hd, Hd]."""
    weight = weight.float()
    total = torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
    for part in features.split(256):
        law = (part @ weight.T).softmax(-1)
        mean = law @ weight
        total += (weight * law.sum(0)[:, None]).T @ weight - mean.T @ mean
    return total / len(features)


@torch.no_grad()
def read_scales(head: Head, embed: nn.Module, weight: Tensor, batch: Batch) -> dict:
    """What AdamW's steps are multiplied with, by parameter: `right` [in].

    Dimensions that a matrix reads spread 20 times wider than others, hence 1 / rms.
    """
    reads: dict[str, Tensor] = {}

    def note(name: str):
        def hook(module, inputs):
            rms = inputs[0].flatten(0, -2).pow(2).mean(0).sqrt()
            reads[name] = 1 / rms.clamp_min(0.05 * float(rms.mean()))

        return hook

    linear = [(name, m) for name, m in head.named_modules() if isinstance(m, nn.Linear)]
    hooks = [module.register_forward_pre_hook(note(name)) for name, module in linear]
    run_first(head, embed, batch)
    for hook in hooks:
        hook.remove()
    return {name + ".weight": {"right": right} for name, right in reads.items()}


@torch.no_grad()
def step_scales(head: Eagle2Head, embed: nn.Module, weight: Tensor, batch: Batch) -> dict:
    """As `read_scales`, and `left` [out, out] for matrices that write features.

    Of the directions it writes, one (where all tokens' lm_head rows differ most, and features
    hardly do) sways the law 20 times more than the rest: curvature^-1/2 on the left keeps the noise
    of the steps out of it.
    """
    features = torch.cat(
        [f[p:n] for f, p, n in zip(batch.features, batch.prompt_lens, batch.lengths, strict=True)]
    )
    values, vectors = torch.linalg.eigh(curvature(weight, features))
    values = values / values.median() + 0.1
    left = (vectors * values.rsqrt()) @ vectors.T
    found = read_scales(head, embed, weight, batch) | {"fc.bias": {"left": left}}
    for name in found:
        if name == "fc.weight" or name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name]["left"] = left
    return found
