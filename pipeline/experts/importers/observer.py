"""The file of the published REAP observer.

``torch.save`` of {layer: {name: tensor}}; names and meanings after CerebrasResearch/reap
``src/reap/observer.py`` and ``pruning_metrics.py``. That observer selects with the bare router
logits and weighs with their softmax, whatever the model does: its gates are not V4.1's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.importers.layers import all_equal, stack_layers
from pipeline.experts.importers.torch_file import as_count, as_floats
from pipeline.experts.origin import origin_of
from pipeline.experts.saliency import F64, SaliencyTable, Sum, count_top_k
from pipeline.source.json_object import shown

KIND = "reap-observer"

_TOKENS = "total_tokens"
_MEAN = "reap"
_NAMES = {
    Sum.COUNTS: "expert_frequency",
    Sum.GATES: "weighted_expert_frequency_sum",
    Sum.NORMS: "ean_sum",
    Sum.WEIGHTED_NORMS: "weighted_ean_sum",
}
_ROUNDING = 1e-4
"""The file's own means are 32-bit running means."""


def is_observer(content: Mapping[object, object]) -> bool:
    """Whether a torch file's dictionary is keyed by layers."""
    return bool(content) and all(type(key) is int for key in content)


def read_observer(content: Mapping[object, object], path: Path) -> SaliencyTable:
    """The table of a torch file's dictionary.

    Raises:
        SourceError: A layer or a sum is missing, or the sums contradict each other.
    """
    layers = {
        key: _entries(key, value, path) for key, value in content.items() if isinstance(key, int)
    }
    sums = {name: _stack(layers, stored, path) for name, stored in _NAMES.items()}
    tokens = tuple(
        as_count(layers[n].get(_TOKENS), f"{_TOKENS} of layer {n}", path) for n in sorted(layers)
    )
    top_k = count_top_k(sums[Sum.COUNTS], tokens)
    if top_k is None:
        raise SourceError(
            f"expert_frequency is no multiple of {_TOKENS}, the same in every layer",
            file=path,
            found=f"{sums[Sum.COUNTS].sum(axis=1)[0]:,.0f} for {tokens[0]:,} tokens in layer 0",
        )
    _check_means(layers, sums, path)
    return SaliencyTable(KIND, Honesty.SOFTMAX_GATE, (origin_of(path),), sums, tokens, top_k)


def _entries(layer: int, value: object, path: Path) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise SourceError(f"layer {layer} is not a table of sums", file=path, found=shown(value))
    return value


def _stack(layers: Mapping[int, Mapping[str, object]], stored: str, path: Path) -> F64:
    rows: dict[int, F64] = {}
    for layer, entries in layers.items():
        if stored not in entries:
            raise SourceError(
                f"layer {layer} lacks {stored}",
                file=path,
                found=shown(", ".join(map(str, entries))),
                next_step="Record pruning metrics; files of other runs lack them.",
            )
        rows[layer] = as_floats(entries[stored], f"{stored} of layer {layer}", path)
    return stack_layers(rows, stored, path)


def _check_means(
    layers: Mapping[int, Mapping[str, object]], sums: Mapping[Sum, F64], path: Path
) -> None:
    """The file holds REAP twice, as sums and as a mean."""
    if not all(_MEAN in entries for entries in layers.values()):
        return
    means = _stack(layers, _MEAN, path)
    expected = sums[Sum.WEIGHTED_NORMS] / np.maximum(sums[Sum.COUNTS], 1)
    for layer, (found, wanted) in enumerate(zip(means, expected, strict=True)):
        if not all_equal(found, wanted, _ROUNDING):
            expert = int(np.abs(found - wanted).argmax())
            raise SourceError(
                f"{_MEAN} of layer {layer}, expert {expert} is not the mean of its sums",
                file=path,
                expected=f"{wanted[expert]:g}",
                found=f"{found[expert]:g}",
            )
