"""Rotary positions: pairs of channels turned by an angle that grows with the position.

Source: DeepSeek-V4.1-Flash inference/model.py (precompute_freqs_cis, apply_rotary_emb).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig, RopeScaling


class Turns(NamedTuple):
    """Cosine and sine of each pair's angle at each position, both ``[T, n_pairs]``."""

    cos: Tensor
    sin: Tensor


def frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """Radians per position of each pair, float64 ``[rope_dim / 2]``, in a layer of this ratio.

    A layer with compressed rows uses another base and YaRN for everything in it, its own window
    rows and queries included, at every length; a window layer uses neither. No amplitude is scaled.
    """
    base = config.compress_rope_theta if ratio else config.rope_theta
    steps = torch.arange(0, config.rope_dim, 2, dtype=torch.float64) / config.rope_dim
    plain = base**-steps
    return _slowed(plain, base, config.rope_scaling) if ratio else plain


def turns(positions: Tensor, rates: Tensor, dtype: torch.dtype) -> Turns:
    """The turns of ``positions`` ``[T]``; angles are taken in float64, as the rates are."""
    angles = positions.to(torch.float64)[:, None] * rates
    return Turns(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x: Tensor, by: Turns, *, inverse: bool = False) -> Tensor:
    """``x`` (``[T, width]`` or ``[T, heads, width]``) with its last channels turned.

    Neighbouring channels (2i, 2i + 1) are a pair. ``inverse`` turns back.
    """
    shape = (len(x), *[1] * (x.ndim - 2), by.cos.shape[-1])
    cos, sin = by.cos.view(shape), by.sin.view(shape)
    if inverse:
        sin = -sin
    n_still = x.shape[-1] - 2 * shape[-1]
    out = torch.empty_like(x)
    out[..., :n_still] = x[..., :n_still]
    even, odd = x[..., n_still::2], x[..., n_still + 1 :: 2]
    out[..., n_still::2] = even * cos - odd * sin
    out[..., n_still + 1 :: 2] = even * sin + odd * cos
    return out


def _slowed(plain: Tensor, base: float, yarn: RopeScaling) -> Tensor:
    """YaRN: fast pairs stay, slow pairs turn ``factor`` times slower, a ramp lies between."""
    n_channels = 2 * len(plain)

    def pair_with(n_turns: float) -> float:
        """The (fractional) pair that makes ``n_turns`` within the original context."""
        spread = math.log(yarn.original_context / (2 * math.pi * n_turns))
        return n_channels * spread / (2 * math.log(base))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_with(yarn.beta_slow)), n_channels - 1)
    places = torch.arange(len(plain), dtype=torch.float64)
    ramp = ((places - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - ramp) + plain / yarn.factor * ramp
