"""Rotary positions: pairs of channels turned by an angle that grows with the position.

Source: DeepSeek-V4.1-Flash inference/model.py (precompute_freqs_cis, apply_rotary_emb).
"""

from __future__ import annotations

import math

import numpy as np

from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters, Yarn


def frequencies(h: Hyperparameters, ratio: int) -> Floats:
    """Radians per position of each pair, ``[rotary_dim / 2]``, in a layer of this ratio.

    A layer with compressed rows uses another base and YaRN for everything in it, its own window
    rows and queries included; a window layer uses neither.
    """
    base = h.compressed_rope_base if ratio else h.rope_base
    plain = base ** (-np.arange(0, h.rotary_dim, 2) / h.rotary_dim)
    return slowed(plain, base, h.yarn) if ratio and h.yarn else plain


def slowed(plain: Floats, base: float, yarn: Yarn) -> Floats:
    """YaRN: fast pairs stay, slow pairs turn ``factor`` times slower, a ramp lies between.

    Sources differ on when: one port turns it on only for tables longer than the original context.
    The official code has it on at every length, and scales no amplitude.
    """
    n_channels = 2 * len(plain)

    def pair_with(turns: float) -> float:
        """The (fractional) pair that makes ``turns`` turns within the original context."""
        spread = math.log(yarn.original_context / (2 * math.pi * turns))
        return n_channels * spread / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), n_channels - 1)
    ramp = np.clip((np.arange(len(plain)) - low) / max(high - low, 1e-3), 0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp


def rotate(x: Floats, positions: Ints, rates: Floats, *, inverse: bool = False) -> Floats:
    """``x`` (``[T, width]`` or ``[T, heads, width]``) with its last channels turned.

    Args:
        x: What to turn; the last ``2 * len(rates)`` channels are rotary.
        positions: Position of each of the T rows.
        rates: As `frequencies`.
        inverse: Turn back instead.
    """
    turns = angles(positions, rates).reshape(len(x), *[1] * (x.ndim - 2), len(rates))
    cos, sin = (part.astype(x.dtype) for part in (np.cos(turns), np.sin(turns)))
    still, turned = np.split(x, [x.shape[-1] - 2 * len(rates)], axis=-1)
    return np.concatenate([still, turn_pairs(turned, cos, -sin if inverse else sin)], axis=-1)


def angles(positions: Ints, rates: Floats) -> Floats:
    """Angle of each pair at each position, ``[T, n]``.

    Double precision; the official code has single, and ggml multiplies from pair to pair in it.
    """
    return positions[:, None] * rates


def turn_pairs(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Neighbouring channels (2i, 2i+1) turned in their plane."""
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return pairs.reshape(x.shape)
