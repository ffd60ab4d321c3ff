"""Compressed rows: a few tokens pooled into one row that any later token may read.

Source: DeepSeek-V4.1-Flash inference/model.py (class Compressor). Groups are disjoint and have no
positional term; a row is turned to the position of its first token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.forward.linear import linear, rms
from pipeline.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """``kv`` and ``gate`` ``[d, D]`` (no gate where a group is one token), ``norm`` ``[d]``."""

    kv: Tensor
    gate: Tensor | None
    norm: Tensor


def latents(x: Tensor, ratio: int, weights: CompressorWeights, config: ModelConfig) -> Tensor:
    """Pooled rows ``[T // ratio, d]`` of the whole groups in ``x`` ``[T, D]``, not yet rotated."""
    whole = x[: len(x) // ratio * ratio]
    rows = linear(whole, weights.kv)
    if weights.gate is not None:
        groups = (len(whole) // ratio, ratio, rows.shape[1])
        shares = linear(whole, weights.gate).view(groups).softmax(dim=1)
        rows = (rows.view(groups) * shares).sum(dim=1)
    return rms(rows, config.rms_eps, weights.norm)


def group_positions(n_groups: int, ratio: int, device: torch.device) -> Tensor:
    """Where the groups are rotated to: the position of their first token."""
    return torch.arange(n_groups, device=device) * ratio


def finished(positions: Tensor, n_rows: int, ratio: int) -> Tensor:
    """Which of the rows each position may see, ``[T, n_rows]``: its own token may finish one."""
    n_finished = (positions + 1) // ratio
    return torch.arange(n_rows, device=positions.device) < n_finished[:, None]
