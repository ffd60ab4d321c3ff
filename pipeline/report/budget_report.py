"""The byte budget as tables: an overview of the steps, then every step by role.

Rows say what a role takes in exact bytes, in GB and in GiB, what of it a token reads, and what
changed against the step before. What the target file leaves out stays visible under each total.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeline.budget import Budget, Line, NotCarried
from pipeline.model.config import ModelConfig
from pipeline.model.roles import ROLE_TITLES, Role
from pipeline.report.tables import Cell, Column, Format, Row, RowKind, Table
from pipeline.report.units import UNITS_NOTE, count

_SIZE_COLUMNS = (
    Column("tensors", Format.COUNT),
    Column("parameters", Format.COUNT),
    Column("bytes", Format.COUNT),
    Column("GB", Format.GB),
    Column("GiB", Format.GIB),
    Column("share", Format.SHARE),
    Column("bpw", Format.BITS),
)

_READ_COLUMNS = (
    Column("role"),
    Column("read per token", Format.COUNT),
    Column("change in bytes", Format.CHANGE),
    Column("change in GB", Format.GB_CHANGE),
    Column("types"),
)


@dataclass(frozen=True, slots=True)
class _RoleRow:
    """One role of one step beside the same role of the step before; either may lack it."""

    role: Role
    line: Line | None
    before: Line | None
    left_out: NotCarried | None

    @property
    def change(self) -> int:
        """Bytes that the role grew by."""
        return (self.line.nbytes if self.line else 0) - (self.before.nbytes if self.before else 0)


def budget_tables(
    steps: Sequence[Budget], config: ModelConfig, not_carried: Sequence[NotCarried] = ()
) -> tuple[Table, ...]:
    """All tables of a budget: overview, two per step by role, sub-roles and types of the last.

    Args:
        steps: In the order in which they happen; changes are taken against the one before.
        config: The model, for what a token reads.
        not_carried: What the target file leaves out; steps that hold it list it themselves.
    """
    befores = (None, *steps)[: len(steps)]
    by_role = [
        table
        for step, before in zip(steps, befores, strict=True)
        for table in (
            role_table(step, not_carried),
            read_table(step, before, not_carried),
        )
    ]
    last = [sub_role_table(steps[-1]), type_table(steps[-1])] if steps else []
    return (overview_table(steps, config), *by_role, *last)


def overview_table(steps: Sequence[Budget], config: ModelConfig) -> Table:
    """One row per step, and the sentences that hold for the tables of every step."""
    changes = [None, *(after.nbytes - before.nbytes for before, after in pairwise(steps))]
    rows = [
        Row((step.step, *_size_cells(step, None), step.per_token, change))
        for step, change in zip(steps, changes, strict=True)
    ]
    columns = (
        Column("step"),
        *(column for column in _SIZE_COLUMNS if column.format is not Format.SHARE),
        Column("read per token", Format.COUNT),
        Column("change in bytes", Format.CHANGE),
    )
    return Table("Steps", columns, tuple(rows), (UNITS_NOTE, _read_note(steps, config)))


def role_table(step: Budget, not_carried: Sequence[NotCarried] = ()) -> Table:
    """Tensors, parameters, bytes, share and bits per weight of every role of ``step``."""
    shown = _role_rows(step, None, not_carried)
    body = [
        Row((ROLE_TITLES[row.role], *_size_cells(row.line, step.nbytes)))
        for row in shown
        if row.line
    ]
    total = Row(("total", *_size_cells(step, step.nbytes)), RowKind.TOTAL)
    asides = [_aside(row.left_out) for row in shown if row.left_out]
    notes = ("Not carried into these files; bytes as in the checkpoint.",) if asides else ()
    return Table(
        f"{step.step}: bytes by role",
        (Column("role"), *_SIZE_COLUMNS),
        (*body, total, *asides),
        notes,
    )


def _aside(left_out: NotCarried) -> Row:
    title = f"{ROLE_TITLES[left_out.role]}, not carried"
    size = left_out.nbytes
    cells = (title, left_out.n_tensors, None, size, size, size, None, None)
    return Row(cells, RowKind.ASIDE)


def read_table(
    step: Budget, before: Budget | None, not_carried: Sequence[NotCarried] = ()
) -> Table:
    """What a token reads of every role, its change against ``before``, and its types."""
    rows = _role_rows(step, before, not_carried)
    columns = _READ_COLUMNS if before else (*_READ_COLUMNS[:2], _READ_COLUMNS[-1])
    changed = step.nbytes - before.nbytes if before else 0
    table_rows = [
        Row(_read_cells(_title(row), row.line, row.change, before))
        for row in rows
        if row.line or row.before
    ]
    total = Row(_read_cells("total", step, changed, before), RowKind.TOTAL)
    against = f" and change against {before.step}" if before else ""
    return Table(
        f"{step.step}: bytes read per token{against}",
        columns,
        (*table_rows, total),
    )


def _title(row: _RoleRow) -> str:
    title = ROLE_TITLES[row.role]
    return title if row.line or not row.left_out else f"{title}, not carried"


def _read_cells(
    title: str, line: Line | Budget | None, change: int, before: Budget | None
) -> tuple[Cell, ...]:
    changes = (change, change) if before else ()
    per_token = line.per_token if line else 0
    return (title, per_token, *changes, type_mix(_types(line)))


def _read_note(steps: Sequence[Budget], config: ModelConfig) -> str:
    if all(line.role is Role.DRAFT for step in steps for line in step.roles):
        return "A draft is read once per drafted block, not per token."
    parts = [
        "Read per token of text: plain tensors whole",
        f"expert stacks {config.n_experts_used} of {config.n_experts} experts",
        "one row of the token embedding",
    ]
    if config.engram:
        n_rows = config.engram.n_columns * len(config.engram.layers)
        parts.append(f"{n_rows} rows of the engram tables")
    return f"{', '.join(parts)}."


def sub_role_table(step: Budget) -> Table:
    """The sizes of ``step`` by role and sub-role."""
    body = [
        Row((line.role, line.sub_role, *_size_cells(line, step.nbytes))) for line in step.sub_roles
    ]
    total = Row(("total", None, *_size_cells(step, step.nbytes)), RowKind.TOTAL)
    columns = (Column("role"), Column("sub-role"), *_SIZE_COLUMNS)
    return Table(f"{step.step}: bytes by sub-role", columns, (*body, total))


def type_table(step: Budget) -> Table:
    """Tensors and bytes of ``step`` by type, the largest share first."""
    types = sorted(_types(step).items(), key=lambda item: (-item[1][1], item[0]))
    body = [
        Row((name, n, nbytes, nbytes, nbytes, nbytes / max(step.nbytes, 1)))
        for name, (n, nbytes) in types
    ]
    size = step.nbytes
    total = Row(("total", step.n_tensors, size, size, size, 1.0 if size else 0.0), RowKind.TOTAL)
    columns = (Column("type"), *(c for c in _SIZE_COLUMNS[:-1] if c.title != "parameters"))
    return Table(f"{step.step}: bytes by type", columns, (*body, total))


def type_mix(types: Mapping[str, tuple[int, int]]) -> str:
    """``Q3_K 80, Q4_K 38``: tensors per type, the type with most bytes first."""
    order = sorted(types.items(), key=lambda item: (-item[1][1], item[0]))
    return ", ".join(f"{name} {count(n)}" for name, (n, _) in order)


def _types(line: Line | Budget | None) -> dict[str, tuple[int, int]]:
    if line is None:
        return {}
    if isinstance(line, Line):
        return dict(line.types)
    merged: dict[str, tuple[int, int]] = {}
    for role in line.roles:
        for name, (n, nbytes) in role.types.items():
            so_far = merged.get(name, (0, 0))
            merged[name] = (so_far[0] + n, so_far[1] + nbytes)
    return merged


def _size_cells(line: Line | Budget | None, whole: int | None) -> tuple[Cell, ...]:
    """One cell per size column; without ``whole`` there is no share among them."""
    if line is None:
        return (0,) * len(_SIZE_COLUMNS)
    size = line.nbytes
    shares = () if whole is None else (size / whole if whole else 0.0,)
    bpw = size * 8 / line.n_params if line.n_params else None
    return (line.n_tensors, line.n_params, size, size, size, *shares, bpw)


def _role_rows(
    step: Budget, before: Budget | None, not_carried: Sequence[NotCarried]
) -> list[_RoleRow]:
    """Every role that ``step`` or ``before`` has or that is left out, in the order of `Role`."""
    left_out = {part.role: part for part in not_carried}
    rows = []
    for role in Role:
        line, old = step.line(role), before.line(role) if before else None
        missing = None if line else left_out.get(role)
        if line or old or missing:
            rows.append(_RoleRow(role, line, old, missing))
    return rows
