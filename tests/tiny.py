"""Small random targets, and heads that hit them never, sometimes or always."""

import eagle2
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 61
SURENESS = 12.0
PROMPTS = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12, 13, 14, 15]]


def make_target(
    seed=0, dtype=torch.float32, config=LlamaConfig, model=LlamaForCausalLM, scale=4.0, **changes
):
    """A causal LM in evaluation mode; weights `scale` times the usual, so that its text varies."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    target = model(config(**{**shape, **changes})).eval()
    for weight in target.parameters():
        if weight.dim() > 1:
            weight.data.mul_(scale)
    target.lm_head.weight.data.mul_(8)
    return target.to(dtype)


def make_head(target, seed=1, **changes):
    """A head of random weights: its drafts are hardly ever accepted."""
    config = target.config
    torch.manual_seed(seed)
    head = eagle2.Eagle2Head(
        eagle2.HeadConfig(
            **{
                "vocab_size": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.num_key_value_heads,
                **changes,
            }
        )
    ).eval()
    return head.to(target.dtype)


def make_eagle3_head(target, seed=1, draft_ids=None, **changes):
    """As `make_head`, EAGLE-3. If it has `draft_ids`, draft id i is target id 2i."""
    config = target.config
    torch.manual_seed(seed)
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "draft_vocab_size": draft_ids,
        **changes,
    }
    own = shape["hidden_size"] != config.hidden_size
    head = eagle2.Eagle3Head(eagle2.Eagle3Config(**shape), own_embedding=own).eval()
    if draft_ids:
        head.d2t += torch.arange(draft_ids)
    head.lm_head.weight.data.mul_(8)
    return head.to(target.dtype)


def make_pair(context=0.0, seed=0, **changes):
    """A target and a head that knows what the target says but for the context.

    At context 0 the next token depends on the last one alone and every likeliest draft is accepted;
    the larger it is, the more the target listens to what the head does not know.
    """
    target = make_target(seed, **changes)
    head = make_head(target)
    for number, layer in enumerate(target.model.layers):
        layer.self_attn.o_proj.weight.data.mul_(context)
        if number:
            layer.mlp.down_proj.weight.data.mul_(context)
    # the target's final norm takes this factor out again; the head, which has none, grows sure
    target.model.embed_tokens.weight.data.mul_(SURENESS)
    target.model.layers[0].mlp.down_proj.weight.data.mul_(SURENESS)
    size = target.config.hidden_size
    head.fc.weight.data.copy_(torch.eye(size, 2 * size))
    head.fc.bias.data.zero_()
    head.layers[0].mlp.load_state_dict(target.model.layers[0].mlp.state_dict())
    head.layers[0].self_attn.o_proj.weight.data.mul_(context)
    return target, head


def make_eagle3_pair(context=0.0, seed=0, draft_ids=None, **changes):
    """As `make_pair`, with an EAGLE-3 head: each row attends to itself, so its token comes through.

    Embeddings have mean square 1, so norms leave them alone.
    """
    target = make_target(seed, num_hidden_layers=7, **changes)
    embeddings = target.model.embed_tokens.weight.data
    embeddings.copy_(nn.functional.rms_norm(embeddings, embeddings.shape[1:]))
    for number, layer in enumerate(target.model.layers):
        layer.self_attn.o_proj.weight.data.mul_(context)
        if number:
            layer.mlp.down_proj.weight.data.mul_(context)
    heads = target.config.num_attention_heads
    head = make_eagle3_head(
        target, draft_ids=draft_ids, num_key_value_heads=heads, norm_before_residual=True
    )
    size = target.config.hidden_size
    attention = head.midlayer.self_attn
    for name, scale in (("q_proj", 5), ("k_proj", 5), ("v_proj", 1)):
        getattr(attention, name).weight.data.copy_(scale * torch.eye(size, 2 * size))
    attention.o_proj.weight.data.copy_(torch.eye(size))
    head.midlayer.mlp.load_state_dict(target.model.layers[0].mlp.state_dict())
    head.midlayer.hidden_norm.weight.data.fill_(0.02)
    ids = slice(None) if draft_ids is None else head.draft_to_target
    head.lm_head.weight.data.copy_(target.lm_head.weight[ids])
    return target, head


@torch.no_grad()
def plain_pass(target, text):
    """Features [T, Hd] and logits [T, V] of a text in one causal pass of transformers' own."""
    hidden = target.base_model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
    return hidden[0], target.lm_head(hidden[0])


@torch.no_grad()
def plain_hidden(head, target, text):
    """Hidden states [T, Hd] that a head makes of the target's features of a text."""
    out = target.base_model(
        input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True
    )
    if isinstance(head, eagle2.Eagle2Head):
        return out.last_hidden_state[0]
    layers = len(out.hidden_states) - 1
    read = [out.hidden_states[layer][0] for layer in (2, layers // 2, layers - 3)]
    return torch.cat(read, -1) @ head.fc.weight.T


@torch.no_grad()
def run_head(head, target, tokens, hidden, rows=None):
    """Hidden states [T, Hd] of a fresh pass: token p + 1 with the hidden state of position p.

    `rows` is a list that takes the pass's keys and values [T, G, E].
    """
    embed = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    embeddings = embed(torch.tensor([tokens]))

    def attend(q, k, v):
        if rows is not None:
            rows.extend((k[0], v[0]))
        mixed = nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return mixed.transpose(1, 2)

    return head(embeddings, hidden[None], torch.arange(len(tokens)), attend)[0]
