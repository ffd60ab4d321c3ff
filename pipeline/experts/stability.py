"""How much a choice of experts depends on the text it was measured on, and on the criterion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.errors import PlanError, SourceError
from pipeline.experts.criterion import Criterion, criteria_of, scores
from pipeline.experts.keep import KeepList
from pipeline.experts.saliency import F64, SaliencyTable
from pipeline.experts.select import best

STEADY = 0.9
"""Below this share of common experts, two halves of a text disagree more than is usual."""


def overlap(one: KeepList, other: KeepList) -> F64:
    """The share of ``one``'s experts that ``other`` keeps too, ``[n_layers]``.

    Raises:
        PlanError: The lists are of different models, or keep different numbers of experts.
    """
    facts = [(k.n_layers, k.n_experts, k.n_kept) for k in (one, other)]
    if facts[0] != facts[1]:
        raise PlanError(
            "keep lists of different sizes cannot be compared (layers, experts, kept)",
            expected=facts[0],
            found=facts[1],
        )
    return _shares(one.layers, other.layers)


@dataclass(frozen=True, slots=True, eq=False)
class HalvesReport:
    """Two halves of a text, each with its own choice; ``shares`` ``[n_layers]``, what is common."""

    criterion: Criterion
    n_kept: int
    shares: F64

    @property
    def is_steady(self) -> bool:
        """Whether the halves agree as well as a text that is long enough lets them."""
        return float(self.shares.mean()) >= STEADY


def compare_halves(
    halves: tuple[SaliencyTable, SaliencyTable], criterion: Criterion, n_kept: int
) -> HalvesReport:
    """What each half would keep, held against the other's.

    Raises:
        SourceError: A half lacks the sums for ``criterion``, or they are of different shapes.
    """
    one, other = halves
    if one.shape != other.shape:
        raise SourceError("the halves have different shapes", expected=one.shape, found=other.shape)
    kept = [best(scores(half, criterion), n_kept) for half in halves]
    return HalvesReport(criterion, n_kept, _shares(*kept))


@dataclass(frozen=True, slots=True, eq=False)
class CriteriaReport:
    """``shares[i, j]``: common experts of ``criteria[i]`` and ``criteria[j]``, mean over layers."""

    criteria: tuple[Criterion, ...]
    n_kept: int
    shares: F64


def compare_criteria(table: SaliencyTable, n_kept: int) -> CriteriaReport:
    """Every criterion that ``table`` has the sums for, against every other."""
    criteria = criteria_of(table)
    kept = [best(scores(table, criterion), n_kept) for criterion in criteria]
    shares = [[float(_shares(one, other).mean()) for other in kept] for one in kept]
    return CriteriaReport(criteria, n_kept, np.array(shares, np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreCurves:
    """Scores of each layer from best to worst, ``[n_layers, n_experts]``, cut after ``n_kept``.

    ``gaps`` ``[n_layers]`` is how much the first pruned expert scores below the last kept one, as a
    share of the latter: near 0, the cut goes through a flat stretch.
    """

    criterion: Criterion
    n_kept: int
    curves: F64
    gaps: F64


def score_curves(table: SaliencyTable, criterion: Criterion, n_kept: int) -> ScoreCurves:
    """The data of a picture: where the cut goes through each layer's scores.

    Raises:
        SourceError: The table lacks the sums for ``criterion``.
    """
    curves = -np.sort(-scores(table, criterion), axis=1)
    gaps = np.zeros(len(curves))
    if n_kept < curves.shape[1]:
        last, first = curves[:, n_kept - 1], curves[:, n_kept]
        np.divide(last - first, last, out=gaps, where=last > 0)
    return ScoreCurves(criterion, n_kept, curves, gaps)


def _shares(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> F64:
    common = [len(set(a) & set(b)) / len(a) for a, b in zip(one, other, strict=True)]
    return np.array(common, np.float64)
