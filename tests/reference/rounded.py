"""Angles as ggml rounds them, which is most of what parts an engine from exact arithmetic.

Source: ggml-org/llama.cpp ggml/src/ggml-cpu/ops.cpp (ggml_rope_cache_init, rope_yarn): in single
precision, the angle of a pair is that of the pair before it times one factor, and YaRN blends two
angles. The error grows with the position.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters

Angles = Callable[[Ints, Floats], Floats]


def ggml_angles(h: Hyperparameters) -> Angles:
    """A stand-in for `rope.angles` in a model with these constants and YaRN."""
    assert h.yarn
    slowest = np.float32(1 / h.yarn.factor)

    def angles(positions: Ints, rates: Floats) -> Floats:
        n = len(rates)
        plain = h.rope_base ** (-np.arange(n) / n)
        if np.allclose(rates, plain):
            return _multiplied(positions, h.rope_base, n)
        base = h.compressed_rope_base
        turned = _multiplied(positions, base, n)
        plain = base ** (-np.arange(n) / n)
        kept = ((rates / plain - slowest) / (1 - slowest)).astype(np.float32)
        return slowest * turned * (1 - kept) + turned * kept

    return angles


def _multiplied(positions: Ints, base: float, n: int) -> Floats:
    factors = np.full((len(positions), n), base ** (-1 / n), np.float32)
    factors[:, 0] = positions
    return np.multiply.accumulate(factors, axis=1)
