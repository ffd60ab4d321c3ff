"""How likely the model finds the calibration text: a sign of whether the forward pass is right.

A released model finds plain text likely (a perplexity of a few units to a few tens). A wrong rule
or damaged weights give thousands, and then the sums mean nothing.
"""

from __future__ import annotations

import torch

from pipeline.forward import head
from pipeline.model.config import ModelConfig
from pipeline.observe.arithmetic import Arithmetic
from pipeline.observe.state import State
from pipeline.observe.text import Text
from pipeline.observe.topology import Slot
from pipeline.observe.weights import WeightLoader

MOST_TOKENS = 4096
HEAD_ROWS = 4096
"""Rows of the head in memory at a time."""


@torch.inference_mode()
def log_likelihood(
    text: Text, state: State, loader: WeightLoader, config: ModelConfig, arithmetic: Arithmetic
) -> float:
    """Mean natural logarithm of the next token's probability.

    Over the first `MOST_TOKENS` or so tokens, from the state that the last layer left.
    """
    norm = loader.tensor("norm.weight")
    normed, wanted, n_tokens = [], [], 0
    for number, tokens in enumerate(text.sequences.tokens):
        streams, pre = (
            state.read(slot, number)[: MOST_TOKENS + 1].to(arithmetic.device)
            for slot in (Slot.STREAMS, Slot.PRE)
        )
        own = torch.from_numpy(tokens[1 : len(streams)]).to(arithmetic.device)
        normed.append(head.last(streams, pre, norm, config)[: len(own)])
        wanted.append(own)
        n_tokens += len(own)
        if n_tokens >= MOST_TOKENS:
            break
    rows = loader.row_blocks("head.weight", HEAD_ROWS)
    return float(head.log_likelihoods(torch.cat(normed), torch.cat(wanted), rows).mean())
