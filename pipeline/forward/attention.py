"""Attention over shared rows: every head reads the same vectors, as keys and as values.

Source: DeepSeek-V4.1-Flash inference/model.py (class Attention, sparse_attn). There is a norm on
the low-rank query and none on the heads after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.forward.linear import linear, rms
from pipeline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Matrices ``[out, in]``: low-rank queries, the one row per token, grouped low-rank output."""

    q_a: Tensor
    q_a_norm: Tensor
    q_b: Tensor
    kv: Tensor
    kv_norm: Tensor
    sinks: Tensor
    o_a: Tensor
    o_b: Tensor


def low_rank(x: Tensor, weights: AttentionWeights, config: ModelConfig) -> Tensor:
    """The low-rank query ``[T, q_lora]`` that heads and indexer start from."""
    return rms(linear(x, weights.q_a), config.rms_eps, weights.q_a_norm)


def queries(low: Tensor, weights: AttentionWeights, config: ModelConfig) -> Tensor:
    """``[T, H, d]``, before rotation."""
    return linear(low, weights.q_b).view(len(low), config.n_heads, config.head_dim)


def token_rows(x: Tensor, weights: AttentionWeights, config: ModelConfig) -> Tensor:
    """The row that each token leaves to be read, ``[T, d]``, before rotation."""
    return rms(linear(x, weights.kv), config.rms_eps, weights.kv_norm)


def window(positions: Tensor, width: int) -> Tensor:
    """Numbers of the token rows that each position sees, ``[T, width]``; -1 where there is none.

    The last ``width``, its own included.
    """
    back = torch.arange(width - 1, -1, -1, device=positions.device)
    return (positions[:, None] - back).clamp(min=-1)


def attend(q: Tensor, rows: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """Softmax attention ``[T, H, d]``; each head's sink is one more logit that brings no value.

    Args:
        q: Rotated queries, ``[T, H, d]``.
        rows: The rotated rows that each token reads, ``[T, n, d]``.
        seen: Which of them are there, ``[T, n]``.
        sinks: ``[H]``.
    """
    scores = torch.bmm(q, rows.mT).mul_(q.shape[-1] ** -0.5)
    scores.masked_fill_(~seen[:, None, :], -torch.inf)
    most = torch.maximum(scores.amax(dim=-1), sinks)[..., None]
    grown = scores.sub_(most).exp_()
    total = grown.sum(dim=-1, keepdim=True) + (sinks[:, None] - most).exp()
    return torch.bmm(grown, rows).div_(total)


def project(gathered: Tensor, weights: AttentionWeights, config: ModelConfig) -> Tensor:
    """Heads ``[T, H, d]`` to ``[T, D]``: groups of neighbours, each with a map of its own."""
    grouped = gathered.reshape(len(gathered), config.o_groups, -1).transpose(0, 1)
    first = weights.o_a.view(config.o_groups, -1, grouped.shape[-1])
    low = linear(grouped, first).transpose(0, 1).flatten(1)
    return linear(low, weights.o_b)
