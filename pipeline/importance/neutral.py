"""From sums of squares to weights that a quantizer can search with.

The weight of a column is the mean of the squares that it was multiplied with. What was seen on few
tokens is drawn towards a neutral weight, the same for all columns: llama.cpp pull request 15060
counts the neutral weight as so many tokens more. There it is 1; here it is the mean weight of the
tensor's matrices that were seen, so that it is neutral at any scale of activations.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.quant.guard import IMPORTANCE_RANGE

F64 = NDArray[np.float64]
F32 = NDArray[np.float32]

_LEAST = float(np.finfo(np.float32).tiny)


def mean_weights(sums: NDArray[np.floating], counts: NDArray[np.floating], prior: float) -> F64:
    """Weights of the columns of each matrix.

    ``(sums + prior * m) / (counts + prior)`` with the neutral weight m. A matrix that saw no token,
    and a column that was 0 on every token, get m itself: a weight of 0 would let a quantizer spoil
    what other texts may need. With ``prior`` 0 the rest is what llama-quantize computes.

    Args:
        sums: ``[n_matrices, n_cols]`` sums of squares.
        counts: ``[n_matrices]`` tokens they are of; one at least is not 0.
        prior: What m counts for, in tokens.

    Returns:
        ``[n_matrices, n_cols]``, all above 0 where one of ``sums`` is.
    """
    seen = counts > 0
    tokens = counts.astype(np.float64)
    neutral = float(np.mean(sums[seen].mean(axis=1, dtype=np.float64) / tokens[seen]))
    divisors = np.where(seen, tokens + prior, 1.0)
    weights = (sums + np.float64(prior * neutral)) / divisors[:, None]
    weights[(sums == 0) | ~seen[:, None]] = neutral
    return weights


def searchable(weights: F64) -> F32:
    """``weights`` as a quantizer takes them: above 0, the largest of a row in its range.

    A row outside `IMPORTANCE_RANGE` is multiplied by a power of two, which no search notices; one
    compares its weighted errors with those of other rows at one's own risk.
    """
    peaks = weights.max(axis=1)
    least, most = IMPORTANCE_RANGE
    outside = (peaks < least) | (peaks > most)
    if outside.any():
        powers = np.where(outside, -np.floor(np.log2(peaks)), 0).astype(np.int64)
        weights = np.ldexp(weights, powers[:, None])
    return np.maximum(weights, _LEAST).astype(np.float32)
