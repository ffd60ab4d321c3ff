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
from tests.conftest import SMALL
from tests.reference import rope
from tests.reference.conversion import F32, converted
from tests.reference.draft import Draft
from tests.reference.rounded import ggml_angles
from tests.reference.sampling import greedy, log_probabilities
from tests.reference.speculation import acceptance
from tests.reference.trunk import Trunk
from tests.reference.twin import write_twin
from tests.reference.weights import from_checkpoint, from_gguf

pytestmark = pytest.mark.engine

N_TOKENS = 300
N_GENERATED = 24
N_DRAFTED = 50
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
    assert noise.max() < 3e-4


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


def test_a_text_with_control_tokens(session, weights, vocabulary):
    tokens = session.tokenize(TEXT)
    assert tokens == vocabulary.encode(TEXT).ids
    noise = apart(log_probabilities(Trunk(weights).logits(tokens)), session.logprobs(tokens))
    assert noise.max() < 1e-3


@pytest.fixture(scope="module")
def vocabulary(source):
    return Tokenizer.from_file(str(source / "tokenizer.json"))


@pytest.fixture(scope="module")
def printable(vocabulary):
    """Which tokens the session generates."""
    texts = (vocabulary.decode([token]) for token in range(SIZE.vocab_size))
    return np.array([bool(re.fullmatch(r"[ -~]+", text)) for text in texts])


def test_greedy_continuations(session, weights, printable):
    prompt = text_of(5)[:100]
    made = session.generate(prompt, N_GENERATED)
    assert list(made.tokens) == greedy(Trunk(weights), prompt, N_GENERATED, printable)


class FewTokens:
    """A change of tensors that leaves four tokens to choose from.

    With random weights a draft is hardly ever right; this one is about every fourth time. The rows
    of the head are opposite in pairs, so that the best token is never one of those left out.
    """

    def __init__(self, tokens):
        self._tokens = tokens

    def __call__(self, name, values):
        kept = np.zeros_like(values)
        if name == "output.weight":
            kept[self._tokens[:2]] = 10 * values[self._tokens[:2]]
            kept[self._tokens[2:]] = -kept[self._tokens[:2]]
        elif name == "markov_w2.weight":
            kept[self._tokens] = 3 * values[self._tokens]
        else:
            return values
        return kept


@pytest.fixture(scope="module")
def drafting(conversion, mainline, printable, tmp_path_factory):
    """A session that drafts, and the models in it."""
    folder = tmp_path_factory.mktemp("drafting")
    four = np.random.default_rng(1).choice(np.flatnonzero(printable), 4, replace=False)
    target = write_twin(conversion.trunk, folder / "target.gguf", FewTokens(four))
    draft = write_twin([conversion.draft], folder / "draft.gguf", FewTokens(four))
    with mainline.load([target], draft=draft) as session:
        yield session, from_gguf(target), from_gguf(draft)


@pytest.mark.parametrize("n_words", [10, 30, 80])
def test_a_draft_is_as_often_right(n_words, drafting, vocabulary, printable):
    """After prompts shorter and longer than the window."""
    session, weights, draft_weights = drafting
    prompt = vocabulary.encode(words(n_words, vocabulary)).ids
    made = session.generate(prompt, N_DRAFTED)
    trunk = Trunk(weights, taps=draft_weights.hyperparameters.draft.targets)
    logits = trunk.logits([*prompt, *made.tokens])[len(prompt) - 1 : -1]
    assert list(made.tokens) == np.where(printable, logits, -np.inf).argmax(axis=1).tolist()
    ours = acceptance(trunk, Draft(draft_weights, weights), prompt, made.tokens)
    assert ours == (made.n_drafted, made.n_accepted)
    assert made.n_accepted > 3
    if n_words == 30:
        sliding = Draft(draft_weights, weights, sliding=True)
        assert acceptance(trunk, sliding, prompt, made.tokens) != ours


def words(count, vocabulary):
    ids = np.random.default_rng(count).integers(300, SIZE.vocab_size - 30, count)
    return " ".join(vocabulary.decode([token]).strip() for token in ids)


def test_a_quantized_file(source, mainline, tmp_path):
    """Exactly by its twin in F32: with quantized weights engines round the activations too."""
    types = {"routed": "Q3_K", "engram": "Q4_K", "attention": "Q8_0", "shared": "Q6_K"}
    files = converted(source, tmp_path, F32 | types).trunk
    tokens = text_of(2)[:150]
    ours = log_probabilities(Trunk(from_gguf(files)).logits(tokens))
    with mainline.load([write_twin(files, tmp_path / "twin.gguf")]) as session:
        assert apart(ours, session.logprobs(tokens)).max() < 1e-3
    with mainline.load(files) as session:
        same = ours.argmax(axis=1) == session.logprobs(tokens).argmax(axis=1)
    assert same.mean() > 0.5


def test_the_released_order_of_layers(mainline, tmp_path, monkeypatch):
    """All forty: noise grows with their number, most of it from angles."""
    size = replace(
        SMALL, n_layers=40, n_heads=4, o_groups=2, o_lora=128, index_heads=32, n_experts=6
    )
    write_miniature(tmp_path / "source", size, seed=5)
    weights = from_checkpoint(tmp_path / "source")
    tokens = np.random.default_rng(0).integers(0, size.vocab_size, 200).tolist()
    with mainline.load(converted(tmp_path / "source", tmp_path).trunk) as session:
        theirs = session.logprobs(tokens)
    assert apart(log_probabilities(Trunk(weights).logits(tokens)), theirs).max() < 5e-3
    monkeypatch.setattr(rope, "angles", ggml_angles(weights.hyperparameters))
    assert apart(log_probabilities(Trunk(weights).logits(tokens)), theirs).max() < 1e-3
