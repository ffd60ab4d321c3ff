"""Tables: the same rows as text and as Markdown, and every quantity written one way."""

from __future__ import annotations

import re

import pytest

from pipeline.report import units
from pipeline.report.tables import (
    WIDTH,
    Column,
    Format,
    Row,
    RowKind,
    Table,
    render_markdown,
    render_text,
)

TABLE = Table(
    "Things",
    (Column("what"), Column("bytes", Format.COUNT), Column("GB", Format.GB), Column("types")),
    (
        Row(("a|b", 1_234_567_890, 1_234_567_890, "Q3_K 80, Q4_K 38")),
        Row(("<small>", 7, 7, None)),
        Row(("total", 1_234_567_897, 1_234_567_897, ""), RowKind.TOTAL),
        Row(("left out", 5, None, None), RowKind.ASIDE),
    ),
    ("A note.",),
)

TEXT = """\
Things
======
what              bytes      GB  types
--------  -------------  ------  ----------------
a|b       1,234,567,890   1.235  Q3_K 80, Q4_K 38
<small>               7  <0.001
--------  -------------  ------  ----------------
total     1,234,567,897   1.235
left out              5
A note.
"""

MARKDOWN = """\
## Things

| what | bytes | GB | types |
| --- | ---: | ---: | --- |
| a\\|b | 1,234,567,890 | 1.235 | Q3_K 80, Q4_K 38 |
| &lt;small> | 7 | &lt;0.001 |  |
| **total** | **1,234,567,897** | **1.235** |  |
| left out | 5 |  |  |

A note.
"""


def test_text_is_aligned() -> None:
    assert render_text(TABLE) == TEXT


def test_markdown_has_the_same_rows() -> None:
    assert render_markdown(TABLE, level=2) == MARKDOWN


def test_values_are_data() -> None:
    assert TABLE.values("bytes") == (1_234_567_890, 7, 1_234_567_897, 5)


def test_a_row_with_too_few_cells_is_refused() -> None:
    table = Table("t", (Column("a"), Column("b")), (Row(("only one",)),))
    with pytest.raises(ValueError, match="shorter"):
        render_text(table)


def test_a_wide_last_column_goes_on_below_and_keeps_pairs_together() -> None:
    types = ", ".join(f"TYPE_{n} {n * 1000:,}" for n in range(1, 30))
    table = Table("t", (Column("a" * 60), Column("types")), (Row(("x", types)), Row(("y", "z"))))
    lines = render_text(table).splitlines()
    assert max(map(len, lines)) <= WIDTH
    body = [line[62:] for line in lines[4:-1]]
    assert " ".join(body) == types
    assert all(re.fullmatch(r"(TYPE_\d+ [\d,]+,? ?)+", part) for part in body)


def test_text_is_ascii_where_its_cells_are() -> None:
    assert render_text(TABLE).isascii()


@pytest.mark.parametrize(
    ("format_", "value", "text"),
    [
        (Format.COUNT, 347_265_635_740, "347,265,635,740"),
        (Format.CHANGE, 12, "+12"),
        (Format.CHANGE, -1_200, "-1,200"),
        (Format.CHANGE, 0, "0"),
        (Format.GB, 347_265_635_740, "347.266"),
        (Format.GIB, 347_265_635_740, "323.416"),
        (Format.GB, 0, "0.000"),
        (Format.GB, 1, "<0.001"),
        (Format.GB, 500_000, "0.001"),
        (Format.GIB, 2**30, "1.000"),
        (Format.GB_CHANGE, -163_020_387_260, "-163.020"),
        (Format.GB_CHANGE, 5, "+<0.001"),
        (Format.GB_CHANGE, 0, "0.000"),
        (Format.SHARE, 0.7452, "74.5 %"),
        (Format.SHARE, 0.0001, "<0.1 %"),
        (Format.SHARE, 0.0, "0.0 %"),
        (Format.BITS, 3.4375, "3.438"),
        (Format.DECIMAL, 49.265625, "49.27"),
    ],
)
def test_formats(format_: Format, value: float, text: str) -> None:
    assert Column("c", format_).write(value) == text


def test_both_units_are_named() -> None:
    assert units.both(7_932_874_632) == "7.933 GB (7.388 GiB)"


@pytest.mark.parametrize(
    ("nbytes", "names"),
    [
        (0, ("kB", "KiB")),
        (999_999, ("kB", "KiB")),
        (1_000_000, ("MB", "MiB")),
        (10**9, ("GB", "GiB")),
        (10**12, ("GB", "GiB")),
    ],
)
def test_scale_follows_the_size(nbytes: int, names: tuple[str, str]) -> None:
    scale = units.scale_for(nbytes)
    assert (scale.name, scale.binary_name) == names
