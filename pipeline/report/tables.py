"""Tables as data, and their two renderings: aligned plain text, and Markdown.

A cell holds the value itself (an exact number of bytes, a fraction); the column knows how it is
written. Both renderings therefore show the same rows, and a test can compare numbers.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.report import units

WIDTH = 120
"""Columns of text that `render_text` keeps to."""

_GAP = "  "
_NARROWEST = 12
_GLUE = "\N{NO-BREAK SPACE}"

Cell = str | int | float | None


class Format(StrEnum):
    """How the values of a column are written."""

    TEXT = "text"
    COUNT = "count"
    CHANGE = "change"
    GB = "gb"
    GIB = "gib"
    GB_CHANGE = "gb_change"
    SHARE = "share"
    BITS = "bits"
    DECIMAL = "decimal"


_NUMBERS: dict[Format, Callable[[int | float], str]] = {
    Format.COUNT: lambda value: units.count(int(value)),
    Format.CHANGE: lambda value: units.change(int(value)),
    Format.GB: lambda value: units.gigabytes(int(value)),
    Format.GIB: lambda value: units.gibibytes(int(value)),
    Format.GB_CHANGE: lambda value: units.gigabytes_change(int(value)),
    Format.SHARE: units.share,
    Format.BITS: units.bits,
    Format.DECIMAL: lambda value: f"{value:,.2f}",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading and the way its values are written; numbers stand at the right."""

    title: str
    format: Format = Format.TEXT

    def write(self, cell: Cell) -> str:
        """The text of one cell; a missing value is an empty one."""
        if cell is None:
            return ""
        if isinstance(cell, str):
            return cell
        return _NUMBERS[self.format](cell)


class RowKind(StrEnum):
    """Where a row belongs: among the summed ones, as their total, or apart from them."""

    BODY = "body"
    TOTAL = "total"
    ASIDE = "aside"


@dataclass(frozen=True, slots=True)
class Row:
    """One value per column."""

    cells: tuple[Cell, ...]
    kind: RowKind = RowKind.BODY


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table with sentences below it."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def values(self, title: str) -> tuple[Cell, ...]:
        """The raw values of the column with this heading, top to bottom."""
        at = [column.title for column in self.columns].index(title)
        return tuple(row.cells[at] for row in self.rows)


def render_text(table: Table) -> str:
    """``table`` for a terminal: ASCII, aligned, at most `WIDTH` columns.

    Where a table would be wider, its last text column goes on in the next line.
    """
    heads = [column.title for column in table.columns]
    rows = [_texts(table, row) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    widths[-1] = _last_width(table, widths)
    rule = _GAP.join("-" * width for width in widths)
    lines = [table.title, "=" * len(table.title), _line(table, heads, widths), rule]
    for row, texts in zip(table.rows, rows, strict=True):
        lines += [rule] if row.kind is RowKind.TOTAL else []
        lines += [_line(table, part, widths) for part in _broken(texts, widths[-1])]
    notes = [line for note in table.notes for line in textwrap.wrap(note, WIDTH)]
    return "\n".join([*lines, *notes]) + "\n"


def render_markdown(table: Table, *, level: int = 3) -> str:
    """``table`` as a Markdown section with a heading of ``level``; totals are bold."""
    titles = [column.title for column in table.columns]
    marks = ["---" if column.format is Format.TEXT else "---:" for column in table.columns]
    lines = [f"{'#' * level} {table.title}", "", _pipes(titles), _pipes(marks)]
    for row in table.rows:
        texts = [_escaped(text) for text in _texts(table, row)]
        if row.kind is RowKind.TOTAL:
            texts = [f"**{text}**" if text else "" for text in texts]
        lines.append(_pipes(texts))
    for note in table.notes:
        lines += ["", _escaped(note)]
    return "\n".join(lines) + "\n"


def _texts(table: Table, row: Row) -> list[str]:
    return [column.write(cell) for column, cell in zip(table.columns, row.cells, strict=True)]


def _last_width(table: Table, widths: Sequence[int]) -> int:
    if table.columns[-1].format is not Format.TEXT:
        return widths[-1]
    left = WIDTH - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
    return min(widths[-1], max(left, _NARROWEST))


def _broken(texts: Sequence[str], width: int) -> list[list[str]]:
    """One row as one or more lines: what the last cell is too long for goes below it."""
    # Break after commas only, so that a name and its number stay together.
    glued = texts[-1].replace(" ", _GLUE).replace(f",{_GLUE}", ", ")
    parts = [part.replace(_GLUE, " ") for part in textwrap.wrap(glued, width)] or [""]
    blank = [""] * (len(texts) - 1)
    return [[*(blank if at else texts[:-1]), part] for at, part in enumerate(parts)]


def _line(table: Table, texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        text.ljust(width) if column.format is Format.TEXT else text.rjust(width)
        for column, text, width in zip(table.columns, texts, widths, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _pipes(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _escaped(text: str) -> str:
    # "<" opens a tag in Markdown, "|" a cell.
    return text.replace("<", "&lt;").replace("|", "\\|")
