"""Our tree management inside a stand-in for SafeAILab/EAGLE's EaModel."""

import numpy as np
import pytest
import safeailab_stand_in as stand_in
import torch
from torch import nn

from eagle2_kernels.integrations import safeailab

TREES = [(12, 3, 4), (3, 0, 3), (5, 4, 1), (30, 2, 4), (2, 1, 2)]  # total_token, depth, top_k
PROCESSOR = stand_in.prepare_logits_processor(0.8)


@pytest.fixture
def model():
    made = stand_in.EaModel()
    yield made
    safeailab.unpatch(made)


def prompt(seed, length=6):
    return torch.randint(12, (1, length), generator=torch.Generator().manual_seed(seed))


def same(got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("threes", [False, True])
@pytest.mark.parametrize("processor", [None, PROCESSOR])
@pytest.mark.parametrize("tree", TREES)
def test_same_buffers(tree, processor, threes):
    """First from a prompt, then on from two more tokens: the draft's cache goes on too."""
    layers, head = [], None
    for _ in range(2):
        made = stand_in.EaModel(threes=threes, tree=tree, seed=7)
        layers.append((made, made.ea_layer))
        head = made.base_model.lm_head
    safeailab.patch(layers[0][0])
    ids = prompt(3, 9)
    width = 48 if threes else 16
    features = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(4))
    for seen, upto in ((0, 6), (5, 9)):
        part = features[:, seen : upto - 1]
        got, wanted = (
            layer.topK_genrate(part, ids[:, :upto], head, processor) for _, layer in layers
        )
        same(got, wanted)
        ours, theirs = (layer.stable_kv[0] for _, layer in layers)
        same(ours, theirs)
    safeailab.unpatch(layers[0][0])


def test_fewer_continuations_than_wanted(model):
    """Two live tokens: the tree ends where the draft does, without a filler."""
    model.ea_layer.topK_genrate(torch.randn(1, 5, 16), prompt(1), model.base_model.lm_head)
    safeailab.patch(model)
    bias = model.base_model.lm_head.bias
    bias.data[2:] = -torch.inf
    model.ea_layer.reset_kv()
    tokens, lines, mask, positions = model.ea_layer.topK_genrate(
        torch.randn(1, 5, 16), prompt(1), model.base_model.lm_head
    )
    assert (tokens[0, 1:] < 2).all()
    assert (tokens >= 0).all()
    assert tokens.shape[1] == mask.shape[2] == mask.shape[3] == len(positions) <= 12
    assert lines.max() == tokens.shape[1] - 1


def random_paths(generator, vocab=12, nodes=14, wanted=None):
    """Logits and candidates of a random tree, as tree_decoding and eagenerate make them."""
    draw = lambda most: int(torch.randint(most, (1,), generator=generator))  # noqa: E731
    up, tokens, children = [None], [0], {}
    while len(up) < nodes:
        above, token = draw(len(up)), draw(vocab)
        if token not in children.setdefault(above, set()):
            children[above].add(token)
            up.append(above)
            tokens.append(token)
    lines, _, _ = stand_in.buffers(up, wanted is not None)
    logits = torch.randn(nodes, vocab, generator=generator)
    logits = logits if wanted is None else wanted.log().expand(nodes, -1)
    return logits[lines], torch.tensor([*tokens, -1])[lines]


def test_greedy_posterior():
    generator = torch.Generator().manual_seed(2)
    for _ in range(60):
        logits, candidates = random_paths(generator)
        if torch.rand(1, generator=generator) < 0.7:  # make the target agree with a path
            row = int(torch.randint(len(candidates), (1,), generator=generator))
            for column in range(candidates.shape[1] - 1):
                if candidates[row, column + 1] >= 0:
                    prefix = (candidates[:, : column + 1] == candidates[row, : column + 1]).all(1)
                    logits[prefix, column, candidates[row, column + 1]] += 9
        got = safeailab.evaluate_posterior(logits, candidates, None)
        same(got, stand_in.evaluate_posterior(logits, candidates, None))


LAW = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.05, 0.05, 0.04, 0.03, 0.03, 0.02, 0.02, 0.01])


@pytest.mark.parametrize("module", [safeailab, stand_in])
def test_sampled_posterior_follows_the_law(module):
    """Whatever the tree: the first two tokens are those of the target (chi-square)."""
    torch.manual_seed(11)
    logits, candidates = random_paths(torch.Generator().manual_seed(5), wanted=LAW)
    counts, second, accepted = np.zeros(12), np.zeros(12), 0
    for _ in range(2500):
        best, length, sample_p = module.evaluate_posterior(logits, candidates, lambda _, x: x)
        assert best.dtype == torch.int64
        assert isinstance(length, int)
        assert sample_p.shape == (12,)
        path = candidates[best, 1 : length + 1].tolist()
        assert -1 not in path
        path.append(int(torch.multinomial(sample_p, 1)))
        counts[path[0]] += 1
        accepted += length > 0
        if length:
            second[path[1]] += 1
    assert accepted > 100
    for seen in (counts, second):
        wanted = seen.sum() * LAW.numpy()
        assert ((seen - wanted) ** 2 / wanted).sum() < 31.3  # 11 degrees: once in a thousand


