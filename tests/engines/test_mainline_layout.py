"""Converted miniatures in mainline llama.cpp: what recipes make loads, tokenizes and computes."""

import json
import math

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.gguf.model_file import read_shards
from pipeline.model.metadata.vocabulary import tokenizer_keys
from tests.engines.edited import Edited
from tests.engines.engine import Refused
from tests.pipeline.test_tokenizer import released, released_file

pytestmark = pytest.mark.engine

PROMPT = "Plan, then fill: headers alone decide everything. 7 layers, 42 rows; für 中文."

TEXTS = (
    PROMPT,
    "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>",
    "line\n\n  indented\ttab\r\n   ",
    "1234567 12,345.678 ½ ²",
    "ひらがなカタカナ漢字 한국어 العربية ไทย",
    "🙂👩‍👩‍👧 e\u0301 \u200b\ufeff",
    "def f(x):\n    return {'a': x**2} # <｜not▁one｜>",
    "don't WON'T I'm we'll _x__y_ a-b",
)


@pytest.fixture(scope="module", params=["native", "lowbit-q2_k"])
def shards(request, converted):
    return converted(request.param, "mainline").shards


@pytest.fixture(scope="module")
def session(mainline, shards):
    with mainline.load(shards) as session:
        yield session


@pytest.fixture(scope="module")
def tokens(session):
    return session.tokenize(PROMPT)


@pytest.fixture(scope="module")
def logprobs(session, tokens):
    return session.logprobs(tokens)


def test_the_engine_counts_what_we_wrote(session, shards):
    tensors = [tensor for _, tensor in read_shards(shards).tensors.values()]
    assert session.n_params == sum(math.prod(tensor.ne) for tensor in tensors)
    assert session.nbytes == sum(tensor.nbytes for tensor in tensors)


def test_every_position_has_a_distribution(session, tokens, logprobs):
    assert len(tokens) > 40
    assert logprobs.shape == (len(tokens), session.n_vocab)
    assert np.isfinite(logprobs).all()
    assert np.abs(np.exp(logprobs).sum(axis=1) - 1).max() < 1e-12
    # none is flat, and they differ from place to place
    assert logprobs.std(axis=1).min() > 0.1
    assert np.abs(np.diff(logprobs, axis=0)).max(axis=1).min() > 0.1


def test_what_is_generated_is_what_the_distributions_say(session, tokens):
    made = list(session.generate(tokens, 8).tokens)
    told = session.logprobs([*tokens, *made])[len(tokens) - 1 : -1]
    rank = (told > np.take_along_axis(told, np.array(made)[:, None], axis=1)).sum(axis=1)
    # only the tokens that spell no printable ASCII may be likelier: a third of this vocabulary
    assert np.median(rank) < 8
    assert (rank == 0).any()


def test_one_file_gives_the_same_logits_as_its_shards(mainline, shards, tokens, logprobs, tmp_path):
    whole = Edited.read(shards).write(tmp_path / "whole.gguf")
    with mainline.load([whole]) as session:
        assert np.array_equal(session.logprobs(tokens), logprobs)


def test_the_engine_tokenizes_as_the_checkpoints_tokenizer(session, miniature):
    library = Tokenizer.from_file(str(miniature / "tokenizer.json"))
    for text in TEXTS:
        wanted = library.encode(text, add_special_tokens=False).ids
        assert session.tokenize(text) == wanted, text


def test_the_released_vocabulary_tokenizes_as_its_library(mainline, small_mainline, tmp_path):
    model = Edited.read(small_mainline.shards)
    for entry in tokenizer_keys(released()):
        model = model.key(entry)
    path = Edited(model.keys, {}).write(tmp_path / "vocabulary.gguf")
    library = Tokenizer.from_str(json.dumps(json.loads(released_file("tokenizer.json"))))
    with mainline.load_vocabulary([path]) as session:
        for text in TEXTS:
            wanted = library.encode(text, add_special_tokens=False).ids
            assert session.tokenize(text) == wanted, text


def test_the_forks_layout_is_refused_by_name(mainline, converted):
    with pytest.raises(Refused, match="wrong number of tensors; expected 226, got 218"):
        mainline.load(converted("native", "fork").shards)


@pytest.mark.parametrize("n_given", [1, 3])
def test_a_set_with_a_missing_shard_is_refused(mainline, small_mainline, n_given):
    with pytest.raises(Refused, match=r"failed to (open|load)"):
        mainline.load(small_mainline.shards[:n_given])


def test_a_set_is_loaded_by_its_first_shard_only(mainline, small_mainline):
    first, second, *rest = small_mainline.shards
    with pytest.raises(Refused, match=r"illegal split file idx: 1|unknown model architecture: ''"):
        mainline.load([second, first, *rest])
