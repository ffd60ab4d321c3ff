"""Scores by which experts are ranked; each is one sum of a table, or its mean over tokens.

Names as in the published observer (CerebrasResearch/reap); REAP is equation 9 of arXiv 2510.13999,
a mean over the tokens that the expert was chosen for: being chosen often does not raise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import numpy as np

from pipeline.errors import SourceError
from pipeline.experts.saliency import F64, SaliencyTable, Sum


class Criterion(StrEnum):
    """What experts are ranked by; the lowest are pruned."""

    REAP = "reap"
    EAN_MEAN = "ean_mean"
    EAN_SUM = "ean_sum"
    WEIGHTED_EAN_SUM = "weighted_ean_sum"
    FREQUENCY = "frequency"
    WEIGHTED_FREQUENCY = "weighted_frequency"


_SUM_OF: Mapping[Criterion, Sum] = {
    Criterion.REAP: Sum.WEIGHTED_NORMS,
    Criterion.EAN_MEAN: Sum.NORMS,
    Criterion.EAN_SUM: Sum.NORMS,
    Criterion.WEIGHTED_EAN_SUM: Sum.WEIGHTED_NORMS,
    Criterion.FREQUENCY: Sum.COUNTS,
    Criterion.WEIGHTED_FREQUENCY: Sum.GATES,
}
_MEANS = frozenset({Criterion.REAP, Criterion.EAN_MEAN})


def sums_for(criterion: Criterion) -> tuple[Sum, ...]:
    """The sums that ``criterion`` is computed from."""
    return (_SUM_OF[criterion], Sum.COUNTS) if criterion in _MEANS else (_SUM_OF[criterion],)


def criteria_of(table: SaliencyTable) -> tuple[Criterion, ...]:
    """Every criterion that ``table`` has the sums for."""
    return tuple(c for c in Criterion if table.sums.keys() >= set(sums_for(c)))


def scores(table: SaliencyTable, criterion: Criterion) -> F64:
    """Scores ``[n_layers, n_experts]``; 0 for an expert that no token was routed to.

    Raises:
        SourceError: The table lacks a sum that the criterion needs.
    """
    lacking = [name for name in sums_for(criterion) if name not in table.sums]
    if lacking:
        raise SourceError(
            f"the criterion {criterion} needs sums that this source does not have",
            file=" + ".join(origin.name for origin in table.origins),
            expected=", ".join(lacking),
            found=", ".join(table.sums),
            next_step=f"It can be ranked by {' or '.join(criteria_of(table)) or 'nothing'}.",
        )
    values = table.sums[_SUM_OF[criterion]]
    if criterion not in _MEANS:
        return values
    return values / np.maximum(table.sums[Sum.COUNTS], 1)
