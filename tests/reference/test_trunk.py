"""The trunk as a whole: pieces, limits that bind, observers, masks, noise."""

from dataclasses import replace

import numpy as np
import pytest

from tests.reference.hyperparameters import Candidates
from tests.reference.sampling import greedy, log_probabilities
from tests.reference.trunk import Trunk
from tests.reference.weights import from_checkpoint


def pieces(tokens, sizes):
    sizes = [*sizes, len(tokens) - sum(sizes)]
    ends = np.cumsum(sizes)
    return [tokens[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@pytest.fixture(scope="module")
def whole(weights, tight, tokens):
    return Trunk(weights, tight, taps=(3, 4, 5)).begin().read(tokens)


@pytest.mark.parametrize("sizes", [[1] * 9, [7, 1, 1, 5], [2, 3], [20]], ids=str)
def test_a_text_read_in_pieces_gives_the_same(sizes, weights, tight, tokens, whole):
    text = Trunk(weights, tight, taps=(3, 4, 5)).begin()
    readings = [text.read(piece) for piece in pieces(tokens, sizes)]
    logits = np.concatenate([reading.logits for reading in readings])
    taps = np.concatenate([reading.taps for reading in readings], axis=1)
    assert np.abs(logits - whole.logits).max() < 1e-10
    assert np.abs(taps - whole.taps).max() < 1e-10


def test_no_token_sees_a_later_one(weights, tight, tokens, whole):
    other = [*tokens[:20], *reversed(tokens[20:])]
    changed = np.abs(Trunk(weights, tight).logits(other) - whole.logits)
    assert changed[:20].max() < 1e-10
    assert (changed[20:].max(axis=1) > 1e-3).all()


@pytest.mark.parametrize(
    ("wider", "first"),
    [
        pytest.param({"window": 9}, 8, id="window"),
        pytest.param({"index_top_k": 5}, 4, id="top-k"),
        pytest.param({"candidates": Candidates(source=3, block=3, count=4)}, 9, id="candidates"),
        pytest.param({"clamps": (0.5,) * 6}, 0, id="clamp"),
    ],
)
def test_every_limit_binds(wider, first, weights, tight, tokens, whole):
    """And not before as many rows are there as it lets through."""
    changed = np.abs(Trunk(weights, replace(tight, **wider)).logits(tokens) - whole.logits)
    assert (changed[:first] < 1e-10).all()
    assert changed[first:].max() > 0.1


def test_a_masked_expert_is_never_used(weights, tokens, whole, tight):
    used = {}

    def observe(layer, expert, positions, gates, outputs):
        used.setdefault(layer, set()).add(expert)
        assert len(positions) == len(gates) == len(outputs)

    Trunk(weights, tight, observer=observe).logits(tokens)
    assert set(used) == set(range(6))
    masked = {2: sorted(used[2])[:2], 4: sorted(used[4])[-1:]}
    used.clear()
    logits = Trunk(weights, tight, observer=observe, masked=masked).logits(tokens)
    assert not any(used[layer].intersection(masked[layer]) for layer in masked)
    assert np.abs(logits - whole.logits).max() > 0.1


def test_single_precision_is_noise(checkpoint, weights, tokens):
    double = log_probabilities(Trunk(weights).logits(tokens))
    single = log_probabilities(Trunk(from_checkpoint(checkpoint, np.float32)).logits(tokens))
    assert single.dtype == np.float32
    assert 0 < np.abs(single - double).max() < 1e-3
    assert np.median(np.abs(single - double)) < 1e-4


def test_greedy_takes_the_likeliest_each_time(weights, tight, tokens):
    prompt = tokens[:5]
    chosen = greedy(Trunk(weights, tight), prompt, 4)
    logits = Trunk(weights, tight).logits(prompt + chosen)
    assert chosen == logits[4:-1].argmax(axis=-1).tolist()


def test_log_probabilities_sum_to_one(whole):
    assert np.exp(log_probabilities(whole.logits + 1000)).sum(axis=-1) == pytest.approx(1)
