"""The scores of every layer from best to worst, and where the cut goes through them.

Small multiples of one scale: each layer's scores as multiples of the last one above the cut. So
every cut is at height 1, and what is to be seen is how steeply a layer passes through it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pipeline.experts.saliency import F64
from pipeline.report.saliency_facts import SelectionFacts
from pipeline.report.units import share

KEPT, PRUNED, LIFTED = "#0072B2", "#E69F00", "#D55E00"
"""Of Okabe and Ito's palette, told apart with any common colour vision."""

_DPI = 100
_WIDTH = 1200
_COLUMNS = 8
_HEAD, _PANEL, _FOOT = 122, 116, 40
"""Heights in pixels: title and legend, one row of panels, the axis below the last row."""
_LEFT, _RIGHT = 0.042, 0.988

_INK, _GREY, _FAINT = "#222222", "#555555", "#B8B8B8"
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9.0, "text.color": _INK}

_LINE = 0.6
"""How far up a panel the line of the cut goes: the corner above it is for words."""

_LEAST_TOP, _MOST_TOP = 2.0, 6.0
_INSIDE = 0.98
"""The part of all scores that the common scale has to show; the few above are cut off."""


def curves_png(facts: SelectionFacts, title: str) -> bytes:
    """A PNG, 1200 pixels wide; the same choice and title give the same bytes.

    Args:
        facts: The choice.
        title: The line over the picture.
    """
    # The user's own matplotlib settings must not change a file that is compared byte by byte.
    with style.context(["default", _STYLE]):
        figure = _figure(facts, title)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def multiples(curves: F64, n_kept: int) -> F64:
    """Each layer's scores over the last one that is kept by score; over the best, if that is 0."""
    last = curves[:, n_kept - 1 : n_kept]
    return curves / np.where(last > 0, last, curves[:, :1])


def _figure(facts: SelectionFacts, title: str) -> Figure:
    n_layers = len(facts.layers)
    n_columns = min(_COLUMNS, n_layers)
    n_rows = math.ceil(n_layers / n_columns)
    height = _HEAD + _PANEL * n_rows + _FOOT
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 24 / height, title, fontsize=14, fontweight="bold", va="center")
    figure.text(0.012, 1 - 48 / height, _subtitle(facts), fontsize=9.5, color=_GREY, va="center")
    _draw_legend(figure, facts, 1 - 62 / height)
    grid = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=_LEFT,
        right=_RIGHT,
        top=1 - _HEAD / height,
        bottom=_FOOT / height,
        wspace=0.1,
        hspace=0.42,
    )
    relative = multiples(facts.curves.curves, facts.keep.n_kept)
    top = _top(relative)
    for at, axes in enumerate(grid.flat):
        if at < n_layers:
            _draw_layer(axes, facts, at, relative[at], top)
            _dress(axes, facts, is_lowest=at + n_columns >= n_layers)
        else:
            axes.set_visible(False)
    grid[0, 0].set_ylim(0, top)
    grid[0, 0].set_yticks(range(int(top) + 1))
    return figure


def _subtitle(facts: SelectionFacts) -> str:
    return (
        f"Score by {facts.criterion} as a multiple of the last one above the cut, experts from "
        "best to worst; gap: how far the next one lies below it."
    )


def _top(relative: F64) -> float:
    wanted = math.ceil(float(np.quantile(relative, _INSIDE)))
    return min(max(wanted, _LEAST_TOP), _MOST_TOP)


def _draw_legend(figure: Figure, facts: SelectionFacts, y: float) -> None:
    n_kept, n_experts = facts.keep.n_kept, facts.keep.n_experts
    handles: list[Artist] = [Patch(color=KEPT, label=f"kept ({n_kept})")]
    if n_kept < n_experts:
        handles.append(Patch(color=PRUNED, label=f"pruned ({n_experts - n_kept} of {n_experts})"))
    if any(facts.lifted):
        label = "kept whatever it scores"
        handles.append(
            Line2D([], [], color=LIFTED, marker="o", markersize=4, linestyle="", label=label)
        )
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0.008, y),
        ncols=len(handles),
        frameon=False,
        handlelength=1.2,
        columnspacing=1.6,
    )


def _draw_layer(axes: Axes, facts: SelectionFacts, layer: int, relative: F64, top: float) -> None:
    n_kept, n_experts = facts.keep.n_kept, facts.keep.n_experts
    edges = np.arange(n_experts + 1)
    shown = np.minimum(relative, top)
    stays = np.arange(n_experts) < n_kept
    stays[list(facts.lifted[layer])], stays[list(facts.displaced[layer])] = True, False
    axes.stairs(np.where(stays, shown, 0), edges, fill=True, color=KEPT)
    if n_kept < n_experts:
        axes.stairs(np.where(stays, 0, shown), edges, fill=True, color=PRUNED)
        axes.axvline(n_kept, ymax=_LINE, color=_INK, linewidth=0.9)
    _draw_lifted(axes, facts.lifted[layer], shown)
    axes.set_title(f"layer {layer}", loc="left", fontsize=9, pad=3)
    axes.set_title(_gap(facts, layer), loc="right", fontsize=7.5, pad=3, color=_GREY)
    if relative[0] > top:
        best = f"up to {relative[0]:,.0f}"
        axes.text(n_experts, top * 0.97, best, ha="right", va="top", fontsize=7.5)


def _gap(facts: SelectionFacts, layer: int) -> str:
    if facts.keep.n_kept == facts.keep.n_experts or facts.lifted[layer]:
        return ""
    last = facts.curves.curves[layer, facts.keep.n_kept - 1]
    return f"gap {share(float(facts.curves.gaps[layer]))}" if last > 0 else "cut at 0"


def _draw_lifted(axes: Axes, places: Sequence[int], shown: F64) -> None:
    if places:
        at = np.array(places)
        axes.plot(at + 0.5, shown[at], "o", color=LIFTED, markersize=3.5, clip_on=False)


def _dress(axes: Axes, facts: SelectionFacts, *, is_lowest: bool) -> None:
    n_kept, n_experts = facts.keep.n_kept, facts.keep.n_experts
    axes.set_xlim(0, n_experts)
    axes.set_xticks([0, n_kept] if n_kept < n_experts else [0])
    axes.tick_params(labelsize=7.5, color=_FAINT, labelcolor=_GREY, length=2, pad=2)
    # The lowest panel of each column has the axis, also where the last row is not full.
    axes.tick_params(axis="x", labelbottom=is_lowest)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
