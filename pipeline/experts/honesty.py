"""What a saliency table or a keep list may be called: how near to REAP its numbers are.

REAP (arXiv 2510.13999, equation 9) asks for the gate that multiplies an expert in the layer's
output. Published files differ in just that, and the difference does not show in their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Honesty(StrEnum):
    """The label, from what may be called REAP to what may not."""

    TRUE_GATE = "true-gate"
    """Gates as the model applies them: selected with the bias, normalised, scaled."""
    UNNORMALISED_GATE = "unnormalised-gate"
    """The model's own selection and scores, before they are divided by their sum."""
    SOFTMAX_GATE = "softmax-gate"
    """A softmax of the router's logits, selected without the bias: another router's gates."""
    RECOVERED = "recovered"
    """A keep list read back from a published checkpoint; its scores are not known."""
    LIST_ONLY = "list-only"
    """A keep list as its author wrote it; its scores are not known."""
    PROXY = "proxy"
    """Numbers that stand in for REAP without its formula."""


GATES = frozenset({Honesty.TRUE_GATE, Honesty.UNNORMALISED_GATE, Honesty.SOFTMAX_GATE})
"""Labels that say which gate was measured; sums of different gates mean different things."""

_ORDER = tuple(Honesty)


def weakest(labels: Iterable[Honesty]) -> Honesty:
    """The label of what was made from things with these labels: a proxy never disappears."""
    return max(labels, key=_ORDER.index)
