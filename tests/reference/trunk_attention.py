"""Attention as the trunk's layers do it: their own window, and compressed rows of a source layer.

Source: DeepSeek-V4.1-Flash inference/model.py (class Attention). The source of a layer is the last
one at or before it; it publishes rows, index keys, a pick and candidates to those after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.reference import attention as attend
from tests.reference import compression, indexer, rope
from tests.reference.arrays import Floats, Ints, Mask
from tests.reference.layer import Layer


@dataclass(slots=True)
class LayerMemory:
    """What a layer keeps of the text so far; ``unfinished`` are inputs of an incomplete group."""

    window: Floats | None = None
    unfinished: Floats | None = None
    rows: Floats | None = None
    keys: Floats | None = None


@dataclass(slots=True)
class Shared:
    """What source layers hand to the layers after them while one piece of text passes."""

    rows: Floats | None = None
    keys: Floats | None = None
    pick: Mask | None = None
    candidates: Mask | None = None


def attention(
    x: Floats, positions: Ints, layer: Layer, memory: LayerMemory, shared: Shared
) -> Floats:
    """The attention sublayer ``[T, D]`` of normed inputs ``[T, D]``; extends ``memory``."""
    h, rates = layer.h, rope.frequencies(layer.h, layer.ratio)
    low = attend.low_rank(x, layer)
    fresh = rope.rotate(attend.token_rows(x, layer), positions, rates)
    memory.window = _joined(memory.window, fresh)
    rows, seen = memory.window, attend.window(positions, len(memory.window), h.window)
    if layer.ratio:
        if layer.number in h.kv_sources:
            _publish_rows(x, positions, layer, memory, shared)
        if layer.number in h.index_sources:
            _publish_pick(x, low, positions, layer, shared)
        rows = np.concatenate([rows, shared.rows])
        seen = np.concatenate([seen, shared.pick], axis=1)
    return attend.read(low, positions, rows, seen, layer, rates)


def _publish_rows(
    x: Floats, positions: Ints, layer: Layer, memory: LayerMemory, shared: Shared
) -> None:
    pending = _joined(memory.unfinished, x)
    n_whole = len(pending) // layer.ratio * layer.ratio
    memory.unfinished = pending[n_whole:]
    latents = compression.latents(pending[:n_whole], layer)
    first = 0 if memory.rows is None else len(memory.rows)
    places = compression.group_positions(first, len(latents), layer.ratio)
    rates = rope.frequencies(layer.h, layer.ratio)
    # Keys come from the latents before those are rotated.
    memory.keys = _joined(memory.keys, indexer.keys(latents, places, layer, rates))
    memory.rows = _joined(memory.rows, rope.rotate(latents, places, rates))
    shared.rows, shared.keys = memory.rows, memory.keys


def _publish_pick(x: Floats, low: Floats, positions: Ints, layer: Layer, shared: Shared) -> None:
    candidates = layer.h.candidates
    assert shared.keys is not None, "the index keys' source comes first"
    wanted = indexer.scores(
        x, low, positions, shared.keys, layer, rope.frequencies(layer.h, layer.ratio)
    )
    finished = compression.finished(positions, len(shared.keys), layer.ratio)
    if shared.candidates is not None:
        wanted = np.where(shared.candidates, wanted, -np.inf)
    shared.pick = indexer.best(wanted, finished, layer.h.index_top_k)
    if candidates and layer.number == candidates.source:
        shared.candidates = indexer.candidate_rows(wanted, finished, candidates)


def _joined(old: Floats | None, new: Floats) -> Floats:
    return new if old is None else np.concatenate([old, new])
