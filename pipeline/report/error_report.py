"""Measured quantization errors as a table by role."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.measure import RoleError, TensorError, errors_by_role
from pipeline.model.roles import ROLE_TITLES
from pipeline.report.tables import Column, Format, Row, Table

_WEIGHTED_NOTE = (
    "weighted: squares count as much as the importance matrix says; without imatrix: the same rows "
    "quantized as if all columns counted the same."
)


def error_table(errors: Sequence[TensorError]) -> Table:
    """Relative root mean square error of every role, and the tensor that lost most.

    Where an importance matrix was used, also the error weighted by it, with it and without.
    """
    lines = errors_by_role(errors)
    is_weighted = any(line.weighted for line in lines)
    rows = [_row(line, is_weighted=is_weighted) for line in lines]
    weighted = (Column("weighted"), Column("without imatrix"), Column("weighted tensors"))
    columns = (
        Column("role"),
        Column("tensors", Format.COUNT),
        Column("error"),
        *(weighted if is_weighted else ()),
        Column("worst"),
        Column("worst tensor"),
    )
    n_rows = sum(error.n_rows for error in errors)
    note = (
        f"Relative RMSE against the decoded source over {n_rows:,} sampled rows; "
        "0 = not one bit of precision lost."
    )
    notes = (note, _WEIGHTED_NOTE) if is_weighted else (note,)
    return Table("measured error by role", columns, tuple(rows), notes)


def _row(line: RoleError, *, is_weighted: bool) -> Row:
    weighted: tuple[str | None, ...] = ()
    if is_weighted:
        one = line.weighted
        weighted = (
            (f"{one.rmse:.5f}", f"{one.without:.5f}", f"{one.n_tensors:,}")
            if one
            else (None, None, None)
        )
    worst = line.worst
    return Row(
        (
            ROLE_TITLES[line.role],
            line.n_tensors,
            f"{line.rmse:.5f}",
            *weighted,
            f"{worst.rmse:.5f}",
            f"{worst.name} ({worst.type_name})",
        )
    )
