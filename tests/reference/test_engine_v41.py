"""The reference against llama.cpp itself, over files that this project has made.

The reference decodes the checkpoint with none of the converter's code, so that what both agree on
is right from source bytes to probabilities. The text is so long that windows, picks, candidates and
clamps all leave something out.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.miniature.checkpoint import write_miniature
from pipeline.miniature.size import MiniatureSize
from tests.reference import rope
from tests.reference.conversion import F32, converted
from tests.reference.rounded import ggml_angles
from tests.reference.sampling import greedy, log_probabilities
from tests.reference.trunk import Trunk
from tests.reference.twin import write_twin
from tests.reference.weights import from_checkpoint, from_gguf

pytestmark = pytest.mark.engine

N_TOKENS = 300
N_GENERATED = 24
SIZE = MiniatureSize(index_heads=32, n_experts=8, n_experts_used=3)
"""With fewer index heads some scores are exactly zero, and what is picked among them is chance."""

TEXT = "<｜begin▁of▁sentence｜><｜User｜>Wie heißt er? 中文 and 1234567.\n<｜Assistant｜></think>"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A miniature whose activations are large enough to be clamped."""
    folder = tmp_path_factory.mktemp("engine checkpoint")
    write_miniature(folder, SIZE, seed=11)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["text_config"]["swiglu_limit"] = 2.0
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def weights(source):
    return from_checkpoint(source)


@pytest.fixture(scope="module")
def conversion(source, tmp_path_factory):
    """A lossless one."""
    return converted(source, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def session(conversion, mainline):
    with mainline.load(conversion.trunk) as session:
        yield session


def text_of(seed):
    return np.random.default_rng(seed).integers(0, SIZE.vocab_size, N_TOKENS).tolist()


def apart(ours, theirs):
    """Largest difference at each position."""
    return np.abs(ours - theirs).max(axis=1)


@pytest.fixture(scope="module", params=[0, 1], ids="seed {}".format)
def answered(request, session):
    tokens = text_of(request.param)
    return tokens, session.logprobs(tokens)


def test_every_position_of_a_long_text(answered, weights):
    tokens, theirs = answered
    noise = apart(log_probabilities(Trunk(weights).logits(tokens)), theirs)
    assert noise.max() < 1e-3
    assert np.median(noise) < 1e-4


def test_what_remains_is_how_the_engine_rounds_angles(answered, weights, monkeypatch):
    tokens, theirs = answered
    monkeypatch.setattr(rope, "angles", ggml_angles(weights.hyperparameters))
    noise = apart(log_probabilities(Trunk(weights).logits(tokens)), theirs)
    assert noise.max() < 2e-4


@pytest.mark.parametrize("wider", ["window", "index_top_k", "candidates", "clamps"])
def test_the_text_is_long_enough_to_tell(wider, answered, weights):
    tokens, theirs = answered
    h = weights.hyperparameters
    limits = {
        "window": h.window + 1,
        "index_top_k": h.index_top_k + 1,
        "candidates": replace(h.candidates, count=h.candidates.count + 1),
        "clamps": (2.1,) * h.n_layers,
    }
    other = Trunk(weights, replace(h, **{wider: limits[wider]})).logits(tokens)
    assert apart(log_probabilities(other), theirs).max() > 0.01


def test_a_text_with_control_tokens(session, weights, source):
    tokens = session.tokenize(TEXT)
    assert tokens == Tokenizer.from_file(str(source / "tokenizer.json")).encode(TEXT).ids
    noise = apart(log_probabilities(Trunk(weights).logits(tokens)), session.logprobs(tokens))
    assert noise.max() < 1e-3


def test_greedy_continuations(session, weights, source):
    vocabulary = Tokenizer.from_file(str(source / "tokenizer.json"))
    allowed = np.array(
        [
            bool(re.fullmatch(r"[ -~]+", vocabulary.decode([token])))
            for token in range(SIZE.vocab_size)
        ]
    )
    prompt = text_of(5)[:100]
    made = session.generate(prompt, N_GENERATED)
    assert list(made.tokens) == greedy(Trunk(weights), prompt, N_GENERATED, allowed)


def test_a_quantized_file(source, mainline, tmp_path):
    """Its twin in F32: engines round activations to the types of quantized weights."""
    types = {"routed": "Q3_K", "engram": "Q4_K", "attention": "Q8_0", "shared": "Q6_K"}
    files = converted(source, tmp_path, F32 | types).trunk
    with mainline.load([write_twin(files, tmp_path / "twin.gguf")]) as session:
        theirs = session.logprobs(text_of(2))
    weights = from_gguf(files)
    noise = apart(log_probabilities(Trunk(weights).logits(text_of(2))), theirs)
    assert noise.max() < 1e-3
