"""Attention over shared rows: every head reads the same vectors, as keys and as values.

Source: DeepSeek-V4.1-Flash inference/model.py (class Attention, sparse_attn). There is a norm on
the low-rank query and none on the heads after it; V4 had both.
"""

from __future__ import annotations

import numpy as np

from tests.reference import rope
from tests.reference.arrays import Floats, Ints, Mask
from tests.reference.layer import Layer
from tests.reference.norm import rms


def low_rank(x: Floats, layer: Layer) -> Floats:
    """The low-rank query ``[T, q_rank]`` that heads and indexer start from."""
    return rms(x @ layer("attn_q_a.weight").T, layer.h.rms_eps, layer("attn_q_a_norm.weight"))


def queries(low: Floats, layer: Layer) -> Floats:
    """``[T, H, d]``, before rotation."""
    return (low @ layer("attn_q_b.weight").T).reshape(len(low), layer.h.n_heads, layer.h.head_dim)


def token_rows(x: Floats, layer: Layer) -> Floats:
    """The row that each token leaves to be read, ``[T, d]``, before rotation."""
    return rms(x @ layer("attn_kv.weight").T, layer.h.rms_eps, layer("attn_kv_a_norm.weight"))


def window(positions: Ints, n_rows: int, width: int) -> Mask:
    """Which of ``n_rows`` token rows each position sees: the last ``width``, its own included."""
    back = positions[:, None] - np.arange(n_rows)
    return (back >= 0) & (back < width)


def read(
    low: Floats, positions: Ints, rows: Floats, seen: Mask, layer: Layer, rates: Floats
) -> Floats:
    """What ``[T, D]`` the tokens gather from rotated ``rows``.

    Args:
        low: As `low_rank`.
        positions: Of the T tokens.
        rows: ``[n, d]``, window and compressed rows alike.
        seen: ``[T, n]``.
        layer: The layer.
        rates: Its rotation.
    """
    q = rope.rotate(queries(low, layer), positions, rates)
    gathered = attend(q, rows, seen, layer("attn_sinks.weight"))
    return project(rope.rotate(gathered, positions, rates, inverse=True), layer)


def attend(q: Floats, rows: Floats, seen: Mask, sinks: Floats) -> Floats:
    """Softmax attention ``[T, H, d]``; each head's sink is one more logit that brings no value."""
    scores = np.einsum("thd,nd->thn", q, rows, optimize=True) / np.sqrt(q.dtype.type(q.shape[-1]))
    scores = np.where(seen[:, None, :], scores, -np.inf)
    most = np.maximum(scores.max(axis=-1), sinks)[..., None]
    grown = np.exp(scores - most)
    total = grown.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None] - most)
    return np.einsum("thn,nd->thd", grown / total, rows, optimize=True)


def project(gathered: Floats, layer: Layer) -> Floats:
    """Heads to ``[T, D]``: neighbouring heads form groups, each with a low-rank map of its own."""
    n = layer.h.o_groups
    grouped = gathered.reshape(len(gathered), n, -1)
    first = layer("attn_output_a.weight").reshape(n, -1, grouped.shape[-1])
    low = np.einsum("tgi,goi->tgo", grouped, first, optimize=True)
    return low.reshape(len(low), -1) @ layer("attn_output_b.weight").T
