"""Measured quantization errors as a table by role."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.model.roles import ROLE_TITLES
from pipeline.report.tables import Column, Format, Row, Table
from pipeline.verify import TensorError, errors_by_role


def error_table(errors: Sequence[TensorError]) -> Table:
    """Relative root mean square error of every role, and the tensor that lost most."""
    rows = [
        Row(
            (
                ROLE_TITLES[line.role],
                line.n_tensors,
                f"{line.rmse:.5f}",
                f"{line.worst.rmse:.5f}",
                f"{line.worst.name} ({line.worst.type_name})",
            )
        )
        for line in errors_by_role(errors)
    ]
    columns = (
        Column("role"),
        Column("tensors", Format.COUNT),
        Column("error"),
        Column("worst"),
        Column("worst tensor"),
    )
    n_rows = sum(error.n_rows for error in errors)
    note = (
        f"Relative RMSE against the decoded checkpoint over {n_rows:,} sampled rows; "
        "0 = not one bit of precision lost."
    )
    return Table("measured error by role", columns, tuple(rows), (note,))
