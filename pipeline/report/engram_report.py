"""The engram check as a table."""

from __future__ import annotations

from pipeline.model.engram.check import EngramReport
from pipeline.report.tables import Column, Row, Table


def engram_table(report: EngramReport) -> Table:
    """One row per rule: what was expected, what is there, whether they agree."""
    rows = [
        Row((row.what, str(row.expected), str(row.found), "ok" if row.ok else "WRONG"))
        for row in report.rows
    ]
    columns = (Column("rule"), Column("expected"), Column("found"), Column(""))
    return Table(f"engram check ({report.subject})", columns, tuple(rows))
