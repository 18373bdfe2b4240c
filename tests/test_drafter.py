import eagle2
import pytest
import torch
from eagle2 import TreeConfig, baseline, generate
from eagle2.cache import KVCache
from eagle2.drafter import Drafter
from eagle2.requests import Requests, Sampling
from eagle2.target import Target, prefill
from tiny import (
    PROMPTS,
    make_eagle3_head,
    make_eagle3_pair,
    make_head,
    make_pair,
    make_target,
    plain_hidden,
    run_head,
)

KINDS = {"eagle2": (make_head, make_pair), "eagle3": (make_eagle3_head, make_eagle3_pair)}


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def begin(target, head, config, prompts=PROMPTS):
    """A drafter after its prefill, with hidden states and prompt lengths."""
    adapter = Target(target)
    drafter = Drafter(head, adapter, config, len(prompts), 40)
    requests = Requests(prompts, 20, [], 128)
    with torch.inference_mode():
        cache = adapter.new_cache(len(prompts), 40)
        sampling, layers = Sampling.of(len(prompts)), drafter.feature_layers
        start = prefill(adapter, requests, sampling, cache, layers)
        hidden = drafter.prefill(start.shifted, start.features, start.prefix_len)
    return drafter, hidden, start


@torch.inference_mode()
def draft(drafter, hidden, start, num_nodes, depth):
    drafted = drafter.draft(
        hidden, start.prefix_len, max(start.prefix), num_nodes, depth, lambda stage: None
    )
    return type(drafted)(*(field.clone() for field in drafted))


@pytest.fixture
def inputs(request):
    """Hooks a module; what it is called with and what comes out collect in the list returned."""

    def spy(module):
        seen = []
        hook = module.register_forward_hook(
            lambda _, args, more, out: seen.append((args, more, out)), with_kwargs=True
        )
        request.addfinalizer(hook.remove)
        return seen

    return spy


def draft_logits(head, target, hidden):
    if isinstance(head, eagle2.Eagle3Head):
        scale, eps = head.norm.weight, head.config.rms_norm_eps
        return head.lm_head(torch.nn.functional.rms_norm(hidden, scale.shape, scale, eps))
    logits = target.lm_head(hidden)
    return logits if head.draft_to_target is None else logits[head.draft_to_target]


NARROW = {"hidden_size": 24, "head_dim": 8, "target_hidden_size": 32}


@pytest.mark.parametrize("shape", [{}, {"norm_before_residual": True}, NARROW])
@pytest.mark.parametrize("draft_ids", [None, 23])
def test_every_eagle_3_candidate_equals_a_straight_run_of_the_head(inputs, draft_ids, shape):
    target = make_target(num_hidden_layers=8)
    head = make_eagle3_head(target, draft_ids=draft_ids, **shape)
    check_candidates(inputs, target, head, draft_ids)


@pytest.mark.parametrize("draft_ids", [None, 23])
def test_every_candidate_equals_a_straight_run_of_the_head(inputs, draft_ids):
    target = make_target()
    head = make_head(target, draft_vocab_size=draft_ids)
    if draft_ids:
        head.d2t += torch.arange(draft_ids)  # draft id i is target id 2i
    check_candidates(inputs, target, head, draft_ids)


