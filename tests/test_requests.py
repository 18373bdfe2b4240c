import pytest
import torch
from eagle2.prompts import end_tokens, token_rows
from eagle2.requests import Requests, Sampling
from tiny import make_target


def make(max_new_tokens=10, eos=(), context=20, prompts=((1, 2), (3, 4, 5)), **more):
    return Requests(prompts, max_new_tokens, eos, context, **more)


@pytest.mark.parametrize(
    ("tokens", "kept", "reason"),
    [
        ([5, 6], [5, 6], None),
        ([5, 9, 6], [5, 9], "eos"),
        ([9], [9], "eos"),
        ([5, 8, 9], [5, 8], "eos"),
        ([1] * 10, [1] * 10, "length"),
        ([1] * 12, [1] * 10, "length"),
        ([1] * 9 + [9], [1] * 9 + [9], "eos"),
        ([5, -1, 6], [5], "bad_logits"),
        ([-1], [], "bad_logits"),
    ],
)
def test_commit_ends_a_row_where_it_has_to(tokens, kept, reason):
    requests = make(eos=[9, 8])
    assert requests.commit(0, tokens) == len(kept)
    assert requests.answers == [kept, []]
    assert requests.reasons == [reason, None]
    assert requests.remaining(0) == (0 if reason else 10 - len(kept))
    assert requests.remaining(1) == 10
    if reason:
        assert requests.commit(0, [4, 4]) == 0
        assert requests.answers[0] == kept


@pytest.mark.parametrize(("room", "limit"), [(10, 9), (11, 10), (100, 10)])
def test_r04_context_bounds_the_answer(room, limit):
    requests = make(context=room, prompts=[[1]])
    assert requests.remaining(0) == limit
    assert requests.commit(0, [5] * 30) == limit
    assert requests.reasons == ["length"]
    assert requests.done


def test_capacity_holds_the_longest_row_and_its_trees():
    assert make().capacity(1) == 14
    assert make().capacity(5) == 18
    assert make().capacity(60) == 20
    assert make(max_new_tokens=100).capacity(60) == 20


def test_callback_gets_what_was_kept():
    seen = []
    requests = make(eos=[9], on_commit=lambda row, ids: seen.append((row, ids)))
    requests.commit(0, [4, 9, 5])
    requests.commit(0, [6])
    requests.commit(1, [-1])
    assert seen == [(0, [4, 9])]
    assert requests.done


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: wanted 1 or more, got 0"),
        ({"prompts": [[1], []]}, r"wanted 1\.\.19 tokens in each row .* got 0 in row 1"),
        ({"prompts": [[1] * 20]}, r"wanted 1\.\.19 tokens .* \(the context holds 20\), got 20"),
    ],
)
def test_r04_r13_limits_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_sampling_takes_one_value_or_one_per_row():
    sampling = Sampling.of(2, [0.0, 0.5], 4, [0.9, 1.0], 0.1, [-(2**63), 2**63 - 1])
    assert [field.tolist() for field in sampling[:2]] == [[0.0, 0.5], [4, 4]]
    assert sampling.seed.tolist() == [-(2**63), 2**63 - 1]
    assert [field.dtype for field in sampling] == [
        torch.float32,
        torch.int32,
        torch.float32,
        torch.float32,
        torch.int64,
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1e-9),
        ("temperature", float("nan")),
        ("temperature", [0.0]),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("seed", 2**63),
        ("seed", [1, 2, 3]),
    ],
)
def test_r29_sampling_out_of_range_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: wanted"):
        Sampling.of(2, **{name: value})


def test_prompts_as_lists_and_padded_tensors():
    ids = torch.tensor([[0, 5, 6], [7, 8, 0]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    assert token_rows(ids, mask) == [[5, 6], [7, 8]]
    assert token_rows(ids) == [[0, 5, 6], [7, 8, 0]]
    assert token_rows([[5], (7, 8)]) == [[5], [7, 8]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.arange(3),), r"input_ids: wanted shape \[B, T\], got \[3\]"),
        (([1, 2, 3],), "input_ids: wanted a list of rows"),
        ((torch.ones(2, 3), torch.ones(2, 2)), r"attention_mask: wanted shape \[2, 3\]"),
        (([[1]], torch.ones(1, 1)), "attention_mask: wanted input_ids as a tensor"),
    ],
)
def test_prompts_of_other_shapes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        token_rows(*arguments)


@pytest.mark.parametrize(
    ("given", "ids"),
    [(7, [7]), ([7, 8], [7, 8]), (torch.tensor([7, 8]), [7, 8]), (torch.tensor(7), [7]), ([], [])],
)
def test_end_tokens(given, ids):
    model = make_target()
    assert end_tokens(model, given) == ids
    assert end_tokens(model, None) == []
    model.generation_config.eos_token_id = 5
    assert end_tokens(model, None) == [5]
    model.generation_config.eos_token_id = [5, 6]
    assert end_tokens(model, None) == [5, 6]
    assert end_tokens(model, given) == ids
