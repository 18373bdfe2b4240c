"""SGLang's two verifications, and what follows them in the cache."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import HAS_GPU
from sglang_cases import GOLDEN, cases, over_each_form, verify  # noqa: F401

from eagle2_kernels.integrations import sglang


@pytest.mark.parametrize("spelling", ["retrive", "retrieve"])
@cases("verify_tree_greedy")
def test_verify_tree_greedy(walks, case, spelling):
    inputs = {key: torch.tensor(x) for key, x in case["inputs"].items()}
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    tree = [inputs[name] for name in names]
    got = verify(*tree, inputs["target_predict"], case["inputs"]["num_spec_tokens"], spelling)
    expect = case["expect"]
    assert got == [expect["predicts"], expect["accept_index"], expect["accept_token_num"]]
    # padding columns around: views of wider buffers
    wide = [torch.nn.functional.pad(x, (0, 3), value=77)[:, :-3] for x in tree]
    assert verify(*wide, inputs["target_predict"], case["inputs"]["num_spec_tokens"]) == got


def test_links_in_a_circle_end(walks):
    """R44: a child that is its own sibling, a node that is its own child, a link out of range."""
    index = torch.arange(12).view(3, 4)
    next_token = torch.tensor([[1, -1, -1, -1], [1, 1, -1, -1], [9, -1, -1, -1]])
    next_sibling = torch.tensor([[-1, 2, 1, -1], [-1] * 4, [-1] * 4])
    candidates = torch.tensor([[0, 5, 6, 7], [0, 1, 1, 1], [0, 1, 2, 3]])
    target = torch.tensor([[8] * 4, [1] * 4, [1] * 4])
    predicts, accept_index, accepted = verify(
        candidates, index, next_token, next_sibling, target, 9
    )
    assert accepted[0] == accepted[2] == 0
    assert 1 <= accepted[1] <= 4
    assert accept_index[2][:2] == [8, -1]


def test_accept_index_bounds_the_path(walks):
    """A chain of five that the target agrees with throughout, three columns for it."""
    index = torch.arange(5)[None]
    next_token = torch.tensor([[1, 2, 3, 4, -1]])
    no_sibling = torch.full((1, 5), -1)
    got = verify(index, index, next_token, no_sibling, torch.tensor([[1, 2, 3, 4, 9]]), 3)
    assert got == [[1, 2, 3, -1, -1], [[0, 1, 2]], [2]]
    probs = torch.eye(10)[[1, 2, 3, 4, 9]][None]
    inputs = {
        **BINARY, "candidates": [[0, 1, 2, 3, 4]], "retrive_index": index.tolist(),
        "retrive_next_token": next_token.tolist(), "retrive_next_sibling": no_sibling.tolist(),
        "target_probs": probs.tolist(),
    }  # fmt: skip
    got = sample(inputs, False, torch.zeros(1, 5), torch.tensor([0.5]))
    assert got == ([1, 2, 3, -1, -1], [[0, 1, 2]], [2])


def sample(inputs, with_zeros, coins=None, final=None, **names):
    tree = {
        key: torch.tensor(inputs[f"retrive_{key}"])
        for key in ("index", "next_token", "next_sibling")
    }
    candidates = torch.tensor(inputs["candidates"])
    batch, nodes = candidates.shape
    probs = torch.tensor(inputs["target_probs"])
    drafted = torch.zeros_like(probs) if with_zeros else None
    if not isinstance(inputs["draft_probs"], str):
        drafted = torch.tensor(inputs["draft_probs"])
    predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((batch, inputs["num_spec_tokens"]), -1, dtype=torch.int32)
    accepted = torch.zeros(batch, dtype=torch.int32)
    sglang.tree_speculative_sampling_target_only(
        predicts=predicts, accept_index=accept_index, accept_token_num=accepted,
        candidates=candidates, retrive_index=tree["index"],
        retrive_next_token=tree["next_token"], retrive_next_sibling=tree["next_sibling"],
        uniform_samples=coins, uniform_samples_for_final_sampling=final,
        target_probs=probs, draft_probs=drafted, threshold_single=inputs["threshold_single"],
        threshold_acc=inputs["threshold_acc"], deterministic=True,
    )  # fmt: skip
    return predicts.tolist(), accept_index.tolist(), accepted.tolist()


def coins_of(inputs, generator):
    """Those of the case, or any where it says that they do not matter."""
    batch, nodes = len(inputs["candidates"]), len(inputs["candidates"][0])
    coins = inputs.get("uniform_samples")
    if isinstance(coins, str):
        return torch.rand(batch, nodes, generator=generator), torch.rand(batch, generator=generator)
    return torch.tensor(coins), torch.tensor(inputs["uniform_samples_for_final_sampling"])


@pytest.mark.parametrize("with_zeros", [True, False])
@cases("tree_speculative_sampling_target_only")
def test_sampling(walks, case, with_zeros):
    inputs = case["inputs"]
    expect = case.get("expect") or case["expect_new_rule"]
    coins = coins_of(inputs, torch.Generator().manual_seed(1))
    predicts, accept_index, accepted = sample(inputs, with_zeros, *coins)
    if "first_predict" in expect:
        assert predicts[0] == expect["first_predict"]
    else:
        assert predicts == expect["predicts"]
        assert accept_index == expect["accept_index"]
    assert accepted == expect["accept_token_num"]


LAW = [0.1, 0.25, 0.05, 0.4, 0.2]
BINARY = {  # root; 1 and 2 below it, 3 below 1; V = 5
    "candidates": [[0, 3, 1, 4]],
    "retrive_index": [[0, 1, 2, 3]],
    "retrive_next_token": [[1, 3, -1, -1]],
    "retrive_next_sibling": [[-1, 2, -1, -1]],
    "draft_probs": "zeros",
    "num_spec_tokens": 3,
    "threshold_single": 1.0,
    "threshold_acc": 1.0,
}


def test_sampling_is_lossless(walks):
    """The first two tokens follow the target's law whatever the tree holds (chi-square)."""
    generator = torch.Generator().manual_seed(5)
    repeats = 3000 if walks == "cpu" or HAS_GPU else 150
    second = LAW[1:] + LAW[:1]
    inputs = {key: values * repeats if isinstance(values, list) else values
              for key, values in BINARY.items()}  # fmt: skip
    inputs["retrive_index"] = torch.arange(4 * repeats).view(-1, 4).tolist()
    inputs["target_probs"] = [[LAW, second, second, LAW]] * repeats
    coins = torch.rand(repeats, 4, generator=generator), torch.rand(repeats, generator=generator)
    predicts, accept_index, accepted = sample(inputs, False, *coins)
    first = np.bincount([predicts[4 * row] for row in range(repeats)], minlength=5)
    assert chi_square(first, LAW) < 18.5  # 4 degrees of freedom: once in a thousand
    after = [predicts[line[1]] for line, n in zip(accept_index, accepted, strict=True) if n]
    assert chi_square(np.bincount(after, minlength=5), second) < 18.5
    assert abs(sum(n > 0 for n in accepted) / repeats - 0.65) < 4 * (0.65 * 0.35 / repeats) ** 0.5


