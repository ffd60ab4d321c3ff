"""What a choice of experts rests on, layer by layer: the data of its page and of its pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.keep import KeepList
from pipeline.experts.saliency import F64, SaliencyTable, Sum
from pipeline.experts.select import Selection
from pipeline.experts.stability import (
    STEADY,
    CriteriaReport,
    HalvesReport,
    ScoreCurves,
    compare_criteria,
    score_curves,
)
from pipeline.report.units import share

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer of a choice; scores are in the criterion's own unit.

    ``n_never`` experts were used by no token. ``gap`` is how much the best pruned expert scores
    below the worst kept one, as a share of the latter: near 0 the cut goes through a flat stretch,
    below 0 an expert was kept whatever it scores. ``spread`` is the standard deviation of all
    scores as a share of their mean; ``halves`` the share of experts that both halves of the text
    would keep. None: not known, or nothing is pruned.
    """

    layer: int
    n_tokens: int | None
    n_never: int | None
    least_kept: float
    best_pruned: float | None
    gap: float | None
    spread: float
    halves: float | None


@dataclass(frozen=True, slots=True, eq=False)
class SelectionFacts:
    """All there is to say about one choice.

    ``lifted`` are, for each layer, the places in order of score (0 is the best) of experts that
    stay though their score alone would not keep them; ``displaced`` those that go for them.
    """

    keep: KeepList
    criterion: Criterion
    notes: tuple[str, ...]
    layers: tuple[LayerFacts, ...]
    curves: ScoreCurves
    lifted: tuple[tuple[int, ...], ...]
    displaced: tuple[tuple[int, ...], ...]
    criteria: CriteriaReport
    halves: HalvesReport | None


def selection_facts(
    table: SaliencyTable, selection: Selection, halves: HalvesReport | None = None
) -> SelectionFacts:
    """What there is to say of a choice.

    Args:
        table: What `pipeline.experts.select.select` chose by.
        selection: What it chose.
        halves: How far two halves of the text agree, where that is known.
    """
    keep = selection.keep
    criterion = keep.choices[-1].criterion
    assert criterion is not None
    values = scores(table, criterion)[: keep.n_layers]
    kept = _flags(keep, values.shape)
    return SelectionFacts(
        keep=keep,
        criterion=criterion,
        notes=(*selection.notes, *_halves_notes(halves)),
        layers=tuple(_layers(table, values, kept, halves)),
        curves=score_curves(table, criterion, keep.n_kept),
        lifted=_places(values, kept, range(keep.n_kept, values.shape[1])),
        displaced=_places(values, ~kept, range(keep.n_kept)),
        criteria=compare_criteria(table, keep.n_kept),
        halves=halves,
    )


def _flags(keep: KeepList, shape: tuple[int, ...]) -> Flags:
    flags = np.zeros(shape, np.bool_)
    for layer, ids in enumerate(keep.layers):
        flags[layer, list(ids)] = True
    return flags


def _layers(
    table: SaliencyTable, values: F64, kept: Flags, halves: HalvesReport | None
) -> Iterator[LayerFacts]:
    counts = table.sums.get(Sum.COUNTS)
    for layer, (row, stays) in enumerate(zip(values, kept, strict=True)):
        least = float(row[stays].min())
        best = None if stays.all() else float(row[~stays].max())
        yield LayerFacts(
            layer=layer,
            n_tokens=table.tokens[layer] if table.tokens else None,
            n_never=None if counts is None else int((counts[layer] == 0).sum()),
            least_kept=least,
            best_pruned=best,
            gap=None if best is None or least == 0 else (least - best) / least,
            spread=float(row.std() / row.mean()),
            halves=None if halves is None else float(halves.shares[layer]),
        )


def _places(values: F64, flags: Flags, within: range) -> tuple[tuple[int, ...], ...]:
    """Of each layer the places in order of score, among ``within``, whose expert is flagged."""
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(flags, order, axis=1)[:, within.start : within.stop]
    return tuple(tuple((np.flatnonzero(row) + within.start).tolist()) for row in ranked)


def _halves_notes(halves: HalvesReport | None) -> Iterator[str]:
    if halves is not None:
        says = "as steady as is usual" if halves.is_steady else "less steady than is usual"
        advice = "" if halves.is_steady else "; measure on more text"
        yield (
            f"Of the experts that one half of the text keeps, the other keeps "
            f"{share(float(halves.shares.mean()))}: {says} ({share(STEADY)}){advice}."
        )
