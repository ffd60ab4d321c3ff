"""Compressed rows: a few tokens pooled into one row that any later token may read.

Source: DeepSeek-V4.1-Flash inference/model.py (class Compressor). Groups are disjoint and have no
positional term; V4's overlapped and had one.
"""

from __future__ import annotations

import numpy as np

from tests.reference.arrays import Floats, Ints, Mask
from tests.reference.layer import Layer
from tests.reference.norm import rms


def latents(x: Floats, layer: Layer) -> Floats:
    """Pooled rows ``[n, d]`` of whole groups ``[n * ratio, D]``, before rotation."""
    rows = x @ layer("attn_compressor_kv.weight").T
    if layer.ratio > 1:
        grouped = (len(x) // layer.ratio, layer.ratio, rows.shape[-1])
        gates = x @ layer("attn_compressor_gate.weight").T
        rows = pool(rows.reshape(grouped), gates.reshape(grouped))
    return rms(rows, layer.h.rms_eps, layer("attn_compressor_norm.weight"))


def pool(rows: Floats, gates: Floats) -> Floats:
    """``[n, ratio, d]`` to ``[n, d]``: a softmax over the group's tokens in each channel."""
    grown = np.exp(gates - gates.max(axis=1, keepdims=True))
    return (rows * grown / grown.sum(axis=1, keepdims=True)).sum(axis=1)


def group_positions(first: int, n_groups: int, ratio: int) -> Ints:
    """Where groups ``first`` … are rotated to: the position of their first token."""
    return (first + np.arange(n_groups)) * ratio


def finished(positions: Ints, n_rows: int, ratio: int) -> Mask:
    """Which of the rows 0 … ``n_rows`` each position may see: its own token may finish one."""
    return np.arange(n_rows) < ((positions + 1) // ratio)[:, None]
