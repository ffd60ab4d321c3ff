"""Which experts stay: the best by one criterion, in each layer for itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.errors import PlanError, raise_problems
from pipeline.experts.choice import Choice, places
from pipeline.experts.criterion import Criterion, scores
from pipeline.experts.fits import misfits
from pipeline.experts.keep import KeepList, shown
from pipeline.experts.notes import count_notes, label_notes, token_notes
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import F64, SaliencyTable, Sum

ByLayer = Mapping[int, Collection[int]]
"""Expert ids of some layers."""

_NONE: ByLayer = {}


@dataclass(frozen=True, slots=True)
class Selection:
    """A keep list, and what a person should know before using it, in sentences."""

    keep: KeepList
    notes: tuple[str, ...]


def select(
    table: SaliencyTable,
    criterion: Criterion,
    n_kept: int,
    routing: Routing,
    *,
    forced: ByLayer = _NONE,
    protected: ByLayer = _NONE,
) -> Selection:
    """The ``n_kept`` best experts of every layer; of equal scores the lower id is the better.

    Args:
        table: The saliency, of every layer of the model.
        criterion: What experts are ranked by.
        n_kept: How many stay in each layer.
        routing: The model that is cut.
        forced: Experts that a person wants kept whatever they score.
        protected: Experts that a rule wants kept whatever they score.

    Raises:
        SourceError: The table lacks the sums for ``criterion``.
        PlanError: The table is not of this model or says nothing about a layer, or ``n_kept``
            does not go with the model or the experts to keep; several raise `Problems`.
    """
    values = scores(table, criterion)
    raise_problems("saliency and model", list(misfits(table, values, routing)))
    given = (places(forced), places(protected))
    raise_problems("experts to keep", list(_refusals(n_kept, {*given[0], *given[1]}, routing)))
    ranked = values.copy()
    for layer, expert in (*given[0], *given[1]):
        ranked[layer, expert] = np.inf
    choice = Choice(
        kind=table.kind,
        honesty=table.honesty,
        criterion=criterion,
        n_experts=routing.n_experts,
        n_kept=n_kept,
        origins=table.origins,
        tokens=min(table.tokens) if table.tokens else None,
        forced=given[0],
        protected=given[1],
    )
    keep = KeepList(routing.n_experts, routing.top_k, best(ranked, n_kept), (choice,))
    notes = (
        *label_notes(table.honesty),
        *count_notes(n_kept),
        *token_notes(table),
        *_rank_notes(ranked, keep, table),
    )
    return Selection(keep, notes)


def best(ranked: F64, n_kept: int) -> tuple[tuple[int, ...], ...]:
    """Ids of the ``n_kept`` highest scores of each row, ascending; of equals the lower ids."""
    order = np.argsort(-ranked, axis=1, kind="stable")[:, :n_kept]
    return tuple(tuple(row) for row in np.sort(order, axis=1).tolist())


def _refusals(n_kept: int, kept: set[tuple[int, int]], routing: Routing) -> Iterator[PlanError]:
    if not routing.top_k <= n_kept <= routing.n_experts:
        yield PlanError(
            "this many experts cannot be kept",
            expected=f"{routing.top_k} (used by a token) to {routing.n_experts}",
            found=n_kept,
        )
    unknown = sorted(
        (layer, expert)
        for layer, expert in kept
        if not (0 <= layer < routing.n_layers and 0 <= expert < routing.n_experts)
    )
    if unknown:
        layer, expert = unknown[0]
        yield PlanError(
            f"layer {layer}, expert {expert} cannot be kept: the model does not have it",
            expected=f"{routing.n_layers:,} layers of {routing.n_experts:,} experts",
        )
    for layer in sorted({layer for layer, _ in kept}):
        ids = [expert for at, expert in kept if at == layer]
        if len(ids) > n_kept:
            yield PlanError(
                f"layer {layer} is to keep more experts than stay",
                expected=f"at most {n_kept}",
                found=f"{len(ids)}: {shown(ids)}",
            )


def _rank_notes(ranked: F64, keep: KeepList, table: SaliencyTable) -> Iterator[str]:
    """Experts that were kept though nothing speaks for them, and cuts between equal scores."""
    counts = table.sums.get(Sum.COUNTS)
    if counts is not None:
        never = counts == 0
        n_kept = sum(int(never[n, list(ids)].sum()) for n, ids in enumerate(keep.layers))
        if never.any():
            yield (
                f"{int(never.sum()):,} of {never.size:,} experts were never used by a token; "
                f"{n_kept:,} of them are kept."
            )
    if keep.n_kept == keep.n_experts:
        return
    ordered = -np.sort(-ranked, axis=1)
    tied = np.flatnonzero(ordered[:, keep.n_kept - 1] == ordered[:, keep.n_kept])
    if len(tied):
        yield (
            f"In layer {shown(tied.tolist())} the last kept and the first pruned expert score the "
            "same; the lower id stays."
        )
