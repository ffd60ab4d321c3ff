"""Hyper-connections: residual streams, mixed anew at every sublayer.

Source: DeepSeek-V4.1-Flash inference/model.py (hc_pre, hc_post and the Sinkhorn kernel). Mixes lag:
a sublayer collapses the streams with weights that the sublayer before it computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.forward.linear import linear
from pipeline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MixWeights:
    """``fn`` ``[S * (S + 2), S * D]``, ``base`` ``[S * (S + 2)]``, ``scale`` ``[3]``."""

    fn: Tensor
    base: Tensor
    scale: Tensor


class Mixes(NamedTuple):
    """Weights of the streams at one sublayer, per token.

    ``pre`` ``[T, S]`` collapses the streams for the *next* sublayer; ``post`` ``[T, S]`` spreads
    this sublayer's output; ``comb`` ``[T, S, S]`` moves stream i (first index) to stream j.
    """

    pre: Tensor
    post: Tensor
    comb: Tensor


def start(embedded: Tensor, n_streams: int) -> tuple[Tensor, Tensor]:
    """Streams (copies) and first collapse (the first stream) of embedded tokens ``[T, D]``."""
    streams = embedded[:, None, :].repeat(1, n_streams, 1)
    pre = embedded.new_zeros(len(embedded), n_streams)
    pre[:, 0] = 1
    return streams, pre


def mixes(streams: Tensor, weights: MixWeights, config: ModelConfig) -> Mixes:
    """What the streams ``[T, S, D]`` say about their own mixing."""
    n = config.hc_mult
    flat = streams.flatten(1)
    # All streams are normalised as one vector. A product with the norm taken afterwards is the
    # same as one with the normed vector, and saves a copy of the streams.
    size = torch.linalg.vector_norm(flat, dim=-1, keepdim=True)
    root = (size.square() / flat.shape[-1] + config.rms_eps).rsqrt()
    parts = zip(weights.scale, (n, n, n * n), strict=True)
    factors = torch.cat([factor.expand(count) for factor, count in parts])
    logits = linear(flat, weights.fn) * root * factors + weights.base
    pre, post, comb = logits.split([n, n, n * n], dim=-1)
    return Mixes(
        pre.sigmoid() + config.hc_eps,
        2 * post.sigmoid(),
        _sinkhorn(comb.reshape(-1, n, n), config),
    )


def _sinkhorn(logits: Tensor, config: ModelConfig) -> Tensor:
    """``[T, S, S]`` made (nearly) doubly stochastic; the last pass is over columns.

    The first pass over rows is a softmax; passes over columns have one pass fewer over rows
    between them.
    """
    eps = config.hc_eps
    comb = logits.softmax(dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(config.hc_iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """One vector per token, ``[T, D]``."""
    return torch.bmm(pre[:, None, :], streams)[:, 0]


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams ``[T, S, D]`` after a sublayer whose output is ``y`` ``[T, D]``."""
    return torch.bmm(comb.mT, streams).addcmul_(post[:, :, None], y[:, None, :])
