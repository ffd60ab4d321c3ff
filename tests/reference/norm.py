"""Root mean square normalisation."""

from __future__ import annotations

import numpy as np

from tests.reference.arrays import Floats


def rms(x: Floats, eps: float, gain: Floats | None = None) -> Floats:
    """``x`` over the root of its mean square (last axis), times ``gain`` where there is one.

    Source: DeepSeek-V4.1-Flash inference/model.py, class RMSNorm.
    """
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return normed if gain is None else normed * gain
