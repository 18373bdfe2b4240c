"""Files and folders that appear whole or not at all, whatever stops the writing."""

import os
import signal

import pytest
import torch
from eagle2 import heads, save_head
from eagle2.whole_file import whole
from test_cli import run
from tiny import make_head, make_target


def test_what_was_written_replaces_what_was_there(tmp_path):
    path = tmp_path / "x.bin"
    for text in ("old", "new"):
        with whole(path) as fresh:
            fresh.write_text(text)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == text
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "x.bin"
    path.write_text("old")

    def stopped():
        with whole(path) as fresh:
            fresh.write_text("ne")
            raise error

    with pytest.raises(error):
        stopped()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_half_written(tmp_path, monkeypatch, sent, code):
    save_head(make_head(make_target()), tmp_path / "head", torch.float32)

    def stopped(weights, path, *rest):
        path.write_bytes(b"half")
        os.kill(os.getpid(), sent)

    monkeypatch.setattr(heads, "save_file", stopped)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers may ignore it
    try:
        assert run(monkeypatch, "convert", tmp_path / "head", tmp_path / "out") == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [*tmp_path.iterdir()] == [tmp_path / "head"]
