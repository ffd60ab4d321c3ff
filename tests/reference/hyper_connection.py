"""Hyper-connections: four residual streams, mixed anew at every sublayer.

Source: DeepSeek-V4.1-Flash inference/model.py (hc_pre, hc_post and the Sinkhorn kernel).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.reference.arrays import Floats
from tests.reference.hyperparameters import Hyperparameters
from tests.reference.layer import Layer
from tests.reference.norm import rms


class Mixes(NamedTuple):
    """Weights of the streams at one sublayer, per token.

    ``pre`` ``[T, S]`` collapses the streams for the *next* sublayer; ``post`` ``[T, S]`` spreads
    this sublayer's output; ``comb`` ``[T, S, S]`` moves stream i (first index) to stream j.
    """

    pre: Floats
    post: Floats
    comb: Floats


def mixes(streams: Floats, layer: Layer, sublayer: str) -> Mixes:
    """What the streams ``[T, S, D]`` say about their own mixing; ``sublayer`` is attn or ffn."""
    h = layer.h
    n = h.n_streams
    projected = flat_norm(streams, h.rms_eps) @ layer(f"hc_{sublayer}_fn.weight").T
    scale, base = layer(f"hc_{sublayer}_scale.weight"), layer(f"hc_{sublayer}_base.weight")
    logits = projected * np.repeat(scale, [n, n, n * n]) + base
    pre, post, comb = np.split(logits, [n, 2 * n], axis=-1)
    return Mixes(pre_weights(pre, h), post_weights(post), sinkhorn(comb.reshape(-1, n, n), h))


def flat_norm(streams: Floats, eps: float) -> Floats:
    """All streams of a token as one vector, normalised as one: ``[T, S * D]``."""
    return rms(streams.reshape(len(streams), -1), eps)


def pre_weights(logits: Floats, h: Hyperparameters) -> Floats:
    """Weights of the collapse."""
    return sigmoid(logits) + h.hc_eps


def post_weights(logits: Floats) -> Floats:
    """Weights of the spread: between 0 and 2."""
    return 2 * sigmoid(logits)


def sinkhorn(logits: Floats, h: Hyperparameters) -> Floats:
    """``[T, S, S]`` made (nearly) doubly stochastic; the last pass is over columns.

    The first pass over rows is a softmax; ``sinkhorn_passes`` passes over columns have one pass
    fewer over rows between them.
    """
    comb = softmax(logits) + h.hc_eps
    comb = comb / (comb.sum(axis=-2, keepdims=True) + h.hc_eps)
    for _ in range(h.sinkhorn_passes - 1):
        comb = comb / (comb.sum(axis=-1, keepdims=True) + h.hc_eps)
        comb = comb / (comb.sum(axis=-2, keepdims=True) + h.hc_eps)
    return comb


def collapse(streams: Floats, pre: Floats) -> Floats:
    """One vector per token, ``[T, D]``."""
    return np.einsum("ts,tsd->td", pre, streams)


def expand(y: Floats, streams: Floats, mix: Mixes) -> Floats:
    """The streams after a sublayer whose output is ``y`` ``[T, D]``."""
    return mix.post[:, :, None] * y[:, None, :] + np.einsum("tij,tid->tjd", mix.comb, streams)


def softmax(logits: Floats) -> Floats:
    """Over the last axis."""
    grown = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return grown / grown.sum(axis=-1, keepdims=True)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0, -x))
