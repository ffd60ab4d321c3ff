"""What the logits show of every wrong rule: a comparison of logits sees all that can matter."""

from dataclasses import replace

import numpy as np
import pytest

from tests.reference.mistakes import HARMLESS, MISTAKES
from tests.reference.trunk import Trunk


@pytest.fixture(scope="module")
def right(weights, tight, tokens):
    return Trunk(weights, tight).logits(tokens)


@pytest.fixture
def change(weights, tight, tokens, right, monkeypatch):
    """How far a wrong rule moves the logits, over the largest of them."""

    def measured(wrong):
        constants = wrong if isinstance(wrong, dict) else {}
        for module, name, function in [] if constants else wrong:
            monkeypatch.setattr(module, name, function)
        logits = Trunk(weights, replace(tight, **constants)).logits(tokens)
        return np.abs(logits - right).max() / np.abs(right).max()

    return measured


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_rule_is_seen(name, change):
    least, wrong = MISTAKES[name]
    assert change(wrong) > least


@pytest.mark.parametrize("name", HARMLESS)
def test_a_rule_that_cannot_matter_is_not_seen(name, change):
    most, wrong = HARMLESS[name]
    assert change(wrong) < most
