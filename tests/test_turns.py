"""Streamers, processors and criteria meet every token once, as in transformers' own `generate`."""

from string import ascii_letters, digits

import pytest
import torch
from eagle2.turns import of_row
from hugging_face_cases import COMMON, PADDED, PROMPT, TREE, a_pair, each_way, inputs  # noqa: F401
from tiny import VOCAB
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class Streamer:
    def __init__(self):
        self.puts, self.ended = [], False

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_streamer(pair, ours):
    streams = []
    for generate in (pair[0].generate, ours):
        streams.append(Streamer())
        generate(**COMMON, input_ids=PROMPT, streamer=streams[-1])
    assert streams[1].puts == streams[0].puts
    assert streams[1].puts[0] == PROMPT[0].tolist()
    assert streams[1].ended


def test_the_stream_ends_where_the_text_does(pair, ours):
    """By a criterion that is no end token: nothing is said, or judged, beyond it."""
    stream, recorder = Streamer(), Recorder()
    options = {**COMMON, "input_ids": PROMPT, "stopping_criteria": [After()]}
    text = ours(**options, streamer=stream, logits_processor=[recorder])[0].tolist()
    assert len(text) < 20
    assert [token for put in stream.puts for token in put] == text
    assert len(recorder.calls) == len(text) - 4


def test_processors_that_know_the_rows():
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    penalty.prompt_ignore_length = torch.tensor([0, 2, 4])
    assert [of_row(penalty, row).prompt_ignore_length.tolist() for row in range(3)] == [
        [0],
        [2],
        [4],
    ]
    assert penalty.prompt_ignore_length.tolist() == [0, 2, 4]
    assert of_row(penalty, 1).penalty == 1.3
    other = Recorder()
    assert of_row(other, 2) is other


class Recorder(LogitsProcessor):
    """A processor with a memory: it forbids what it saw chosen three calls ago."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        if len(self.calls) > 3:
            scores[:, self.calls[-3][0][-1]] = -torch.inf
        return scores


def test_a_processor_is_called_once_for_each_token(pair, ours):
    recorders = Recorder(), Recorder()
    options = {**COMMON, "input_ids": PROMPT}
    wanted = pair[0].generate(**options, logits_processor=[recorders[0]])
    assert torch.equal(ours(**options, logits_processor=[recorders[1]]), wanted)
    assert recorders[0].calls == recorders[1].calls


class After(StoppingCriteria):
    """A row ends with its `count`-th token from `ids`; counts differ by the row's first token."""

    def __call__(self, input_ids, scores, **_):
        return ((input_ids % 3 == 0).sum(1) - 1 > input_ids[:, -1] % 4).clone()


@pytest.mark.parametrize("eos", [None, 11])
@pytest.mark.parametrize("batch", [1, 3])
def test_stopping_criteria(pair, ours, batch, eos):
    """Without an end token, rows that have ended go on until all have: transformers does so."""
    options = {**COMMON, **inputs(batch), "eos_token_id": eos}
    options["stopping_criteria"] = StoppingCriteriaList([After()])
    wanted = pair[0].generate(**options)
    assert wanted.shape[1] < options["input_ids"].shape[1] + 20
    assert torch.equal(ours(**options), wanted)


class Letters:
    """A tokenizer as StopStringCriteria knows it: every token is a letter or a digit."""

    def get_vocab(self):
        return {letter: i for i, letter in enumerate((ascii_letters + digits)[:VOCAB])}

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def _convert_id_to_token(self, token):
        return (ascii_letters + digits)[token]

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [self.get_vocab()[letter] for letter in text]}

    def __len__(self):
        return VOCAB


def test_stop_strings(pair, ours):
    plain = pair[0].generate(**COMMON, input_ids=PROMPT)[0]
    names = {i: name for name, i in Letters().get_vocab().items()}
    stop = names[int(plain[12])] + names[int(plain[13])]
    options = {**COMMON, "input_ids": PROMPT}
    criterion = StoppingCriteriaList([StopStringCriteria(Letters(), [stop])])
    wanted = pair[0].generate(**options, stopping_criteria=criterion)
    assert wanted.shape[1] <= 14
    assert torch.equal(ours(**options, stopping_criteria=criterion), wanted)
    options.update(stop_strings=[stop], tokenizer=Letters())
    if ours.way == "attached":
        assert torch.equal(ours(**options), wanted)
    else:
        with pytest.raises(ValueError, match="tokenizer"):
            ours(**options)
