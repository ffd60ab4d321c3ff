"""How far criteria agree on the same numbers: a matrix of shares, as a picture."""

from __future__ import annotations

import io

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipeline.experts.criterion import Criterion
from pipeline.experts.stability import CriteriaReport
from pipeline.report.units import share

_DPI = 100
_CELL_WIDTH, _CELL_HEIGHT = 96, 50
_LEFT, _RIGHT, _TOP, _BOTTOM = 176, 24, 132, 22
"""Pixels around the matrix: names at the left, title and names above it."""
_LEAST_WIDTH = 640
_LONG = 10
"""Names of more letters are broken over a column."""

_INK, _GREY = "#222222", "#555555"
_SHADES = LinearSegmentedColormap.from_list("shares", ["#FFFFFF", "#0072B2"])
_DARK = 0.55
"""From this depth of colour on, numbers are white."""
_STYLE = {"font.family": "DejaVu Sans", "font.size": 10.0, "text.color": _INK}


def overlap_png(
    report: CriteriaReport, n_experts: int, title: str, *, chosen: Criterion | None = None
) -> bytes:
    """A PNG; the same report and title give the same bytes.

    Args:
        report: At least one criterion.
        n_experts: Of how many experts they choose.
        title: The line over the picture.
        chosen: The criterion whose choice it is about; its name is bold.
    """
    # The user's own matplotlib settings must not change a file that is compared byte by byte.
    with style.context(["default", _STYLE]):
        figure = _figure(report, n_experts, title, chosen)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def _figure(report: CriteriaReport, n_experts: int, title: str, chosen: Criterion | None) -> Figure:
    n = len(report.criteria)
    width = max(_LEFT + n * _CELL_WIDTH + _RIGHT, _LEAST_WIDTH)
    height = _TOP + n * _CELL_HEIGHT + _BOTTOM
    figure = Figure(figsize=(width / _DPI, height / _DPI), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(14 / width, 1 - 26 / height, title, fontsize=13, fontweight="bold", va="center")
    by_chance = report.n_kept / n_experts
    text = (
        f"Of {report.n_kept} kept experts, the share that both criteria keep, mean over layers.\n"
        f"Two lists drawn by lot would share {share(by_chance)} (white)."
    )
    figure.text(14 / width, 1 - 62 / height, text, color=_GREY, va="center", linespacing=1.5)
    axes = figure.add_axes(
        (
            _LEFT / width,
            _BOTTOM / height,
            n * _CELL_WIDTH / width,
            n * _CELL_HEIGHT / height,
        )
    )
    _draw(axes, report, by_chance)
    _name(axes, report, chosen)
    return figure


def _draw(axes: Axes, report: CriteriaReport, by_chance: float) -> None:
    for row, shares in enumerate(report.shares):
        for column, value in enumerate(map(float, shares)):
            depth = _depth(value, by_chance)
            colour = _SHADES(depth)
            axes.add_patch(
                Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="#D0D0D0", linewidth=0.8)
            )
            ink = "white" if depth > _DARK else _INK
            axes.text(column + 0.5, row + 0.5, share(value), color=ink, ha="center", va="center")


def _name(axes: Axes, report: CriteriaReport, chosen: Criterion | None) -> None:
    n = len(report.criteria)
    middles = [at + 0.5 for at in range(n)]
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.set_yticks(middles, report.criteria)
    axes.set_xticks(middles, map(_broken, report.criteria))
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelcolor=_INK, labelsize=9.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for at, criterion in enumerate(report.criteria):
        if criterion is chosen:
            axes.get_xticklabels()[at].set_fontweight("bold")
            axes.get_yticklabels()[at].set_fontweight("bold")


def _broken(name: str) -> str:
    """A name in two lines where it is too long for a column."""
    return name.replace("_", "_\n", 1) if len(name) > _LONG else name


def _depth(value: float, by_chance: float) -> float:
    """Where a share lies between chance and full agreement."""
    room = 1 - by_chance
    return min(max((value - by_chance) / room, 0.0), 1.0) if room > 0 else 1.0
