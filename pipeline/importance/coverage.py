"""How much text each expert of a model saw while its importance matrix was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.importance.check import unmeasured_names, unused_names
from pipeline.importance.fit import n_matrices
from pipeline.importance.matrix import ImportanceMatrix
from pipeline.importance.weights import Weights
from pipeline.model.targets.tensor import TargetTensor

THRESHOLD = 10
"""Tokens that an expert has to have seen to go unmentioned, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class LayerCoverage:
    """The experts of one layer; ids are those of the model before a cut.

    ``rare``: they saw some tokens, but fewer than the threshold. ``least`` and ``median`` are
    tokens of an expert. All three are None where the file does not count tokens by expert.
    """

    layer: int
    n_experts: int
    unseen: tuple[int, ...]
    rare: tuple[int, ...] | None
    least: int | None
    median: float | None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a matrix says of a model.

    ``unused``: its entries that are of none of the model's tensors. ``unmeasured``: matrices of the
    model without an entry, which are quantized as if there were no importance matrix.
    """

    matrix: ImportanceMatrix
    prior: float
    threshold: int
    layers: tuple[LayerCoverage, ...]
    n_used: int
    unused: tuple[str, ...]
    unmeasured: tuple[str, ...]

    @property
    def is_counted(self) -> bool:
        """Whether tokens were counted by expert, in every layer."""
        return all(layer.least is not None for layer in self.layers)

    @property
    def n_unseen(self) -> int:
        """Experts of all layers that saw no token."""
        return sum(len(layer.unseen) for layer in self.layers)

    @property
    def n_rare(self) -> int:
        """Experts of all layers that saw some tokens, but fewer than the threshold."""
        return sum(len(layer.rare or ()) for layer in self.layers)


def coverage_of(
    weights: Weights, targets: Iterable[TargetTensor], threshold: int = THRESHOLD
) -> Coverage:
    """What ``weights`` know of ``targets``, and how well.

    Reads the counts only; in the form before GGUF, which has none, all values of the experts.

    Raises:
        SourceError: The matrix does not fit the model, or holds values that are none.
    """
    targets = tuple(targets)
    stacks: dict[int, list[TargetTensor]] = {}
    for target in targets:
        if n_matrices(target) > 1 and weights.has(target):
            assert target.layer is not None
            stacks.setdefault(target.layer, []).append(target)
    unused = unused_names(weights, targets)
    return Coverage(
        matrix=weights.matrix,
        prior=weights.prior,
        threshold=threshold,
        layers=tuple(_layer(weights, layer, stacks[layer], threshold) for layer in sorted(stacks)),
        n_used=weights.matrix.n_entries - len(unused),
        unused=unused,
        unmeasured=unmeasured_names(weights, targets),
    )


def coverage_json(coverage: Coverage) -> dict[str, object]:
    """``coverage`` in plain values."""
    matrix = coverage.matrix
    return {
        "file": matrix.path.name,
        "form": str(matrix.form),
        "sha256": matrix.sha256,
        "datasets": list(matrix.datasets),
        "chunks": matrix.n_chunks,
        "entries": matrix.n_entries,
        "entries_used": coverage.n_used,
        "entries_unused": list(coverage.unused),
        "tensors_unmeasured": list(coverage.unmeasured),
        "prior": coverage.prior if coverage.is_counted else None,
        "threshold": coverage.threshold if coverage.is_counted else None,
        "layers": [_layer_json(layer) for layer in coverage.layers],
    }


def _layer_json(layer: LayerCoverage) -> Mapping[str, object]:
    return {
        "layer": layer.layer,
        "experts": layer.n_experts,
        "unseen": list(layer.unseen),
        "below_threshold": None if layer.rare is None else list(layer.rare),
        "least_tokens": layer.least,
        "median_tokens": layer.median,
    }


def _layer(
    weights: Weights, layer: int, stacks: Iterable[TargetTensor], threshold: int
) -> LayerCoverage:
    nobody = [one for one in map(weights.unseen_of, stacks) if one is not None]
    unseen = np.logical_or.reduce(nobody)
    ids = np.arange(len(unseen)) if weights.keep is None else np.array(weights.keep[layer])
    counts = [weights.counts_of(stack) for stack in stacks]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return LayerCoverage(layer, len(ids), _ids(ids, unseen), None, None, None)
    # The stacks of a layer see the same tokens, unless the file was put together from parts.
    tokens = np.minimum.reduce(known)
    return LayerCoverage(
        layer=layer,
        n_experts=len(ids),
        unseen=_ids(ids, unseen),
        rare=_ids(ids, ~unseen & (tokens < threshold)),
        least=int(tokens.min()),
        median=float(np.median(tokens)),
    )


def _ids(ids: NDArray[np.int64], chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(expert) for expert in ids[chosen])
