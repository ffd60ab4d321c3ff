"""The tokens that go through a layer's experts together: whole sequences, as many as fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from pipeline.model.config import ModelConfig
from pipeline.observe.arithmetic import Arithmetic

EXPERT_TOKENS = 4096
"""Tokens that an expert takes at a time: enough to fill any device."""


class Chunk:
    """What the attention pass of some sequences leaves for the experts, token after token.

    ``x`` ``[N, D]``: normed inputs of the experts; ``post``, ``comb``: mixes with which their
    output is spread; ``pre``: the mix that the next layer begins with; ``experts`` and ``gates``
    ``[N, n_used]``: the route; ``parity`` ``[N]``: which half of the text a token belongs to.
    """

    def __init__(
        self, numbers: range, lengths: Sequence[int], config: ModelConfig, arithmetic: Arithmetic
    ) -> None:
        self.numbers = numbers
        starts = list(accumulate((lengths[n] for n in numbers), initial=0))
        self._starts = dict(zip(numbers, starts, strict=False))
        self.n_tokens = starts[-1]

        def room(*shape: int, dtype: torch.dtype = arithmetic.values) -> Tensor:
            return torch.empty(self.n_tokens, *shape, dtype=dtype, device=arithmetic.device)

        self.x = room(config.hidden)
        self.pre = room(config.hc_mult)
        self.post = room(config.hc_mult)
        self.comb = room(config.hc_mult, config.hc_mult)
        self.experts = room(config.n_experts_used, dtype=torch.int64)
        self.gates = room(config.n_experts_used)
        odd = [torch.full((lengths[n],), n % 2, dtype=torch.int64) for n in numbers]
        self.parity = torch.cat(odd)

    def place(self, sequence: int, tokens: slice) -> slice:
        """Where ``tokens`` of a sequence lie among those of the chunk."""
        start = self._starts[sequence]
        return slice(start + tokens.start, start + tokens.stop)


def chunks_of(lengths: Sequence[int], most: int) -> list[range]:
    """Consecutive sequences together, ``most`` tokens at most where more than one is together."""
    chunks, begin, n_tokens = list[range](), 0, 0
    for number, length in enumerate(lengths):
        if number > begin and n_tokens + length > most:
            chunks.append(range(begin, number))
            begin, n_tokens = number, 0
        n_tokens += length
    return [*chunks, range(begin, len(lengths))]


def blocks(n_tokens: int, most: int) -> Iterator[slice]:
    """Token ranges of a sequence, ``most`` at a time."""
    return (slice(at, min(at + most, n_tokens)) for at in range(0, n_tokens, most))