def check_candidates(inputs, target, head, draft_ids):
    config = TreeConfig(3, 4, 60, early_stop=False)
    drafter, hidden, start = begin(target, head, config)
    passes = inputs(head)
    drafted = draft(drafter, hidden, start, int32([60] * 3), 4)
    assert drafted.tokens.shape == (3, 3 + 3 * 9)
    for row, prompt in enumerate(PROMPTS):
        hidden = plain_hidden(head, target, prompt)
        root, parents = int(start.first[row]), drafted.parents[row].tolist()
        tokens, scores = drafted.tokens[row].tolist(), drafted.scores[row]
        straight = {}

        def run(path, prompt=prompt, hidden=hidden, root=root, straight=straight):
            """The head's last hidden state after these drafted tokens, from scratch."""
            if path not in straight:
                guesses = [run(path[:end]) for end in range(len(path))]
                known = torch.cat((hidden, *(guess[None] for guess in guesses)))
                pairs = [*prompt[1:], root, *path]
                straight[path] = run_head(head, target, pairs, known)[-1]
            return straight[path]

        def path_to(candidate, tokens=tokens, parents=parents):
            if candidate < 0:
                return ()
            return (*path_to(parents[candidate]), tokens[candidate])

        for candidate, parent in enumerate(parents):
            logits = draft_logits(head, target, run(path_to(parent)))
            token = tokens[candidate] // (2 if draft_ids else 1)
            score = logits.log_softmax(-1)[token] + (0 if parent < 0 else scores[parent])
            torch.testing.assert_close(scores[candidate], score, atol=1e-4, rtol=0)
        for level in range(2, 5):
            leaves = parents[3 + 9 * (level - 2) : 3 + 9 * (level - 1) : 3]
            wanted = torch.stack([run(path_to(leaf)) for leaf in leaves])
            got = passes[level - 2][2][row]
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("context", "accepted"), [(0.0, 4), (3.0, 2), (12.0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_r20_cache_equals_a_fresh_prefill_after_every_cycle(monkeypatch, kind, context, accepted):
    target, head = KINDS[kind][1](context)
    size = target.config.hidden_size
    if kind == "eagle2":  # let it look at features too
        head.fc.weight.data[:, size:].normal_(0, 0.02)
    else:
        head.midlayer.self_attn.k_proj.weight.data[:, size:].normal_()
        head.midlayer.self_attn.v_proj.weight.data[:, size:].normal_()
    allocated, plain = [], KVCache.allocate

    def allocate(*shape):
        allocated.append(plain(*shape))
        return allocated[-1]

    monkeypatch.setattr(KVCache, "allocate", allocate)
    chunks, counts = [[], [], []], set()

    def check(tree, path):
        for row, prompt in enumerate(PROMPTS):
            if tree.num_nodes[row] == 0:
                continue
            text = sum(chunks[row][:-1], prompt)  # what this cycle drafted from
            hidden = plain_hidden(head, target, text[:-1])
            fresh = []
            run_head(head, target, text[1:], hidden, fresh)
            for half, wanted in zip(allocated[0], fresh, strict=True):
                got = half[0, row, : len(text) - 1]
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
        counts.update((path > 0).sum(1).tolist())

    generate(
        target,
        head,
        PROMPTS,
        max_new_tokens=24,
        tree=TreeConfig(4, 4, 20),
        on_commit=lambda row, ids: chunks[row].append(ids),
        on_cycle=check,
    )
    assert accepted in counts


@pytest.mark.parametrize("kind", KINDS)
def test_r21_positions(inputs, kind):
    target, head = KINDS[kind][1](context=1.0)
    passes, drafts = inputs(target.model), inputs(head)
    trees = []
    generate(
        target,
        head,
        [[*range(20, 27)]],
        max_new_tokens=20,
        tree=TreeConfig(2, 3, 6, early_stop=False),
        on_cycle=lambda tree, path: trees.append((tree, int((path > 0).sum()))),
    )
    places = [more["position_ids"][0].tolist() for _, more, _ in passes]
    assert places[0] == [*range(7)]
    drafted = [args[2].expand(args[0].shape[:2])[0].tolist() for args, _, _ in drafts]
    assert drafted[0] == [*range(7)]
    prefix, queue = 7, drafted[1:]
    for place, (tree, accepted) in zip(places[1:], trees, strict=True):
        assert place == [prefix + depth for depth in tree.depths[0].tolist()]
        deepest = min(3, 19 - (prefix - 7) - 1)
        for level in range(1, deepest):
            assert queue.pop(0) == [prefix + level - 1] * 2
        if queue:
            assert queue.pop(0) == [*range(prefix, prefix + accepted + 1)]
        prefix += accepted + 1
    assert {accepted for _, accepted in trees} >= {2, 3}


@pytest.mark.parametrize("kind", KINDS)
def test_r22_a_token_goes_with_the_feature_before_it_once(inputs, kind):
    target, head = KINDS[kind][1](context=1.0)
    prompts = [[10, 11], [10, 11, 12, 13]]
    drafts = inputs(head)
    drafter, hidden, start = begin(target, head, TreeConfig(2, 2, 4), prompts)
    (embeddings, states, positions, _), _, _ = drafts[0]
    first = start.first.tolist()
    for row, prompt in enumerate(prompts):
        length = len(prompt)
        wanted = plain_hidden(head, target, prompt)
        torch.testing.assert_close(states[row, :length], wanted, atol=1e-5, rtol=0)
        pairs = [*prompt[1:], first[row]]
        assert start.shifted[row, :length].tolist() == pairs
        assert torch.equal(embeddings[row, :length], target.model.embed_tokens(torch.tensor(pairs)))
        assert positions[row, :length].tolist() == [*range(length)]
        last = run_head(head, target, pairs, wanted)[-1]
        torch.testing.assert_close(hidden[row, 0], last, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_r33_buffers_of_an_earlier_draft_do_not_show(kind):
    target, head = KINDS[kind][1](context=0.0)
    gaps = 0
    for early_stop in (True, False):
        config = TreeConfig(3, 4, 12, early_stop=early_stop)
        used, hidden, start = begin(target, head, config)
        draft(used, hidden, start, int32([12, 12, 12]), 4)
        for sizes, depth in (([12, 0, 5], 3), ([3, 3, 3], 4), ([2, 12, 12], 1), ([12, 12, 12], 4)):
            got = draft(used, hidden, start, int32(sizes), depth)
            fresh, *_ = begin(target, head, config)
            wanted = draft(fresh, hidden, start, int32(sizes), depth)
            rows, drafted = torch.tensor(sizes) > 0, wanted.scores > -torch.inf
            gaps += int((~drafted).sum())
            assert torch.equal(got.scores[rows], wanted.scores[rows])
            for field, value in zip(got, wanted, strict=True):
                assert torch.equal(field[rows][drafted[rows]], value[rows][drafted[rows]])
    assert gaps  # slots that nothing was drafted into, between levels


@pytest.mark.parametrize("kind", KINDS)
def test_r18_the_next_step_embeds_target_ids(inputs, kind):
    target = make_target(vocab_size=10, num_hidden_layers=7)
    head = KINDS[kind][0](target, draft_vocab_size=3)
    head.d2t.copy_(torch.tensor([1, 3, 7]))
    drafter, hidden, start = begin(target, head, TreeConfig(3, 2, 13, early_stop=False), [[1, 2]])
    drafts = inputs(head)
    drafted = draft(drafter, hidden, start, int32([13]), 2)
    assert sorted(drafted.tokens[0, :3].tolist()) == [1, 4, 9]
    leaves = drafted.tokens[0, drafted.parents[0, 3::3].long()]
    assert torch.equal(drafts[0][0][0][0], target.model.embed_tokens(leaves))


def test_r18_tokens_outside_the_draft_vocabulary_are_emitted():
    target, head = make_pair(context=1.0)
    wanted = baseline.generate(target, PROMPTS, max_new_tokens=30)
    said = sorted({token for tokens in wanted.tokens for token in tokens})
    small = make_head(target, draft_vocab_size=len(said[::2]))
    small.load_state_dict(head.state_dict() | {"d2t": small.d2t})
    small.d2t.copy_(torch.tensor(said[::2]) - torch.arange(len(said[::2])))
    result = generate(target, small, PROMPTS, max_new_tokens=30, tree=TreeConfig(2, 3, 7))
    assert result.tokens == wanted.tokens
    assert result.statistics.tau > 1.3
