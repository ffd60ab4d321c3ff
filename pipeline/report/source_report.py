"""A checkpoint as a table: what it stores, by data type."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.report.tables import Column, Format, Row, RowKind, Table
from pipeline.report.units import UNITS_NOTE
from pipeline.source.spec import TensorSpec


def dtype_table(title: str, specs: Sequence[TensorSpec]) -> Table:
    """Tensors and bytes of every stored data type."""
    sizes = {dtype: [s.nbytes for s in specs if s.dtype == dtype] for dtype in _dtypes(specs)}
    rows = [Row((dtype, len(n), sum(n), sum(n), sum(n))) for dtype, n in sizes.items()]
    total = sum(spec.nbytes for spec in specs)
    columns = (
        Column("dtype"),
        Column("tensors", Format.COUNT),
        Column("bytes", Format.COUNT),
        Column("GB", Format.GB),
        Column("GiB", Format.GIB),
    )
    last = Row(("total", len(specs), total, total, total), RowKind.TOTAL)
    return Table(title, columns, (*rows, last), (UNITS_NOTE,))


def _dtypes(specs: Sequence[TensorSpec]) -> list[str]:
    return sorted({spec.dtype for spec in specs})
