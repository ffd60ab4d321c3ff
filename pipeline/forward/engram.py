"""The engram: table rows of the last tokens, gated into every stream.

Source: DeepSeek-V4.1-Flash inference/engram.py and inference/model.py. Which rows a token reads is
`pipeline.model.engram.arithmetic.hash_rows`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.forward.linear import linear, rms
from pipeline.model.config import ModelConfig

_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """``wkv`` ``[(S + 1) * D, n_columns * width]``: a key per stream, then the value.

    ``gains`` ``[S, D]``: those of queries times those of keys, which only ever meet as a product.
    """

    wkv: Tensor
    gains: Tensor


def written(
    streams: Tensor, memories: Tensor, weights: EngramWeights, config: ModelConfig
) -> Tensor:
    """The streams ``[T, S, D]`` after the table's word, which comes before the layer's own block.

    Args:
        streams: Before.
        memories: The rows of each token, one after the other, ``[T, n_columns * width]``.
        weights: The layer's.
        config: The model.
    """
    parts = linear(memories, weights.wkv).view(len(streams), config.hc_mult + 1, config.hidden)
    keys, value = parts[:, :-1], parts[:, -1:]
    matches = rms(streams, config.rms_eps) * rms(keys, config.rms_eps) * weights.gains
    return streams + _gate(matches.sum(dim=-1) * config.hidden**-0.5)[:, :, None] * value


def _gate(dot: Tensor) -> Tensor:
    """Sigmoid of the signed root; the sign of zero is plus."""
    root = dot.abs().clamp(min=_LEAST).sqrt()
    return torch.where(dot < 0, -root, root).sigmoid()
