"""The JSON of llama.cpp's expert profiler (``tools/expert-profile``, pull request 20454).

{"layer": {total_tokens, activation_counts, avg_gate_weight, ean_mean, reap, ...}}: means, printed
with six digits, so that sums come back to about 1e-6. Its gate is the graph's ``ffn_moe_weights``:
the model's own scores, before they are normalised and scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.layers import stack_layers
from pipeline.experts.origin import origin_of
from pipeline.experts.saliency import F64, SaliencyTable, Sum, count_top_k
from pipeline.source.json_object import shown

KIND = "expert-profile"

_TOKENS = "total_tokens"
_COUNTS = "activation_counts"
_MEANS = {
    Sum.GATES: "avg_gate_weight",
    Sum.NORMS: "ean_mean",
    Sum.WEIGHTED_NORMS: "reap",
}


def is_profile(entries: Mapping[str, object]) -> bool:
    """Whether a JSON object is keyed by layers that hold counts of this tool."""
    return bool(entries) and all(
        isinstance(layer, dict) and _COUNTS in layer for layer in entries.values()
    )


def read_profile(entries: Mapping[str, object], path: Path) -> SaliencyTable:
    """The table of a JSON object.

    Raises:
        SourceError: A layer or a list is missing, holds no numbers, or the counts do not add up.
    """
    layers = {_layer(key, path): value for key, value in entries.items() if isinstance(value, dict)}
    counts = _stack(layers, _COUNTS, path)
    tokens = tuple(_tokens(layers[n], n, path) for n in sorted(layers))
    top_k = count_top_k(counts, tokens)
    if top_k is None:
        raise SourceError(
            f"{_COUNTS} do not add up to the same number of experts for every token",
            file=path,
            found=f"{counts.sum(axis=1)[0]:,.0f} for {tokens[0]:,} tokens in layer 0",
            next_step="The profiler skips experts beyond its --n-experts (128 unless given).",
        )
    held = {name: mean for name, mean in _MEANS.items() if all(mean in v for v in layers.values())}
    sums = {name: _stack(layers, mean, path) * counts for name, mean in held.items()}
    sums[Sum.COUNTS] = counts
    return SaliencyTable(
        KIND,
        Honesty.UNNORMALISED_GATE,
        (origin_of(path),),
        sums,
        tokens,
        top_k,
    )


def _layer(key: str, path: Path) -> int:
    if not (key.isascii() and key.isdecimal()) or str(int(key)) != key:
        raise SourceError("a layer is not named by its number", file=path, found=shown(key))
    return int(key)


def _tokens(layer: Mapping[str, object], number: int, path: Path) -> int:
    tokens = layer.get(_TOKENS)
    if type(tokens) is not int or tokens < 0:
        raise SourceError(
            f"{_TOKENS} of layer {number} is not a count", file=path, found=shown(tokens)
        )
    return tokens


def _stack(layers: Mapping[int, Mapping[str, object]], stored: str, path: Path) -> F64:
    rows = {
        n: _row(layer.get(stored), f"{stored} of layer {n}", path) for n, layer in layers.items()
    }
    return stack_layers(rows, stored, path)


def _row(values: object, what: str, path: Path) -> F64:
    if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
        raise SourceError(f"{what} is not a list of numbers", file=path, found=shown(values))
    return np.array(values, np.float64)
