"""The draft: contexts, windows, the chain."""

import numpy as np
import pytest

from tests.reference.draft import Draft, visible
from tests.reference.trunk import Trunk

WINDOW = 64
"""Of the miniatures."""


def logits_of(draft, taps, token=5):
    context = draft.begin()
    context.follow(taps)
    return context.propose(token).base


@pytest.fixture(scope="module")
def taps(weights, draft_weights, tokens):
    targets = draft_weights.hyperparameters.draft.targets
    return Trunk(weights, taps=targets).begin().read(tokens).taps


@pytest.fixture(scope="module")
def long_taps(taps):
    """More context than the window holds."""
    return np.random.default_rng(3).permutation(np.tile(taps, (1, 3, 1)), axis=1)


def test_a_context_followed_in_pieces_is_the_same(weights, draft_weights, taps):
    draft = Draft(draft_weights, weights)
    whole, text = draft.begin(), draft.begin()
    whole.follow(taps)
    for piece in np.split(taps, [1, 2, 20], axis=1):
        text.follow(piece)
    one, other = whole.propose(9), text.propose(9)
    assert one.tokens == other.tokens
    assert np.abs(one.logits - other.logits).max() < 1e-10
    assert np.abs(one.confidence - other.confidence).max() < 1e-10


def test_proposing_leaves_no_trace(weights, draft_weights, taps):
    context = Draft(draft_weights, weights).begin()
    context.follow(taps)
    first = context.propose(9)
    context.propose(10)
    assert context.propose(9).tokens == first.tokens


def test_every_place_reads_the_last_window_of_the_context_and_the_whole_block():
    seen = visible(10, 3, 4, sliding=False)
    assert seen.tolist() == [[False] * 6 + [True] * 7] * 3


def test_a_sliding_window_loses_the_oldest_rows_place_by_place():
    seen = visible(10, 3, 4, sliding=True)
    assert [row.index(True) for row in seen.tolist()] == [7, 8, 9]
    assert seen[:, 10:].all()
    assert visible(2, 2, 4, sliding=True).all()


@pytest.mark.parametrize("sliding", [False, True])
def test_context_beyond_the_window_does_not_matter(sliding, weights, draft_weights, long_taps):
    draft = Draft(draft_weights, weights, sliding=sliding)
    n_beyond = long_taps.shape[1] - WINDOW
    assert n_beyond > 0
    right = logits_of(draft, long_taps)
    beyond, oldest = long_taps.copy(), long_taps.copy()
    beyond[:, :n_beyond] = 0
    assert np.abs(logits_of(draft, beyond) - right).max() < 1e-10
    oldest[:, n_beyond] = 0
    assert (np.abs(logits_of(draft, oldest) - right).max() > 1e-4) != sliding


def test_the_windows_agree_while_the_context_is_short(weights, draft_weights, taps):
    official = logits_of(Draft(draft_weights, weights), taps)
    assert (logits_of(Draft(draft_weights, weights, sliding=True), taps) == official).all()


def test_the_chain_adds_what_each_token_makes_likely(weights, draft_weights, taps):
    context = Draft(draft_weights, weights).begin()
    context.follow(taps)
    proposal = context.propose(7)
    chain = [7, *proposal.tokens]
    before, after = (draft_weights.tensor(f"markov_w{n}.weight") for n in (1, 2))
    added = before[chain[:-1]] @ after.T
    assert np.abs(added).max() > 0.01
    assert proposal.logits == pytest.approx(proposal.base + added)
    assert proposal.logits.argmax(axis=-1).tolist() == chain[1:]
    assert len(chain) == 1 + draft_weights.hyperparameters.draft.block
    assert proposal.confidence.shape == (5,)


def test_the_token_given_changes_the_whole_block(weights, draft_weights, taps):
    draft = Draft(draft_weights, weights)
    changed = np.abs(logits_of(draft, taps, 5) - logits_of(draft, taps, 6))
    assert (changed.max(axis=1) > 1e-3).all()
