"""Does a saliency table speak of the model that is to be cut, and of all of it?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.errors import PlanError
from pipeline.experts.honesty import Honesty
from pipeline.experts.keep import shown
from pipeline.experts.routing import Routing
from pipeline.experts.saliency import F64, SaliencyTable, Sum

_ROUNDING = 1e-4
"""Relative room for gates and norms that an observer computed in 32 bits or fewer."""

_BOUNDS = ((Sum.GATES, Sum.COUNTS), (Sum.WEIGHTED_NORMS, Sum.NORMS))
"""Sums with the gate, and the same without it: their ratio is a mean gate."""


def misfits(table: SaliencyTable, values: F64, routing: Routing) -> Iterator[PlanError]:
    """Why ``table``, whose scores are ``values``, cannot rank the experts of this model."""
    n_layers, n_experts = table.shape
    if n_experts != routing.n_experts:
        yield PlanError(
            "the saliency is of a model with another number of experts",
            expected=routing.n_experts,
            found=n_experts,
        )
    if n_layers > routing.n_layers:
        yield PlanError(
            f"the saliency goes beyond the model: layer {routing.n_layers} is not in its trunk",
            expected=f"{routing.n_layers:,} layers",
            found=f"{n_layers:,}",
        )
    silent = [n for n in range(routing.n_layers) if n >= n_layers or not values[n].any()]
    if silent:
        yield PlanError(
            f"the saliency says nothing about layer {shown(silent)}",
            expected=f"scores for all {routing.n_layers:,} layers",
            next_step="A layer without scores is neither kept whole nor cut by index: measure it.",
        )
    if table.top_k not in (None, routing.top_k):
        yield PlanError(
            "the saliency was measured with another number of experts a token",
            expected=routing.top_k,
            found=table.top_k,
        )
    if table.honesty is Honesty.TRUE_GATE and routing.gate_sum is not None:
        yield from _large_gates(table, routing.gate_sum)
        yield from _wrong_totals(table, routing.gate_sum)


def _large_gates(table: SaliencyTable, gate_sum: float) -> Iterator[PlanError]:
    """Gates that are called true and are larger than all gates of a token together."""
    for weighted, plain in _BOUNDS:
        if weighted not in table.sums or plain not in table.sums:
            continue
        most = gate_sum * (1 + _ROUNDING) * table.sums[plain]
        bad = np.argwhere(table.sums[weighted] > most)
        if len(bad):
            layer, expert = bad[0]
            mean = table.sums[weighted][layer, expert] / table.sums[plain][layer, expert]
            yield PlanError(
                f"{weighted} of layer {layer}, expert {expert} ask for gates that this model "
                "never has",
                expected=f"at most {gate_sum:g} times {plain}",
                found=f"{mean:g} times",
            )


def _wrong_totals(table: SaliencyTable, gate_sum: float) -> Iterator[PlanError]:
    """Gates that are called true and do not add up as the model normalises them."""
    if Sum.GATES not in table.sums or not table.tokens:
        return
    found = table.sums[Sum.GATES].sum(axis=1)
    expected = gate_sum * np.array(table.tokens, np.float64)
    bad = np.flatnonzero(~np.isclose(found, expected, rtol=_ROUNDING, atol=0))
    if len(bad):
        yield PlanError(
            f"the gates of layer {bad[0]} do not add up to {gate_sum:g} a token",
            expected=f"{expected[bad[0]]:,.1f}",
            found=f"{found[bad[0]]:,.1f}",
            next_step="These are not the gates that the model applies.",
        )
