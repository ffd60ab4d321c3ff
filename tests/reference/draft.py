"""The DSpark draft: three stages that propose a block of tokens at once.

Source: DeepSeek-V4.1-Flash inference/model.py (DSpark classes). Every place of a block sees the
same context rows of a stage, and the whole block; llama.cpp b12211 does it so too. With ``sliding``
the window is counted from each place instead, as an ordinary mask would have it, and later places
lose the oldest rows. The official chain samples, llama.cpp's is greedy, and so is this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from tests.reference import attention, block, moe, rope
from tests.reference.arrays import Floats, Ints, Mask
from tests.reference.hyperparameters import Hyperparameters
from tests.reference.layer import Layer
from tests.reference.norm import rms
from tests.reference.weights import Weights


class Proposal(NamedTuple):
    """A block's outcome.

    ``tokens``: the chain that follows the token given. ``logits`` ``[block, vocab]``: what each
    was chosen by, Markov term included; ``base`` without it. ``confidence`` ``[block]``: raw
    logits of acceptance.
    """

    tokens: tuple[int, ...]
    logits: Floats
    base: Floats
    confidence: Floats


@dataclass(frozen=True)
class Draft:
    """A draft over its own ``weights`` and the embedding and head of ``trunk_weights``."""

    weights: Weights
    trunk_weights: Weights
    sliding: bool = False

    @property
    def h(self) -> Hyperparameters:
        return self.weights.hyperparameters

    def begin(self) -> DraftText:
        """An empty context."""
        return DraftText(self)


class DraftText:
    """The context of a draft: a row of each stage for every position of the trunk's text."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._contexts: list[Floats] = []

    def follow(self, taps: Floats) -> None:
        """Take in the trunk's taps ``[n_targets, T, D]`` of the next T positions."""
        draft, h = self._draft, self._draft.h
        joined = taps.transpose(1, 0, 2).reshape(taps.shape[1], -1)
        main = rms(
            joined @ draft.weights.tensor("fc.weight").T,
            h.rms_eps,
            draft.weights.tensor("enc.output_norm.weight"),
        )
        n_before = len(self._contexts[0]) if self._contexts else 0
        positions = np.arange(n_before, n_before + len(main))
        fresh = [_rotated_rows(main, positions, layer) for layer in self._stages()]
        old = self._contexts or [rows[:0] for rows in fresh]
        self._contexts = [np.concatenate(pair) for pair in zip(old, fresh, strict=True)]

    def propose(self, token: int) -> Proposal:
        """What may follow ``token``, which the trunk has chosen for the next position."""
        draft, h = self._draft, self._draft.h
        assert h.draft
        n_context = len(self._contexts[0])
        inputs = np.asarray([token] + [h.draft.noise_token] * (h.draft.block - 1))
        positions = n_context + np.arange(len(inputs))
        embedded = draft.trunk_weights.rows("token_embd.weight", inputs)
        streams, pre = block.start(embedded, h.n_streams)
        seen = visible(n_context, len(inputs), h.window, sliding=draft.sliding)
        for layer, context in zip(self._stages(), self._contexts, strict=True):
            streams, pre = block.run(
                streams,
                pre,
                layer,
                partial(_attention, positions=positions, context=context, seen=seen, layer=layer),
                partial(moe.mixture, positions=positions, layer=layer),
            )
        return _chain(token, block.final(streams, pre), draft)

    def _stages(self) -> list[Layer]:
        draft = self._draft
        return [Layer(draft.weights, draft.h, number) for number in range(draft.h.n_layers)]


def visible(n_context: int, n_block: int, window: int, *, sliding: bool) -> Mask:
    """``[n_block, n_context + n_block]``: the last ``window`` context rows, and the whole block.

    ``sliding`` counts the window from each place of the block instead.
    """
    rows = np.arange(n_context + n_block)
    if sliding:
        places = n_context + np.arange(n_block)
        return places[:, None] - rows < window
    return np.broadcast_to(rows >= n_context - window, (n_block, len(rows)))


def _attention(x: Floats, positions: Ints, context: Floats, seen: Mask, layer: Layer) -> Floats:
    rows = np.concatenate([context, _rotated_rows(x, positions, layer)])
    rates = rope.frequencies(layer.h, layer.ratio)
    return attention.read(attention.low_rank(x, layer), positions, rows, seen, layer, rates)


def _rotated_rows(x: Floats, positions: Ints, layer: Layer) -> Floats:
    rates = rope.frequencies(layer.h, layer.ratio)
    return rope.rotate(attention.token_rows(x, layer), positions, rates)


def _chain(token: int, hidden: Floats, draft: Draft) -> Proposal:
    """Each token's successor by the stages' logits and what the token before it makes likely."""
    weights = draft.weights
    normed = rms(hidden, draft.h.rms_eps, weights.tensor("output_norm.weight"))
    base = normed @ draft.trunk_weights.tensor("output.weight").T
    after, before = weights.tensor("markov_w2.weight"), weights.tensor("markov_w1.weight")
    tokens, logits = [token], np.empty_like(base)
    for place, plain in enumerate(base):
        logits[place] = plain + after @ before[tokens[-1]]
        tokens.append(int(logits[place].argmax()))
    seen = np.concatenate([hidden, before[tokens[:-1]]], axis=1)
    confidence = (seen @ weights.tensor("conf_proj.weight").T)[:, 0]
    return Proposal(tuple(tokens[1:]), logits, base, confidence)
