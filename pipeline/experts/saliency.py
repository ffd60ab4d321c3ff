"""The one form that all saliency is brought into: sums over routed (token, expert) pairs.

Sums and not means, so that tables of different texts can be added. Notation of the paper (arXiv
2510.13999): g is the gate of an expert for a token, f the expert's output before the gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SourceError, raise_problems
from pipeline.experts.honesty import Honesty
from pipeline.experts.origin import Origin

F64 = NDArray[np.float64]


class Sum(StrEnum):
    """What is added up over the tokens that are routed to an expert."""

    COUNTS = "counts"
    """The tokens themselves."""
    GATES = "gates"
    """g."""
    NORMS = "norms"
    """|f|, the Euclidean norm."""
    WEIGHTED_NORMS = "weighted_norms"
    """g |f|."""


@dataclass(frozen=True, slots=True, eq=False)
class SaliencyTable:
    """Sums per layer and expert, float64 ``[n_layers, n_experts]``; row n is trunk layer n.

    A source may lack some of the sums but not all. ``kind`` says what made the numbers,
    ``honesty`` what they may be called. ``tokens`` is how many tokens each layer saw, ``top_k``
    how many experts each of them used; None where the source does not say.

    Raises:
        SourceError: A sum is no number, negative, or contradicts another; several raise `Problems`.
    """

    kind: str
    honesty: Honesty
    origins: tuple[Origin, ...]
    sums: Mapping[Sum, F64]
    tokens: tuple[int, ...] | None = None
    top_k: int | None = None

    def __post_init__(self) -> None:
        raise_problems(f"saliency of kind {self.kind}", _problems(self))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and experts."""
        n_layers, n_experts = next(iter(self.sums.values())).shape
        return int(n_layers), int(n_experts)


def count_top_k(counts: F64, tokens: tuple[int, ...]) -> int | None:
    """How many experts each token used: counts over tokens, where all layers say the same."""
    per_layer = counts.sum(axis=1)
    top_k = round(float(per_layer[0]) / tokens[0]) if tokens[0] else 0
    fits = np.array_equal(per_layer, np.array(tokens, np.float64) * top_k)
    return top_k if top_k and fits else None


def _problems(table: SaliencyTable) -> list[SourceError]:
    shapes = {values.shape for values in table.sums.values()}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 2 or 0 in shape:
        return [
            SourceError(
                "the sums are not matrices of one shape, layers by experts",
                found="; ".join(f"{name} {v.shape}" for name, v in table.sums.items()) or "no sums",
            )
        ]
    problems = [p for name, values in table.sums.items() for p in _unusable(name, values)]
    return problems or [*_contradictions(table), *_miscounts(table)]


def _unusable(name: Sum, values: F64) -> Iterator[SourceError]:
    """Values that no sum of these can have."""
    rules = {
        "is not a finite number": ~np.isfinite(values),
        "is negative": values < 0,
    }
    if name is Sum.COUNTS:
        rules["is not a whole number"] = np.isfinite(values) & (values != np.rint(values))
    for what, bad in rules.items():
        if bad.any():
            layer, expert = (int(index) for index in np.argwhere(bad)[0])
            more = f" ({int(bad.sum()):,} such values)" if bad.sum() > 1 else ""
            yield SourceError(
                f"{name} of layer {layer}, expert {expert} {what}{more}",
                found=float(values[layer, expert]),
                next_step="Measure again; a broken sum cannot be ranked.",
            )


def _contradictions(table: SaliencyTable) -> Iterator[SourceError]:
    """Experts that no token was routed to, with a sum over their tokens."""
    counts = table.sums.get(Sum.COUNTS)
    if counts is None:
        return
    for name, values in table.sums.items():
        bad = np.argwhere((counts == 0) & (values > 0))
        if len(bad):
            layer, expert = (int(index) for index in bad[0])
            yield SourceError(
                f"{name} of layer {layer}, expert {expert} is a sum over no token",
                expected="0 where the count is 0",
                found=float(values[layer, expert]),
            )


def _miscounts(table: SaliencyTable) -> Iterator[SourceError]:
    """Layers whose counts are not ``top_k`` for each of their tokens."""
    n_layers = table.shape[0]
    if table.tokens is not None and len(table.tokens) != n_layers:
        yield SourceError(
            "the tokens are not given for each layer", expected=n_layers, found=len(table.tokens)
        )
        return
    counts = table.sums.get(Sum.COUNTS)
    if counts is None or table.tokens is None or table.top_k is None:
        return
    for layer, tokens in enumerate(table.tokens):
        found = counts[layer].sum()
        if found != tokens * table.top_k:
            yield SourceError(
                f"the counts of layer {layer} do not add up to {table.top_k} experts a token",
                expected=f"{tokens * table.top_k:,} for {tokens:,} tokens",
                found=f"{found:,.0f}",
                next_step="The observer missed experts or tokens, or ran with another top-k.",
            )
