"""The engines themselves: both say the same of one model, and whatever happens is told."""

import os
import sys

import numpy as np
import pytest

from pipeline.gguf.reader import read_gguf
from tests.engines.engine import EngineDied, Refused
from tests.engines.process import Process

pytestmark = pytest.mark.engine

TEXT = "Hello, world. für 中文, and \x00 too"


@pytest.fixture(params=["mainline", "native"])
def engine(request):
    return request.getfixturevalue(request.param)


def test_both_engines_say_the_same_of_a_model_that_both_read(mainline, native, plain):
    with mainline.load([plain]) as one, native.load([plain]) as other:
        tokens = one.tokenize(TEXT)
        assert other.tokenize(TEXT) == tokens
        assert np.abs(one.logprobs(tokens) - other.logprobs(tokens)).max() < 1e-5
        assert one.generate(tokens, 16) == other.generate(tokens, 16)
        assert (one.n_params, one.nbytes) == (other.n_params, other.nbytes)


def test_a_row_is_what_comes_after_its_token(engine, plain):
    with engine.load([plain]) as session:
        tokens = session.tokenize(TEXT)
        whole = session.logprobs(tokens)
        assert np.abs(whole[:9] - session.logprobs(tokens[:9])).max() < 1e-5
        assert np.abs(np.exp(whole).sum(axis=1) - 1).max() < 1e-12
        assert session.generate(tokens, 3).tokens[0] in np.argsort(whole[-1])[-100:]


def test_control_tokens_are_read_as_such_only_if_asked(engine, plain):
    with engine.load([plain]) as session:
        assert session.tokenize("a<control 3>") == [97, 259]
        assert len(session.tokenize("a<control 3>", special=False)) == 12


def test_a_vocabulary_alone_is_enough_to_tokenize(engine, plain):
    with engine.load_vocabulary([plain]) as session:
        assert session.tokenize("ab") == [97, 98]
        with pytest.raises(ValueError, match="loaded"):
            session.logprobs([64])


def test_headers_alone_are_enough_to_count(native, plain, tmp_path):
    hollow, content = tmp_path / "hollow.gguf", plain.read_bytes()
    header_nbytes = read_gguf(plain).data_offset
    hollow.write_bytes(content[:header_nbytes])
    os.truncate(hollow, len(content))
    with native.load_headers([hollow]) as session:
        assert session.nbytes == 4 * session.n_params == len(content) - header_nbytes
        with pytest.raises(ValueError, match="not loaded"):
            session.logprobs([1])


@pytest.mark.parametrize(
    ("tokens", "n", "said"),
    [
        ([], 1, "no tokens"),
        ([300], 1, "not in the vocabulary"),
        ([-1], 1, "not in the vocabulary"),
        ([1] * 500, 20, "more tokens than the context of 512"),
    ],
)
def test_requests_without_sense_are_told_apart_from_refusals(engine, plain, tokens, n, said):
    with engine.load([plain]) as session:
        with pytest.raises(ValueError, match=said):
            session.generate(tokens, n)
        assert session.logprobs([1]).shape == (1, 300)


def test_a_file_that_is_no_model_is_refused_in_the_engines_words(engine, tmp_path):
    path = tmp_path / "no model.gguf"
    path.write_bytes(b"GGUX" + bytes(1000))
    with pytest.raises(Refused, match="invalid magic characters: 'GGUX'"):
        engine.load([path])


def test_a_process_that_does_not_answer_is_ended():
    waiting = Process([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(EngineDied, match=r"ended with -9 at load \(deadline 0.2 s\)"):
        waiting.ask("load", deadline_s=0.2)
    waiting.close()


def test_the_last_words_of_a_process_are_kept():
    said = "import sys; sys.stdin.readline(); sys.exit('GGML_ASSERT(it) failed')"
    dying = Process([sys.executable, "-c", said])
    with pytest.raises(EngineDied, match=r"GGML_ASSERT\(it\) failed"):
        dying.ask("load")
    dying.close()