def chi_square(counts, law):
    wanted = counts.sum() * np.array(law)
    return ((counts - wanted) ** 2 / wanted).sum()


def test_sampling_over_more_than_one_block(walks):
    """The draw looks across the blocks of a vocabulary; refused children never come back."""
    generator = torch.Generator().manual_seed(6)
    vocab = 5000
    probs = torch.rand(1, 4, vocab, generator=generator, dtype=torch.float64)
    probs[..., 2000:3000] = 0
    probs[0, 0, [3, 1]] = 100.0
    probs = (probs / probs.sum(-1, keepdim=True)).float()
    law = probs[0, 0].double()
    law[[3, 1]] = 0
    sums = law.cumsum(0)
    for coin in (0.0, 0.2, 0.5, 0.9, 0.99999994):
        inputs = {**BINARY, "target_probs": probs.tolist()}
        coins = torch.full((1, 4), 0.99999994)
        predicts, _, accepted = sample(inputs, False, coins, torch.tensor([coin]))
        assert accepted == [0]
        drawn = predicts[0]
        assert law[drawn] > 0
        low, high = sums[drawn] - law[drawn], sums[drawn]
        assert low / sums[-1] - 1e-5 <= coin <= high / sums[-1] + 1e-5


def test_no_probability_left_gives_the_last_token(walks):
    """All of the law is on children that the coin refuses: no NaN, nothing out of range."""
    inputs = {**BINARY, "target_probs": [[[0, 0.5, 0, 0.5, 0], *[LAW] * 3]]}
    coins = torch.ones(1, 4)
    assert sample(inputs, False, coins, torch.tensor([0.5]))[0][0] == 4
    inputs["target_probs"] = [[[0, 0.5, 1e-30, 0.5, 0], *[LAW] * 3]]
    for coin in (0.5, 1.0):
        assert sample(inputs, False, coins, torch.tensor([coin]))[0][0] == 2