def test_refused_children_leave_the_law_without_them():
    """sample_p is the law without the kept children, float32 and finite in half precision too."""
    logits = torch.full((2, 2, 12), -30.0, dtype=torch.float16)
    logits[:, :, 3] = 18.5
    candidates = torch.tensor([[0, 1], [0, 2]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        best, length, sample_p = safeailab.evaluate_posterior(
            logits.to(dtype), candidates, lambda _, x: x
        )
        assert (int(best), length) == (0, 0)
        assert sample_p[[1, 2]].tolist() == [0, 0]
        assert sample_p.isfinite().all()
        torch.testing.assert_close(sample_p.sum(), torch.tensor(1.0))


@pytest.mark.parametrize("processor", [None, PROCESSOR])
def test_update_commits_the_path(processor):
    results, data = [], []
    for patched in (True, False):
        made = stand_in.EaModel(seed=3)
        if patched:
            safeailab.patch(made)
        cache, cache_data, lengths = made.make_cache(40)
        generator = torch.Generator().manual_seed(6)
        cache_data[0].copy_(torch.randn(cache_data[0].shape, generator=generator))
        hidden = torch.randn(1, 6, 16, generator=generator)
        lines = torch.tensor([[0, 1, 3, -1], [0, 2, 4, 5]])
        candidates = torch.tensor([[7, 1, 3, -1], [7, 2, 4, 5]])
        made.ea_layer.topK_genrate(torch.zeros(1, 9, 16), prompt(1, 10), made.base_model.lm_head)
        sample_p = torch.zeros(12)
        sample_p[4] = 1.0
        length = torch.tensor(2) if processor is None else 2
        results.append(stand_in.update_inference_inputs(
            prompt(1, 9), candidates, torch.tensor(1), length, lines, processor, 5,
            cache_data, lengths, made, hidden, sample_p,
        ))  # fmt: skip
        data.append((cache_data[0], lengths, made.ea_layer.stable_kv[0][0]))
        safeailab.unpatch(made)
    same(*data)
    ours, theirs = results
    assert ours[6] is theirs[6] is None
    assert ours[5] == theirs[5] == 8
    assert type(ours[5]) is type(theirs[5])
    same([x for x in ours if isinstance(x, torch.Tensor)],
         [x for x in theirs if isinstance(x, torch.Tensor)])  # fmt: skip
    assert data[0][1].tolist() == [12] * 6


@torch.no_grad()
def plain(model, ids, count):
    model.base_model.model.tree_mask = None
    for _ in range(count):
        cache, _, _ = model.make_cache()
        _, logits, _ = model(ids, past_key_values=cache)
        ids = torch.cat((ids, logits[:, -1].argmax(-1, keepdim=True)), 1)
    return ids


@pytest.mark.parametrize("threes", [False, True])
def test_same_text_as_before_and_as_the_target_alone(threes):
    model = stand_in.EaModel(threes=threes)
    accepted = 0
    for seed in range(5):
        before, steps = model.eagenerate(prompt(seed))
        safeailab.patch(model)
        during, ours = model.eagenerate(prompt(seed))
        safeailab.unpatch(model)
        after, _ = model.eagenerate(prompt(seed))
        assert torch.equal(before, during)
        assert torch.equal(before, after)
        assert steps == ours
        assert torch.equal(before, plain(model, prompt(seed), before.shape[1] - 6))
        accepted += sum(ours)
    assert accepted > 10


def test_sampling_goes_on(model):
    safeailab.patch(model)
    torch.manual_seed(0)
    text, steps = model.eagenerate(prompt(1), temperature=1.0, max_new_tokens=60)
    assert sum(steps) > 5
    assert text.shape[1] == 6 + sum(steps) + len(steps)
    assert ((text >= 0) & (text < 12)).all()


def test_patch_and_unpatch(model):
    other = stand_in.EaModel(seed=1)
    before = {name: getattr(stand_in, name) for name in safeailab.FUNCTIONS}
    own = other.ea_layer.topK_genrate
    safeailab.patch(model)
    safeailab.patch(model)
    assert stand_in.evaluate_posterior is safeailab.evaluate_posterior
    assert other.ea_layer.topK_genrate == own
    wanted, _ = other.eagenerate(prompt(2))
    safeailab.patch(other)
    assert other.ea_layer.topK_genrate != own
    assert torch.equal(other.eagenerate(prompt(2))[0], wanted)
    safeailab.unpatch(model)
    assert stand_in.evaluate_posterior is safeailab.evaluate_posterior  # `other` needs it
    safeailab.unpatch(other)
    safeailab.unpatch(other)
    assert {name: getattr(stand_in, name) for name in safeailab.FUNCTIONS} == before
    assert other.ea_layer.topK_genrate == own


def test_an_unpatched_model_keeps_its_own_update(model, monkeypatch):
    other = stand_in.EaModel(seed=1)
    wanted, _ = other.eagenerate(prompt(2))
    safeailab.patch(model)
    monkeypatch.setattr(safeailab, "update_inference_inputs", None)  # would fail if called
    assert torch.equal(other.eagenerate(prompt(2))[0], wanted)
    with pytest.raises(TypeError):
        model.eagenerate(prompt(2))


def test_other_versions_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="wanted SafeAILab's EaModel, got Linear"):
        safeailab.patch(nn.Linear(1, 1))
    monkeypatch.setattr(stand_in, "evaluate_posterior", lambda logits, candidates, op: None)
    made = stand_in.EaModel()
    with pytest.raises(ValueError, match=r"wanted evaluate_posterior\(.*, got \(.*, op\)"):
        safeailab.patch(made)
    assert "topK_genrate" not in vars(made.ea_layer)
