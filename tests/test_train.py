"""The trainer: pairing, self-fed steps, held-out filter, learning, resuming."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle2.answers import Decoder, write_answers
from eagle2.corpus import Corpus
from eagle2.features import Conversation, FeatureWriter, load_conversations, prefill, write_features
from eagle2.heads import Eagle2Head, HeadConfig, load_head
from eagle2.held_out import HeldOut, read_prompts
from eagle2.objective import (
    Chains,
    CrossEntropy,
    Objective,
    answer_starts,
    make_batch,
    run_first,
    take,
)
from eagle2.train import train
from eagle2.training_run import Run, read_checkpoint
from train_worker import OPTIONS

transformers = pytest.importorskip("transformers")

SIZE, VOCAB = 32, 64


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The products are small: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(20)
    return model


@pytest.fixture
def answers(target, tmp_path):
    """24 short conversations of a repetitive kind, with features."""
    draw = np.random.default_rng(0)
    path = tmp_path / "answers.jsonl"
    with path.open("w") as lines:
        for number in range(24):
            start, length = int(draw.integers(VOCAB)), int(draw.integers(14, 30))
            ids = [(start + 3 * place) % VOCAB for place in range(length)]
            lines.write(json.dumps({"number": number, "prompt_len": 5, "ids": ids}) + "\n")
    write_features(target, path, batch_tokens=64)
    return path


def small_head() -> Eagle2Head:
    torch.manual_seed(1)
    config = HeadConfig(
        vocab_size=VOCAB, hidden_size=SIZE, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return Eagle2Head(config)


def test_r22_shift_pairs_token_p_plus_1_with_feature_p(target):
    """FAULTS.md R22: prompt [10, 11, 12, 13], sampled 14: tokens [11..14] go with h0..h3, once."""

    class Copy(torch.nn.Module):
        def features(self, inputs):
            return inputs

        def forward(self, embeddings, features, positions, attend):
            seen.append((embeddings, features, positions))
            attend(*torch.zeros(3, *features.shape[:2], 1, 4))
            return features

    seen = []
    one_hot = torch.eye(SIZE)
    long = (np.array([10, 11, 12, 13, 14]), one_hot[:5].numpy(), 4)
    short = (np.array([20, 21, 22]), one_hot[10:13].numpy(), 2)
    batch = make_batch([Conversation(*long), Conversation(*short)])
    predicted, *_ = run_first(Copy(), torch.nn.Embedding.from_pretrained(torch.eye(VOCAB)), batch)
    embeddings, features, positions = seen[0]
    assert embeddings.argmax(-1)[0, :4].tolist() == [11, 12, 13, 14]
    assert features.argmax(-1)[0, :4].tolist() == [0, 1, 2, 3]
    assert positions[:4].tolist() == [0, 1, 2, 3]
    # each row's last pair: its own last prompt feature with its own sampled token
    assert (embeddings[1, 1].argmax(), features[1, 1].argmax()) == (22, 11)
    # what row p predicts is held against feature p + 1
    wanted = take(batch.features, torch.tensor([[1, 2], [1, 1]]))
    assert wanted.argmax(-1).tolist() == [[1, 2], [11, 11]]


def test_starts_are_the_pairs_that_predict_an_answer_token_after_the_first():
    ids, features = np.arange(8), np.zeros((8, SIZE), np.float32)
    starts = answer_starts(make_batch([Conversation(ids, features, 3)]))
    # answer tokens 3..7; the root of the first draft is token 3; pair p predicts token p + 2
    assert starts[0].nonzero()[:, 0].tolist() == [2, 3, 4, 5]


def test_self_fed_steps_equal_running_the_head_one_row_at_a_time(target):
    head, embed = small_head(), target.get_input_embeddings()
    draw = np.random.default_rng(2)
    features = draw.standard_normal((12, SIZE)).astype(np.float32)
    batch = make_batch([Conversation(draw.integers(0, VOCAB, 12), features, 2)])
    starts = torch.tensor([[3, 6]])
    predicted, keys, values = run_first(head, embed, batch)
    outputs = [take(predicted, starts)]
    chains = Chains(head, embed, batch, starts, keys, values)
    for _ in range(3):
        outputs.append(chains.step(outputs[-1]))
    for column, start in enumerate(starts[0].tolist()):
        expected = draft_chain(head, embed, batch, start, steps=4)
        for step in range(4):
            got = outputs[step][0, column]
            torch.testing.assert_close(got, expected[step], atol=1e-5, rtol=1e-4)


def draft_chain(head, embed, batch, start: int, steps: int):
    """The same with a growing cache of true rows, then of the head's own."""
    cache = []

    def attend(q, k, v):
        cache.append((k, v))
        k, v = (torch.cat(part, 1).repeat_interleave(2, 2) for part in zip(*cache, strict=True))
        weight = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bhqk,bkhe->bqhe", weight.softmax(-1), v)

    outputs = []
    for position in range(start + steps):
        known = head.features(batch.inputs[:, position : position + 1])
        feature = known if position <= start else outputs[-1]
        token = batch.ids[:, position + 1 : position + 2]
        outputs.append(head(embed(token), feature, torch.tensor([position]), attend))
    return [output[0, 0] for output in outputs[start:]]