def test_thresholds_and_draft_probabilities(walks):
    """One probable child is enough; what a draft law had of the target's is not drawn again."""
    coins = torch.full((1, 4), 0.99)
    probs = [[[0.25, 0.1, 0.25, 0.4, 0.0], *[[0.5, 0.5, 0, 0, 0]] * 3]]
    inputs = {**BINARY, "target_probs": probs, "threshold_single": 0.4}
    assert sample(inputs, False, coins, torch.tensor([0.5]))[1:] == ([[0, 1, -1]], [1])
    inputs = {**inputs, "threshold_single": 0.41}
    # nothing accepted; 0 and 2 are left at the root, a coin of one half belongs to the second
    assert sample(inputs, False, coins, torch.tensor([0.5])) == (
        [2, -1, -1, -1],
        [[0, -1, -1]],
        [0],
    )
    assert sample(inputs, False, coins, torch.tensor([0.4]))[0][0] == 0
    drafted = [[[0.2, 0, 0.3, 0, 0], *[[0.0] * 5] * 3]]  # 0.05 of 0 is left, nothing of 2
    inputs = {**inputs, "draft_probs": drafted}
    assert sample(inputs, False, coins, torch.tensor([0.9]))[0][0] == 0


class Pool:
    """The cache of SGLang as its allocator lends it: rows by slot, moved as it moves them."""

    def __init__(self, slots):
        self.rows = torch.arange(slots)

    def get_kvcache(self):
        return self

    def move_kv_cache(self, target, source):
        assert target.dtype == source.dtype == torch.int64
        assert target.shape == source.shape
        self.moves = [*zip(target.tolist(), source.tolist(), strict=True)]
        self.rows[target] = self.rows[source]


def test_move_accept_tokens_to_target_kvcache():
    pool = Pool(100)
    batch = SimpleNamespace(
        seq_lens=torch.tensor([4, 9, 2]),
        out_cache_loc=torch.tensor([20, 21, 22, 23, 50, 52, 54, 56, 80, 81, 82, 83]),
    )
    accept_index = torch.tensor([[0, 2, 3], [4, -1, -1], [8, 9, 11]], dtype=torch.int32)
    sglang.move_accept_tokens_to_target_kvcache(
        batch, accept_index, torch.tensor([2, 0, 2], dtype=torch.int32), pool
    )
    assert pool.rows[[20, 21, 22]].tolist() == [20, 22, 23]
    assert pool.rows[[80, 81, 82]].tolist() == [80, 81, 83]
    untouched = [slot for slot in range(100) if slot not in (21, 22, 82)]
    assert pool.rows[untouched].tolist() == untouched


@pytest.mark.parametrize("case", [
    case for case in GOLDEN["cache_and_bookkeeping"]
    if case["name"].startswith("process_accept_index")
], ids=lambda case: case["name"])  # fmt: skip
def test_accepted_rows_stay_and_the_rest_goes(case):
    """The rows that SGLang keeps are those that are moved, in its order."""
    accept_index = torch.tensor(case["inputs"]["accept_index"], dtype=torch.int32)
    total = case["inputs"]["total_draft_tokens"]
    slots = torch.arange(10, 10 + total)
    pool = Pool(10 + total)
    batch = SimpleNamespace(seq_lens=torch.zeros(len(accept_index)), out_cache_loc=slots)
    accepted = torch.tensor(case["expect"]["accept_length"], dtype=torch.int32)
    sglang.move_accept_tokens_to_target_kvcache(batch, accept_index, accepted, pool)
    kept = [source - 10 for target, source in pool.moves if target]
    assert kept == case["expect"].get("filtered_accept_index", [0, 1, 3, 4, 5])
    assert [int(node not in kept) for node in range(total)] == case["expect"]["evict_mask"]


def test_through_the_dispatcher():
    """As in SGLang: torch.ops, tensors of the CPU."""
    inputs = GOLDEN["verify_tree_greedy"][1]["inputs"]
    tree = [torch.tensor(inputs[key]) for key in ("candidates", "retrive_index",
            "retrive_next_token", "retrive_next_sibling", "target_predict")]  # fmt: skip
    assert verify(*tree, 4)[2] == GOLDEN["verify_tree_greedy"][1]["expect"]["accept_token_num"]
