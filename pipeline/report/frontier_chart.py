"""Bytes against error: the best choices around the one that was asked for, as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.report.units import Scale, scale_for
from pipeline.solve.frontier import Point

_DPI = 100
_WIDTH, _HEIGHT = 900, 480
_LINE, _ASKED = "#0072B2", "#D55E00"
"""Of Okabe and Ito's palette, told apart with any common colour vision."""

_STEEP = 8
"""From this ratio of the largest to the smallest error on, the scale is logarithmic."""

_NARROWEST = 0.01
"""A single point, or points close together, get this part of their bytes to either side."""

_INK, _GREY, _FAINT = "#222222", "#555555", "#B8B8B8"
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": _INK}


def frontier_png(
    points: Sequence[Point], asked_nbytes: int, axis: str, title: str, *, fixed_error: float = 0.0
) -> bytes:
    """A PNG, 900 pixels wide; the same points and titles give the same bytes.

    Args:
        points: At least one, by rising limit.
        asked_nbytes: The limit that was asked for, which one of the points is an answer to.
        axis: What the bytes are.
        title: The line over the picture.
        fixed_error: The part of every point's error that no choice changes.
    """
    assert points, "a frontier without an answer"
    # The user's own matplotlib settings must not change a file that is compared by digest.
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(_WIDTH / _DPI, _HEIGHT / _DPI), facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(0.015, 0.955, title, fontsize=13, fontweight="bold", va="center")
        _draw(figure.add_axes((0.085, 0.115, 0.895, 0.77)), points, asked_nbytes, axis)
        fixed = f" ({fixed_error:.3g} of it fixed)" if fixed_error > 0 else ""
        figure.axes[0].set_ylabel(f"sum of errors{fixed}", color=_GREY)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def tick_labels(ticks: Sequence[float], scale: Scale) -> dict[float, str]:
    """What stands at each tick: with as few decimals as tell them apart."""
    for decimals in range(10):
        shown = {tick: f"{tick / scale.nbytes:,.{decimals}f} {scale.name}" for tick in ticks}
        if len(set(shown.values())) == len(shown):
            break
    return shown


def _draw(axes: Axes, points: Sequence[Point], asked_nbytes: int, axis: str) -> None:
    scale = scale_for(max(point.nbytes for point in points))
    axes.plot(
        [p.nbytes for p in points], [p.error for p in points], color=_LINE, marker="o", markersize=5
    )
    axes.axvline(asked_nbytes, color=_ASKED, linewidth=1, linestyle="--")
    for point in points:
        is_asked = point.limit_nbytes == asked_nbytes
        text = f"{scale.decimal(point.nbytes, 1)} {scale.name}\n{point.error:.3g}"
        axes.annotate(
            text,
            (point.nbytes, point.error),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=8.5,
            color=_ASKED if is_asked else _GREY,
            fontweight="bold" if is_asked else "normal",
        )
        if is_asked:
            axes.plot([point.nbytes], [point.error], color=_ASKED, marker="o", markersize=8)
    low, high = min(p.error for p in points), max(p.error for p in points)
    if low > 0 and high > _STEEP * low:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.5, high * 1.9)
    else:
        axes.set_ylim(0, high * 1.15 or 1.0)
    axes.margins(x=0.09)
    axes.set_xlabel(axis, color=_GREY)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    first, last = axes.get_xlim()
    if last - first < _NARROWEST * last:
        axes.set_xlim(first - _NARROWEST * last, last + _NARROWEST * last)
    labels = tick_labels(axes.get_xticks().tolist(), scale)
    axes.xaxis.set_major_formatter(lambda nbytes, _: labels.get(nbytes, ""))
    axes.tick_params(color=_FAINT, labelcolor=_GREY, labelsize=8.5)
    axes.grid(color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_FAINT)
