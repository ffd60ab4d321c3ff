"""Random weights with the statistics of trained ones, each tensor on its own.

Every tensor has its own generator, keyed by the seed and its name, so any tensor can be made
without the others. Matrices are heavy-tailed (Student t with five degrees of freedom), their rows
and columns differ in scale, and a few columns stand out by far.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_CHUNK_N_WEIGHTS = 1 << 20
_ROW_STEP = 128
"""Chunks hold whole scale blocks: 32 rows in V4.1, 128 in V4."""

_N_QUANTILES = 1 << 16
_CHANNEL_SPREAD = 0.25
_OUTLIER_SHARE = 1 / 128
_OUTLIER_FACTOR = 8.0


@dataclass(frozen=True, slots=True)
class Around:
    """Values around ``center`` without channel structure: norms, biases, sinks, mixes."""

    center: float
    spread: float

    def of(self, values: Floats) -> Floats:
        """``values`` of unit spread moved to this place."""
        return np.float32(self.center) + np.float32(self.spread) * values


_KINDS = (
    (r"norm\d?\.weight$", Around(1.0, 0.1)),
    (r"\.engram\.[qk]_weight$", Around(1.0, 0.1)),
    (r"\.attn_sink$", Around(0.0, 1.0)),
    (r"\.ape$", Around(0.0, 0.5)),
    (r"hc_\w+_base$", Around(0.0, 0.5)),
    (r"hc_\w+_scale$", Around(0.5, 0.05)),
    (r"gate\.bias(_vl)?$", Around(0.0, 0.1)),
    (r"\.bias$", Around(0.0, 0.02)),
)
"""Tensor name -> how its values lie; all others are matrices."""


def row_chunks(name: str, shape: tuple[int, ...], seed: int) -> Iterator[tuple[int, Floats]]:
    """The float weights of a tensor, some rows at a time: first row, values ``[n, n_cols]``.

    A vector is one row. ``shape`` counts weights, not stored bytes.
    """
    n_rows, n_cols = (1, shape[0]) if len(shape) == 1 else shape
    draw = _generator(name, seed)
    around = next((kind for pattern, kind in _KINDS if re.search(pattern, name)), None)
    columns = _column_scales(draw, n_cols)
    step = max(_ROW_STEP, _CHUNK_N_WEIGHTS // n_cols // _ROW_STEP * _ROW_STEP)
    for first in range(0, n_rows, step):
        n = min(step, n_rows - first)
        if around:
            yield (
                first,
                np.float32(around.center) + np.float32(around.spread) * _t5(draw, n, n_cols),
            )
        else:
            yield first, _channel_scales(draw, n)[:, None] * columns * _t5(draw, n, n_cols)


def _generator(name: str, seed: int) -> np.random.Generator:
    key = sha256(f"{seed}/{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key[:16], "little")))


def _column_scales(draw: np.random.Generator, n_cols: int) -> Floats:
    stands_out = draw.random(n_cols) < _OUTLIER_SHARE
    factors = np.where(stands_out, np.float32(_OUTLIER_FACTOR), np.float32(1.0))
    return _channel_scales(draw, n_cols) * factors / np.float32(math.sqrt(n_cols))


def _channel_scales(draw: np.random.Generator, n: int) -> Floats:
    spread = np.float32(_CHANNEL_SPREAD) * np.clip(_t5(draw, 1, n)[0], -4, 4)
    return np.asarray(np.exp(spread), np.float32)


def _t5(draw: np.random.Generator, n_rows: int, n_cols: int) -> Floats:
    picks = np.frombuffer(draw.bytes(2 * n_rows * n_cols), np.uint16)
    values: Floats = _t5_quantiles()[picks]
    return values.reshape(n_rows, n_cols)


@cache
def _t5_quantiles() -> Floats:
    """Evenly spaced quantiles of Student's t with five degrees of freedom.

    Picking from a table is many times faster than drawing afresh, and channel scales spread the
    picks again. The distribution function is the closed form for odd degrees of freedom
    (Abramowitz and Stegun 26.7.3).
    """
    half = np.sinh(np.linspace(0.0, 5.0, 1 << 14))
    angle = np.arctan(half / math.sqrt(5))
    cosine = np.cos(angle)
    upper = 0.5 + (angle + np.sin(angle) * cosine * (1 + 2 / 3 * cosine**2)) / math.pi
    levels = (np.arange(_N_QUANTILES // 2) + 0.5) / _N_QUANTILES + 0.5
    positive = np.interp(levels, upper, half)
    return np.concatenate([-positive[::-1], positive]).astype(np.float32)
