"""REAP's sums from what a mixture-of-experts layer computes anyway.

Only routed (token, expert) pairs are looked at: the sums are over the tokens that chose an expert
(arXiv 2510.13999, equation 9), so what other experts would have answered is never needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SourceError
from pipeline.experts.honesty import Honesty
from pipeline.experts.origin import Origin
from pipeline.experts.saliency import F64, SaliencyTable, Sum, count_top_k

if TYPE_CHECKING:
    from torch import Tensor

    Integers = NDArray[np.integer[Any]] | Tensor
    Floats = NDArray[np.floating[Any]] | Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerSums:
    """The sums of one layer, each float64 ``[n_experts]``; those of two batches add up."""

    sums: Mapping[Sum, F64]

    def __add__(self, other: LayerSums) -> LayerSums:
        return LayerSums({name: values + other.sums[name] for name, values in self.sums.items()})


def accumulate(
    topk_ids: Integers, gate_weights: Floats, expert_outputs: Floats, n_experts: int
) -> LayerSums:
    """Sums of one batch of one layer; leave padding tokens out beforehand.

    Args:
        topk_ids: The experts each token uses, ``[T, k]``.
        gate_weights: The gates that multiply their outputs in the layer's sum, ``[T, k]``.
        expert_outputs: The outputs before the gate, ``[T, k, hidden]``, or their norms, ``[T, k]``.
        n_experts: Routed experts of the layer.

    Raises:
        SourceError: The shapes do not fit, an id is no expert, or a token uses an expert twice.
    """
    ids, gates, norms = _integers(topk_ids), _floats(gate_weights), _norms(expert_outputs)
    _check(ids, gates, norms, n_experts)

    def per_expert(values: F64 | None) -> F64:
        weights = None if values is None else values.ravel()
        return np.bincount(ids.ravel(), weights, minlength=n_experts).astype(np.float64)

    return LayerSums(
        {
            Sum.COUNTS: per_expert(None),
            Sum.GATES: per_expert(gates),
            Sum.NORMS: per_expert(norms),
            Sum.WEIGHTED_NORMS: per_expert(gates * norms),
        }
    )


def table_of(
    layers: Sequence[LayerSums],
    tokens: Sequence[int],
    *,
    kind: str,
    honesty: Honesty,
    origins: tuple[Origin, ...],
) -> SaliencyTable:
    """The table of a whole trunk, layer after layer; ``tokens`` are those that each layer saw.

    Raises:
        SourceError: A sum is no number, or contradicts another; several raise `Problems`.
    """
    sums = {name: np.stack([layer.sums[name] for layer in layers]) for name in Sum}
    seen = tuple(tokens)
    top_k = count_top_k(sums[Sum.COUNTS], seen)
    return SaliencyTable(kind, honesty, origins, sums, seen, top_k)


def _check(ids: NDArray[np.int64], gates: F64, norms: F64, n_experts: int) -> None:
    if ids.ndim != 2 or not ids.shape == gates.shape == norms.shape:
        raise SourceError(
            "ids, gates and outputs of a batch do not fit together",
            expected="[tokens, k] each, outputs [tokens, k, hidden] or their norms",
            found=f"{ids.shape}, {gates.shape}, {norms.shape}",
        )
    wrong = ids[(ids < 0) | (ids >= n_experts)]
    if wrong.size:
        raise SourceError(
            "a token is routed to an expert that the layer does not have",
            expected=f"0 to {n_experts - 1}",
            found=int(wrong[0]),
        )
    ordered = np.sort(ids, axis=1)
    twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if len(twice):
        token, place = twice[0]
        raise SourceError(
            f"token {token} uses expert {ordered[token, place]} twice", found=ids[token].tolist()
        )


def _integers(values: Integers) -> NDArray[np.int64]:
    if isinstance(values, np.ndarray):
        return values.astype(np.int64, casting="same_kind", copy=False)
    return np.asarray(values.detach().cpu().numpy(), np.int64)


def _floats(values: Floats) -> F64:
    if isinstance(values, np.ndarray):
        return values.astype(np.float64, copy=False)
    # By way of torch's own double: numpy has no bfloat16.
    return np.asarray(values.detach().double().cpu().numpy(), np.float64)


def _norms(outputs: Floats) -> F64:
    """Euclidean norms over the last of three axes, added up in float64; two axes are norms."""
    if outputs.ndim != 3:
        return _floats(outputs)
    if isinstance(outputs, np.ndarray):
        squares = np.einsum("tkh,tkh->tk", outputs, outputs, dtype=np.float64)
        return np.asarray(np.sqrt(squares), np.float64)
    import torch

    norms = torch.linalg.vector_norm(outputs.detach(), dim=-1, dtype=torch.float64)
    return _floats(norms)
