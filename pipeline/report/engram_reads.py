"""What a token reads of the engram tables: rows, payload, and the pages that a drive moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.budget import Item
from pipeline.model.config import EngramConfig
from pipeline.model.roles import SubRole
from pipeline.report.tables import Column, Format, Row, RowKind, Table
from pipeline.report.units import count

PAGE = 4096
"""What an operating system reads at least when a row is touched."""


@dataclass(frozen=True, slots=True)
class EngramReads:
    """One table of a target file and what one token of text reads of it."""

    tensor: str
    type: str
    n_rows: int
    row_nbytes: int
    rows_per_token: int

    @property
    def payload(self) -> int:
        """Bytes of the rows themselves."""
        return self.rows_per_token * self.row_nbytes

    @property
    def pages(self) -> float:
        """Pages that hold the rows, on average; rows far apart share none."""
        return self.rows_per_token * (1 + straddle(self.row_nbytes))

    @property
    def most_pages(self) -> int:
        """Pages where every row lies as badly as it can."""
        return self.rows_per_token * (1 + math.ceil(straddle(self.row_nbytes)))


def straddle(row_nbytes: int, page: int = PAGE) -> float:
    """How many page borders a row crosses on average, in a table that starts on a page.

    Row starts repeat every ``page / gcd`` rows and are spread evenly over the multiples of
    ``gcd(row, page)`` in a page, which gives ``(row - gcd) / page``.
    """
    return (row_nbytes - math.gcd(row_nbytes, page)) / page


def engram_reads(items: Sequence[Item], engram: EngramConfig) -> tuple[EngramReads, ...]:
    """The engram tables among the target tensors ``items``, in either layout."""
    return tuple(_reads(item, engram) for item in items if item.sub_role is SubRole.ENGRAM_TABLE)


def _reads(item: Item, engram: EngramConfig) -> EngramReads:
    n_rows = item.n_params // engram.head_dim
    row_nbytes = item.nbytes // n_rows
    return EngramReads(item.name, item.type, n_rows, row_nbytes, item.per_token // row_nbytes)


def engram_reads_table(reads: Sequence[EngramReads], engram: EngramConfig) -> Table:
    """One row per table, their sums, and a paragraph that says it in words."""
    body = [
        Row(
            (
                one.tensor,
                one.type,
                one.n_rows,
                one.row_nbytes,
                one.rows_per_token,
                one.payload,
                one.pages,
            )
        )
        for one in reads
    ]
    total = Row(
        (
            "total",
            None,
            sum(one.n_rows for one in reads),
            None,
            sum(one.rows_per_token for one in reads),
            sum(one.payload for one in reads),
            sum(one.pages for one in reads),
        ),
        RowKind.TOTAL,
    )
    columns = (
        Column("table"),
        Column("type"),
        Column("rows", Format.COUNT),
        Column("row bytes", Format.COUNT),
        Column("rows per token", Format.COUNT),
        Column("payload bytes", Format.COUNT),
        Column("4 KiB pages", Format.DECIMAL),
    )
    return Table(
        "Engram tables: reads per token", columns, (*body, total), (_words(reads, engram),)
    )


def _words(reads: Sequence[EngramReads], engram: EngramConfig) -> str:
    n_rows = sum(one.rows_per_token for one in reads)
    payload = sum(one.payload for one in reads)
    pages = sum(one.pages for one in reads)
    sizes = " and ".join(str(size) for size in sorted({one.row_nbytes for one in reads}))
    most = sum(one.most_pages for one in reads)
    return (
        f"A token reads {n_rows} rows of {sizes} bytes: {len(engram.layers)} layers x "
        f"{engram.max_ngram - 1} n-gram orders x {engram.n_heads} heads. That is "
        f"{count(payload)} bytes of payload. With nothing cached, {pages:.2f} pages of "
        f"{PAGE:,} bytes hold them on average ({pages * PAGE / 1024:.1f} KiB), {most} at worst."
    )
