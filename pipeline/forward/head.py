"""From the last streams to the likelihood of the next token.

Source: DeepSeek-V4.1-Flash inference/model.py (class Transformer): the streams are collapsed with
the last block's mix, normed, and multiplied by an untied head; no scale and no cap.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.forward.hyper_connection import collapse
from pipeline.forward.linear import linear, rms
from pipeline.model.config import ModelConfig


def last(streams: Tensor, pre: Tensor, norm: Tensor, config: ModelConfig) -> Tensor:
    """What the head multiplies, ``[T, D]``."""
    return rms(collapse(streams, pre), config.rms_eps, norm)


def log_likelihoods(normed: Tensor, wanted: Tensor, head: Iterable[Tensor]) -> Tensor:
    """Natural logarithm of the probability of each ``wanted`` token, ``[T]``.

    Args:
        normed: As `last` gives it, ``[T, D]``.
        wanted: The tokens that follow, ``[T]``.
        head: The head's rows, some at a time, in order: the whole of it need never be in memory.
    """
    total = torch.full_like(normed[:, 0], -torch.inf)
    own = torch.zeros_like(total)
    begin = 0
    for rows in head:
        logits = linear(normed, rows)
        total = torch.logaddexp(total, logits.logsumexp(dim=-1))
        here = (wanted >= begin) & (wanted < begin + len(rows))
        at = (wanted - begin).clamp(0, len(rows) - 1)
        own = torch.where(here, logits.gather(1, at[:, None])[:, 0], own)
        begin += len(rows)
    return own - total
