"""The byte budget as a picture: where the bytes of every step are, and what a token reads of them.

Two panels of stacked bars over one table. Bars show proportions; the table has every number, since
most roles are too small to be seen beside the experts.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pipeline.budget import Budget, Line
from pipeline.model.roles import ROLE_TITLES, Role
from pipeline.report.units import Scale, scale_for

ROLE_COLOURS = {
    Role.ROUTED: "#0072B2",
    Role.ENGRAM: "#E69F00",
    Role.ATTENTION: "#009E73",
    Role.EMBEDDING: "#CC79A7",
    Role.SHARED: "#56B4E9",
    Role.DRAFT: "#D55E00",
    Role.VISION: "#7F7F7F",
}
"""Okabe and Ito's palette, told apart with any common colour vision."""

_DARK_TEXT = frozenset({Role.ENGRAM, Role.EMBEDDING, Role.SHARED})
"""Roles whose colour is too light for white numbers."""

_DPI = 100
_WIDTH = 1200
_BAR = 0.62
_LABELLED = 0.085
"""Segments at least this part of a panel have room for their number."""

_TITLES_AT, _NUMBERS_AT, _SPACE = 0.021, 0.205, 0.12
"""Where the table's texts and numbers start, and the part of a step that is empty before it."""

_INK, _GREY, _FAINT = "#222222", "#555555", "#B8B8B8"
_STYLE = {"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": _INK}


@dataclass(frozen=True, slots=True)
class _Panel:
    """One bar chart: its title and the bytes it shows of a line."""

    title: str
    nbytes: Callable[[Line], int]
    decimals: int


_PANELS = (
    _Panel("Bytes of all tensors", lambda line: line.nbytes, 1),
    _Panel("Bytes read per token", lambda line: line.per_token, 2),
)


def chart_png(steps: Sequence[Budget], title: str) -> bytes:
    """A PNG, 1200 pixels wide; the same steps and title give the same bytes.

    Args:
        steps: At least one, top to bottom.
        title: The line over the chart.
    """
    assert steps, "a chart of no step"
    # The user's own matplotlib settings must not change a file that is compared by digest.
    with style.context(["default", _STYLE]):
        figure = _figure(steps, title)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": None})
    return out.getvalue()


def _figure(steps: Sequence[Budget], title: str) -> Figure:
    roles = [role for role in Role if any(step.line(role) for step in steps)]
    # In pixels, from the top: title, bars, tick labels, table.
    top, bars, gap, table = 76, 40 + 42 * len(steps), 40, 22 * (len(roles) + 3) + 14
    height = top + bars + gap + table
    figure = Figure(figsize=(_WIDTH / _DPI, height / _DPI), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 26 / height, title, fontsize=14, fontweight="bold", va="center")
    bottom = (gap + table) / height
    for panel, (left, width) in zip(_PANELS, ((0.075, 0.535), (0.66, 0.315)), strict=True):
        axes = figure.add_axes((left, bottom, width, bars / height))
        _draw_bars(axes, panel, steps, roles)
    figure.axes[1].set_yticklabels([])
    _draw_table(figure.add_axes((0.02, 0.0, 0.96, table / height)), steps, roles)
    return figure


def _draw_bars(axes: Axes, panel: _Panel, steps: Sequence[Budget], roles: Sequence[Role]) -> None:
    totals = [sum(panel.nbytes(line) for line in step.roles) for step in steps]
    end = max(*totals, 1) * 1.25
    scale = scale_for(max(totals))
    for at, (step, total) in enumerate(zip(steps, totals, strict=True)):
        left = 0
        for role in roles:
            line = step.line(role)
            width = panel.nbytes(line) if line else 0
            axes.barh(at, width, _BAR, left=left, color=ROLE_COLOURS[role])
            if width > _LABELLED * end:
                text = scale.decimal(width, panel.decimals)
                ink = _INK if role in _DARK_TEXT else "white"
                axes.text(left + width / 2, at, text, color=ink, ha="center", va="center")
            left += width
        text = (
            f"{scale.decimal(total, panel.decimals)} {scale.name}\n"
            f"{scale.binary(total, panel.decimals)} {scale.binary_name}"
        )
        axes.text(total + end * 0.01, at, text, va="center", fontsize=9)
    _dress(axes, panel, scale, end)
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.set_yticks(range(len(steps)), [step.step for step in steps], fontsize=10.5)


def _dress(axes: Axes, panel: _Panel, scale: Scale, end: float) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10.5, pad=7)
    axes.set_xlim(0, end)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda nbytes, _: f"{nbytes / scale.nbytes:,g} {scale.name}")
    axes.tick_params(axis="x", color=_FAINT, labelcolor=_GREY, labelsize=8.5)
    axes.tick_params(axis="y", length=0, labelcolor=_INK)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)


def _draw_table(axes: Axes, steps: Sequence[Budget], roles: Sequence[Role]) -> None:
    """The legend with all numbers: a line per role, three columns per step."""
    n_lines = len(roles) + 3
    axes.set_xlim(0, 1)
    axes.set_ylim(n_lines + 0.5, 0)
    axes.axis("off")
    for line, role in enumerate(roles, 2):
        colour = ROLE_COLOURS[role]
        axes.add_patch(Rectangle((0, line + 0.2), 0.013, 0.6, facecolor=colour))
        axes.text(_TITLES_AT, line + 0.5, ROLE_TITLES[role], va="center")
    axes.text(_TITLES_AT, n_lines - 0.4, "total", va="center", fontweight="bold")
    width = (1 - _NUMBERS_AT) / max(len(steps), 2)
    end = _NUMBERS_AT + len(steps) * width
    axes.plot([0, end], [n_lines - 1] * 2, color=_FAINT, linewidth=0.8)
    scale = scale_for(max(step.nbytes for step in steps))
    for at, step in enumerate(steps):
        span = (_NUMBERS_AT + at * width, width)
        lines = [_numbers(step.line(role), scale) for role in roles]
        _draw_step(axes, span, step.step, scale, lines)
        _draw_line(axes, span, n_lines - 0.4, _numbers(step, scale), bold=True)


def _draw_step(
    axes: Axes,
    span: tuple[float, float],
    title: str,
    scale: Scale,
    lines: Sequence[tuple[str, ...]],
) -> None:
    left, width = span
    start = left + width * _SPACE
    axes.text((start + left + width) / 2, 0.5, title, ha="center", va="center", fontweight="bold")
    axes.plot([start, left + width], [1, 1], color=_FAINT, linewidth=0.8)
    heads = (scale.name, scale.binary_name, f"{scale.name}/token")
    _draw_line(axes, span, 1.5, heads, colour=_GREY)
    for at, texts in enumerate(lines, 2):
        _draw_line(axes, span, at + 0.5, texts)


def _draw_line(
    axes: Axes,
    span: tuple[float, float],
    y: float,
    texts: Sequence[str],
    *,
    colour: str = _INK,
    bold: bool = False,
) -> None:
    left, width = span
    column = width * (1 - _SPACE) / len(texts)
    for at, text in enumerate(texts, 1):
        x = left + width * _SPACE + at * column
        weight = "bold" if bold else "normal"
        axes.text(x, y, text, ha="right", va="center", color=colour, fontweight=weight)


def _numbers(line: Line | Budget | None, scale: Scale) -> tuple[str, ...]:
    if line is None:
        return ("-", "-", "-")
    return (
        scale.decimal(line.nbytes),
        scale.binary(line.nbytes),
        scale.decimal(line.per_token),
    )