def test_cross_entropy_and_its_gradient_are_those_of_autograd():
    torch.manual_seed(0)
    predicted = torch.randn(300, SIZE, requires_grad=True)
    weight, laws = torch.randn(40, SIZE), torch.randn(7, 40).softmax(-1)
    rows = torch.randint(7, (300,))
    loss = CrossEntropy.apply(predicted, weight, laws, rows)
    (gradient,) = torch.autograd.grad(loss, predicted)
    expected = -(laws[rows] * (predicted @ weight.T).log_softmax(-1)).sum()
    torch.testing.assert_close(loss, expected)
    (wanted,) = torch.autograd.grad(expected, predicted)
    torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


def test_laws_leave_out_what_the_head_cannot_draft(target):
    draft_ids = torch.full((VOCAB,), -1)
    draft_ids[:8] = torch.arange(8)
    objective = Objective(target.get_input_embeddings(), target.lm_head.weight[:8], draft_ids)
    batch = make_batch([Conversation(np.array([1, 2, 3, 50, 4, 5]), np.ones((6, SIZE)), 1)])
    index, laws = objective.laws(batch, answer_starts(batch))
    assert index.tolist() == [[0, -1, 1, 2, -1, -1]]
    torch.testing.assert_close(laws.sum(-1), torch.ones(3))


def options(**changes):
    usual = {
        "steps": 30, "batch_tokens": 96, "draft_vocab_size": 48, "warmup": 5,
        "learning_rate": 3e-3, "autocast": False, "checkpoint_every": 10, "evaluate_every": 1000,
    }  # fmt: skip
    return usual | changes


def test_loss_goes_down_and_the_head_loads(target, answers, tmp_path):
    first = train(target, [answers], tmp_path / "short", **options(steps=1))
    result = train(target, [answers], tmp_path / "head", held_out=answers, **options(steps=60))
    assert result["loss"] < 0.9 * first["loss"]
    assert len(result["agreement"]) == 4
    assert 1 + result["agreement"][0] <= result["tau"] <= 1 + sum(result["agreement"])
    head = load_head(tmp_path / "head")
    assert head.config.draft_vocab_size == 48
    assert (head.draft_to_target.diff() > 0).all()


def test_a_run_cut_short_and_resumed_equals_an_unbroken_one(target, answers, tmp_path, monkeypatch):
    train(target, [answers], tmp_path / "whole", **options())
    calls = []

    def stop_at_23(*_):
        calls.append(1)
        if len(calls) == 23:
            raise KeyboardInterrupt
        return loss(*_)

    loss = Objective.loss
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "loss", stop_at_23)
        with pytest.raises(KeyboardInterrupt):
            train(target, [answers], tmp_path / "parts", **options())
    assert train(target, [answers], tmp_path / "parts", **options())["step"] == 30
    for name, tensor in load_head(tmp_path / "whole").state_dict().items():
        assert torch.equal(tensor, load_head(tmp_path / "parts").state_dict()[name]), name


