"""From logits to tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tests.reference.arrays import Floats, Mask
from tests.reference.trunk import Trunk


def log_probabilities(logits: Floats) -> Floats:
    """Natural logarithms of the softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def greedy(
    trunk: Trunk, prompt: Sequence[int], count: int, allowed: Mask | None = None
) -> list[int]:
    """The ``count`` tokens that follow ``prompt`` when the likeliest is always taken.

    Args:
        trunk: What reads them, in pieces.
        prompt: What they follow.
        count: How many.
        allowed: Which tokens may be taken, ``[vocab]``; all, if not given.
    """
    text, chosen = trunk.begin(), []
    piece = list(prompt)
    for _ in range(count):
        logits = text.read(piece).logits[-1]
        ranked = logits if allowed is None else np.where(allowed, logits, -np.inf)
        chosen.append(int(ranked.argmax()))
        piece = chosen[-1:]
    return chosen
