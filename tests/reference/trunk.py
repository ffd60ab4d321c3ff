"""The text trunk of DeepSeek-V4.1-Flash in plain numpy.

Source: DeepSeek-V4.1-Flash inference/model.py, as its prefill computes it and without the rounding
of activations that the published kernels do (files in the GGUF family do none either). Text only:
image tokens have a selection bias and an engram rule of their own, which are not here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from tests.reference import block, engram, engram_rows, moe
from tests.reference.arrays import Floats, Ints
from tests.reference.hyperparameters import Hyperparameters
from tests.reference.layer import Layer
from tests.reference.moe import Observer
from tests.reference.norm import rms
from tests.reference.trunk_attention import LayerMemory, Shared, attention
from tests.reference.weights import Weights


class Reading(NamedTuple):
    """What a piece of text gives.

    ``logits`` ``[T, vocab]``; ``taps`` ``[n_targets, T, D]``, the mean stream before each tapped
    layer's block (and after its engram, were there one).
    """

    logits: Floats
    taps: Floats


@dataclass(frozen=True)
class Trunk:
    """A trunk over ``weights``, in whose float type it computes.

    Args:
        weights: Its tensors.
        hyperparameters: Other constants than those of the weights, for trials.
        taps: Layers to tap for a draft.
        observer: Told every expert's work.
        masked: Layer -> experts that are never chosen.
    """

    weights: Weights
    hyperparameters: Hyperparameters | None = None
    taps: Sequence[int] = ()
    observer: Observer | None = None
    masked: Mapping[int, Collection[int]] = field(default_factory=dict)

    @property
    def h(self) -> Hyperparameters:
        return self.hyperparameters or self.weights.hyperparameters

    def begin(self) -> Text:
        """An empty text."""
        return Text(self)

    def logits(self, tokens: Sequence[int]) -> Floats:
        """Logits ``[T, vocab]`` of a whole text at once."""
        return self.begin().read(tokens).logits


class Text:
    """A text that is read in pieces; it holds what later pieces look back at."""

    def __init__(self, trunk: Trunk) -> None:
        self.tokens: list[int] = []
        self._trunk = trunk
        self._memories = [LayerMemory() for _ in range(trunk.h.n_layers)]

    def read(self, tokens: Sequence[int]) -> Reading:
        """The next piece of the text."""
        trunk, h = self._trunk, self._trunk.h
        positions = np.arange(len(self.tokens), len(self.tokens) + len(tokens))
        rows = self._engram_rows(tokens)
        embedded = trunk.weights.rows("token_embd.weight", np.asarray(tokens, np.int64))
        streams, pre = block.start(embedded, h.n_streams)
        shared, taps = Shared(), {}
        for number in range(h.n_layers):
            layer = Layer(trunk.weights, h, number)
            if number in rows:
                streams = engram.written(streams, self._recalled(number, rows[number]), layer)
            if number in trunk.taps:
                taps[number] = streams.mean(axis=1)
            streams, pre = self._block(streams, pre, positions, layer, shared)
        return Reading(
            head(block.final(streams, pre), trunk.weights, h),
            np.array([taps[number] for number in trunk.taps]),
        )

    def _block(
        self, streams: Floats, pre: Floats, positions: Ints, layer: Layer, shared: Shared
    ) -> tuple[Floats, Floats]:
        trunk, memory = self._trunk, self._memories[layer.number]
        return block.run(
            streams,
            pre,
            layer,
            partial(attention, positions=positions, layer=layer, memory=memory, shared=shared),
            partial(
                moe.mixture,
                positions=positions,
                layer=layer,
                masked=trunk.masked.get(layer.number, ()),
                observer=trunk.observer,
            ),
        )

    def _engram_rows(self, tokens: Sequence[int]) -> dict[int, Ints]:
        constants = self._trunk.h.engram
        n_before = len(self.tokens)
        self.tokens.extend(tokens)
        if constants is None:
            return {}
        # A row looks back no farther than the longest n-gram.
        first = max(0, n_before - len(constants.multipliers[0]) + 1)
        rows = engram_rows.rows_of(self.tokens[first:], constants)
        return dict(zip(constants.layers, rows[:, n_before - first :], strict=True))

    def _recalled(self, number: int, rows: Ints) -> Floats:
        constants = self._trunk.h.engram
        assert constants
        table = constants.tables[constants.layers.index(number)]
        return self._trunk.weights.rows(table, rows.ravel()).reshape(len(rows), -1)


def head(collapsed: Floats, weights: Weights, h: Hyperparameters) -> Floats:
    """Logits ``[T, vocab]``: a norm and the head, no scale and no cap."""
    normed = rms(collapsed, h.rms_eps, weights.tensor("output_norm.weight"))
    return normed @ weights.tensor("output.weight").T
