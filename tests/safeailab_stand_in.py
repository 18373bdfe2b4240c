"""A module with the interface of SafeAILab/EAGLE's, small enough for a test, written from its
description: plain steps, one node after another, and two toy networks with caches and tree masks.
"""

import random

import torch
from torch import nn


class KVCache:
    def __init__(self, data, current_length):
        self.data, self.current_length = data, current_length

    def cat(self, rows):
        start = int(self.current_length)
        self.data[:, :, start : start + rows.shape[2]] = rows
        self.current_length.add_(rows.shape[2])
        return self.data[:, :, : start + rows.shape[2]]


def attend(block, x, keys, values, mask):
    """x [1, n, H] on keys and values [1, heads, len, E]."""
    q = heads_of(block.q(x))
    scores = q @ keys.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
    return block.o((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


def heads_of(x):
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def make_mask(rows, keys, tree_mask):
    mask = torch.full((rows, keys), -1e9).triu(keys - rows + 1)[None, None]
    if tree_mask is not None:
        n, width = tree_mask.shape[2:]
        mask[..., -width:] = 0
        mask[..., -width:][(tree_mask == 0).expand(1, 1, n, width)] = -1e9
    return mask


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))


class Target(nn.Module):
    def __init__(self, vocab, size, layers):
        super().__init__()
        self.embed = nn.Embedding(vocab, size)
        self.places = nn.Embedding(300, size)
        self.layers = nn.ModuleList(Block(size) for _ in range(layers))
        self.tree_mask = None

    def forward(self, input_ids, attention_mask=None, past_key_values=None, position_ids=None):
        start = int(past_key_values[0][0].current_length)
        n = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(start, start + n)
        x = self.embed(input_ids) + self.places(position_ids)
        states = []
        for block, (keys, values) in zip(self.layers, past_key_values, strict=True):
            states.append(x)
            k, v = keys.cat(heads_of(block.k(x))), values.cat(heads_of(block.v(x)))
            x = x + torch.tanh(attend(block, x, k, v, make_mask(n, k.shape[2], self.tree_mask)))
        return x, states


class Base(nn.Module):
    def __init__(self, vocab, size, layers):
        super().__init__()
        self.model, self.lm_head = Target(vocab, size, layers), nn.Linear(size, vocab)