def test_processes_take_turns_along_one_epoch(target, answers, tmp_path):
    seen = []
    for rank in range(3):
        corpus = Corpus(SIZE, [answers], 96, 2048, None, seed=0)
        run = Run(target, corpus, tmp_path, 48)
        run.rank, run.ranks, run.agreed_counts = rank, 3, lambda: None
        while run.state.epoch == 0:
            seen.append(run.next_batch()[0])
            run.advance(0.0, 0.9)
    batches = Corpus(SIZE, [answers], 96, 2048, None, seed=0).batches(0)[0]
    assert len(seen) == -(-len(batches) // 3) * 3
    assert {rows(batch) for batch in seen} == {rows(make_batch(batch)) for batch in batches}


def rows(batch):
    return tuple(map(tuple, batch.ids.tolist()))


@pytest.mark.full
def test_processes_go_on_together_after_one_has_died(target, answers, tmp_path):
    target.save_pretrained(tmp_path / "model")

    def two(out, *step):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        command += [str(Path(__file__).with_name("train_worker.py")), str(tmp_path / "model")]
        return subprocess.run([*command, str(answers), str(tmp_path / out), *step]).returncode

    assert two("whole") == 0
    assert two("parts", "7") != 0
    assert read_checkpoint(tmp_path / "parts" / "checkpoint.pt", "cpu")["state"]["step"] == 4
    assert two("parts") == 0
    train(target, [answers], tmp_path / "alone", **OPTIONS)
    whole, parts, alone = (
        load_head(tmp_path / name).state_dict() for name in ("whole", "parts", "alone")
    )
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert not torch.equal(whole["fc.weight"], alone["fc.weight"])


def test_held_out_filter():
    near = HeldOut(["One two three, four five six SEVEN eight nine ten.", "Who was she?"])
    assert near("so: two three four five six seven eight nine!")
    assert not near("two three four five six seven eight")
    assert near("tell me who was she")
    assert not near("who was he")


def test_every_fourth_prompt_is_held_out(tmp_path):
    rows = [json.dumps({"turns": [f"prompt {number}", "and then?"]}) for number in range(9)]
    (tmp_path / "task.jsonl").write_text("\n".join(rows) + "\n")
    kept = [["prompt 3", "and then?", "prompt 7", "and then?"]]
    assert read_prompts(tmp_path, held_out=True) == kept
    assert len(read_prompts(tmp_path, held_out=False)[0]) == 7


def test_decoder_steps_equal_a_prefill(target):
    sequences = [[5, 6, 7, 8, 9, 10], [40, 41, 42, 43, 44, 45]]
    with torch.inference_mode():
        expected = torch.stack(prefill(target, sequences))
    decoder = Decoder(target, 2, 10)
    # row 1 starts two steps late: rows are at positions of their own
    for step in range(6):
        late = max(0, step - 2)
        tokens = torch.tensor([sequences[0][step], sequences[1][late]])
        got = decoder.step(tokens, torch.tensor([step, late]))
        torch.testing.assert_close(got[0], expected[0, step], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[1], expected[1, late], atol=1e-4, rtol=1e-4)


class Letters:
    """A tokenizer of one id per character, enough for the writer."""

    def apply_chat_template(self, messages, **_):
        return f"<u>{messages[0]['content']}$<a>"

    def __call__(self, text, **_):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_answers_come_with_their_features_and_go_on_after_a_stop(target, tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = [["abc def", "ghi"]]
    settings = {"slots": 4, "max_turn_tokens": 6, "max_answer_tokens": 8, "whole": 0.3, "seed": 3}
    write_answers(target, Letters(), prompts, path, tokens=60, **settings)
    with path.open("a") as lines:
        lines.write('{"number": 99, "ids": [1, 2')  # a line that a kill cut short
    assert write_answers(target, Letters(), prompts, path, tokens=120, **settings) >= 120
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["number"] for row in rows}) == len(rows)
    for row, conversation in zip(rows, load_conversations(path, SIZE), strict=True):
        assert 0 < len(row["ids"]) - row["prompt_len"] <= 8
        with torch.inference_mode():
            expected = prefill(target, [row["ids"]])[0]
        np.testing.assert_allclose(conversation.features, expected, atol=2e-2)
        greedy = (expected @ target.lm_head.weight.T).argmax(-1)[row["prompt_len"] - 1 : -1]
        assert row["temperature"] > 0 or row["ids"][row["prompt_len"] :] == greedy.tolist()


def test_a_writer_refuses_answers_without_features(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text('{"ids": [1, 2, 3], "prompt_len": 1}\n')
    path.with_suffix(".f16").write_bytes(b"")
    with pytest.raises(ValueError, match="write_features"):
        FeatureWriter(path, SIZE)