class Model(nn.Module):
    """The head; `threes`: EAGLE-3's own vocabulary, norm and lm_head, on three states."""

    def __init__(self, vocab, size, total_token, depth, top_k, draft_vocab=None):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, size)
        self.places, self.block = nn.Embedding(300, size), Block(size)
        self.mix = nn.Linear(2 * size, size)
        self.total_tokens, self.depth, self.top_k, self.size = total_token - 1, depth, top_k, size
        if draft_vocab is not None:
            self.fc, self.norm = nn.Linear(3 * size, size), nn.LayerNorm(size)
            self.lm_head = nn.Linear(size, draft_vocab)
            kept = torch.randperm(vocab)[:draft_vocab].sort().values
            self.register_buffer("d2t", kept - torch.arange(draft_vocab))
        self.stable_kv = None
        self.init_tree()

    def init_tree(self):
        self.tree_mask_init = torch.eye(self.top_k)[None, None]
        self.position_ids = torch.zeros(self.top_k, dtype=torch.long)

    def reset(self):
        self.tree_mask = None

    def reset_kv(self):
        self.stable_kv = None

    def forward(
        self, hidden_states, input_ids, past_key_values=None, position_ids=None, use_cache=True
    ):
        if hidden_states.shape[-1] != self.size:
            hidden_states = self.fc(hidden_states)
        old = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        n = input_ids.shape[1]
        assert hidden_states.shape[:2] == input_ids.shape
        position_ids = torch.arange(old, old + n) if position_ids is None else position_ids
        x = self.mix(torch.cat((self.embed_tokens(input_ids), hidden_states), -1))
        x = x + self.places(position_ids)
        k, v = heads_of(self.block.k(x)), heads_of(self.block.v(x))
        if past_key_values is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(past_key_values[0], (k, v), strict=True))
        out = x + torch.tanh(attend(self.block, x, k, v, make_mask(n, k.shape[2], self.tree_mask)))
        return out, ((k, v),)

    @torch.no_grad()
    def topK_genrate(self, hidden_states, input_ids, head, logits_processor=None):
        k = self.top_k
        root, ids = input_ids[:, -1], input_ids[:, 1:]
        n = ids.shape[1]
        self.reset()
        seen = 0 if self.stable_kv is None else self.stable_kv[0][0].shape[2]
        h, cache = self(hidden_states, ids[:, seen:], past_key_values=self.stable_kv)
        self.stable_kv = cache
        rows, scores = h[:, -1:], torch.zeros(1)
        flat_scores, flat_tokens, parents = [], [], []  # parents: flat id of each block of k
        frontier, base = [-1], 0
        for step in range(self.depth + 1):
            logits = self.lm_head(self.norm(rows)) if hasattr(self, "norm") else head(rows)
            best = logits[0].log_softmax(-1).topk(k)
            tokens = best.indices + (self.d2t[best.indices] if hasattr(self, "d2t") else 0)
            grown = best.values + scores[:, None]
            flat_scores.append(grown.flatten())
            flat_tokens.append(tokens.flatten())
            parents += frontier
            if step == self.depth:
                break
            chosen = grown.flatten().topk(k)
            scores, frontier = chosen.values, [base + int(f) for f in chosen.indices]
            base += grown.numel()
            up = chosen.indices // k
            own = self.tree_mask_init
            self.tree_mask = own if step == 0 else torch.cat((self.tree_mask[:, :, up], own), 3)
            rows, cache = self(
                rows[:, up], tokens.flatten()[chosen.indices][None], past_key_values=cache,
                position_ids=n + step + self.position_ids,
            )  # fmt: skip
        kept = torch.cat(flat_scores).topk(self.total_tokens).indices.sort().values.tolist()
        tokens = torch.cat(flat_tokens)
        draft_tokens = torch.cat((root, tokens[kept]))[None]
        node_of = {-1: 0, **{flat: node for node, flat in enumerate(kept, 1)}}
        up = [None, *(node_of[parents[flat // k]] for flat in kept)]
        return draft_tokens, *buffers(up, logits_processor is not None)


def buffers(up, in_order):
    """retrieve_indices, tree_mask and tree_position_ids of a list of parents."""
    paths = [[0]]
    for node in range(1, len(up)):
        paths.append([*paths[up[node]], node])
    leaves = [path for node, path in enumerate(paths) if node not in up]
    longest = max(map(len, leaves))
    leaves = [path + [-1] * (longest - len(path)) for path in leaves]
    if in_order:
        leaves.sort(key=lambda path: [node if node >= 0 else len(up) + 4 for node in path])
    mask = torch.zeros(len(up), len(up))
    for node, path in enumerate(paths):
        mask[node, path] = 1
    return torch.tensor(leaves), mask[None, None], torch.tensor([len(path) - 1 for path in paths])


class EaModel(nn.Module):
    def __init__(self, vocab=12, size=16, layers=3, threes=False, tree=(12, 3, 4), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        total_token, depth, top_k = tree
        self.base_model, self.threes = Base(vocab, size, layers), threes
        self.ea_layer = Model(vocab, size, total_token, depth, top_k, 9 if threes else None)
        self.eval()

    def forward(self, input_ids, past_key_values=None, output_orig=True, position_ids=None):
        x, states = self.base_model.model(input_ids, None, past_key_values, position_ids)
        return x, self.base_model.lm_head(x), torch.cat(states[:3], -1) if self.threes else x

    def make_cache(self, length=200):
        layers = len(self.base_model.model.layers)
        data = torch.zeros(2 * layers, 1, 2, length, 8)
        lengths = torch.zeros(2 * layers, dtype=torch.long)
        pairs = [[KVCache(data[2 * i + j], lengths[2 * i + j]) for j in range(2)]
                 for i in range(layers)]  # fmt: skip
        return pairs, [data], lengths

    @torch.no_grad()
    def eagenerate(self, input_ids, temperature=0.0, max_new_tokens=20):
        processor = prepare_logits_processor(temperature) if temperature > 1e-5 else None
        self.ea_layer.reset_kv()
        self.base_model.model.tree_mask = None
        cache, cache_data, lengths = self.make_cache()
        drafted, steps, new_token = initialize_tree(input_ids, self, cache, processor), [], 0
        while new_token <= max_new_tokens:
            draft_tokens, retrieve_indices, tree_mask, positions = drafted
            self.base_model.model.tree_mask = tree_mask
            logits, hidden, _ = tree_decoding(
                self, draft_tokens, cache, positions, input_ids, retrieve_indices
            )
            padded = torch.cat((draft_tokens, torch.full((1, 1), -1)), 1)
            candidates = padded[0, retrieve_indices]
            best, length, sample_p = evaluate_posterior(logits, candidates, processor)
            steps.append(int(length))
            input_ids, *drafted, new_token, _, _ = update_inference_inputs(
                input_ids, candidates, best, length, retrieve_indices, processor, new_token,
                cache_data, lengths, self, hidden, sample_p,
            )  # fmt: skip
        return input_ids, steps


def prepare_logits_processor(temperature):
    return lambda _, logits: logits / temperature


def initialize_tree(input_ids, model, past_key_values, logits_processor):
    _, logits, hidden = model(input_ids, past_key_values=past_key_values)
    if logits_processor is None:
        token = logits[:, -1].argmax(-1, keepdim=True)
    else:
        token = torch.multinomial(logits_processor(None, logits[:, -1]).softmax(-1), 1)
    ids = torch.cat((input_ids, token), 1)
    return model.ea_layer.topK_genrate(hidden, ids, model.base_model.lm_head, logits_processor)


def tree_decoding(model, tree_candidates, past_key_values, tree_position_ids, input_ids,
                  retrieve_indices):  # fmt: skip
    positions = tree_position_ids + input_ids.shape[1]
    outputs, logits, hidden = model(
        tree_candidates, past_key_values=past_key_values, position_ids=positions
    )
    return logits[0, retrieve_indices], hidden, outputs


def evaluate_posterior(logits, candidates, logits_processor):
    if logits_processor is None:
        runs = []
        for row, wanted in zip(candidates.tolist(), logits.argmax(-1).tolist(), strict=True):
            agree = [a == b for a, b in zip(row[1:], wanted, strict=False)]
            runs.append((agree + [False]).index(False))
        length = torch.tensor(max(runs))
        best = torch.tensor(runs.index(max(runs)))
        return best, length, logits[best, length]
    best, length = 0, 0
    while length + 1 < candidates.shape[1]:
        p = logits_processor(None, logits[best, length][None])[0].softmax(-1)
        prefix, found = candidates[best, : length + 1].tolist(), None
        for row in range(len(candidates)):
            token = int(candidates[row, length + 1])
            if token < 0 or candidates[row, : length + 1].tolist() != prefix or p[token] == 0:
                continue
            if random.random() <= p[token]:
                found = row
                break
            p[token] = 0
            p = p / p.sum()
        if found is None:
            return torch.tensor(best), length, p
        best, length = found, length + 1
    return (
        torch.tensor(best),
        length,
        logits_processor(None, logits[best, length][None])[0].softmax(-1),
    )


@torch.no_grad()
def update_inference_inputs(input_ids, candidates, best_candidate, accept_length, retrieve_indices,
                            logits_processor, new_token, past_key_values_data_list,
                            current_length_data, model, hidden_state_new, sample_p):  # fmt: skip
    length, count = input_ids.shape[1], int(accept_length) + 1
    nodes = retrieve_indices[best_candidate, :count]
    input_ids = torch.cat((input_ids, candidates[best_candidate, :count][None]), 1)
    for data in past_key_values_data_list:
        data[..., length : length + count, :] = data[..., length + nodes, :].clone()
    current_length_data.fill_(length + count)
    if logits_processor is None:
        token = sample_p.argmax()[None, None]
    else:
        token = torch.multinomial(sample_p, 1)[None]
    drafted = model.ea_layer.topK_genrate(
        hidden_state_new[:, nodes], input_ids=torch.cat((input_ids, token), 1),
        head=model.base_model.lm_head, logits_processor=logits_processor,
    )  # fmt: skip
    return input_ids, *drafted, new_token + accept_length + 1, None, token
