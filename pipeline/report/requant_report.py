"""Of an output that is made of finished files: what comes from where, and what loses twice."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.model.roles import ROLE_TITLES
from pipeline.plan import Plan
from pipeline.report.tables import Column, Format, Row, RowKind, Table
from pipeline.requant.twice import Requantized, requantized

_NOTE = (
    "Values that a lossy type rounded before are rounded once more. Errors are measured against "
    "the source file, whose own come on top; tensors from the checkpoint ([[graft]]) lose once."
)


def requant_tables(plans: Sequence[Plan]) -> tuple[Table, ...]:
    """`requant_table` of what files are to lose twice; none where nothing does."""
    losses = requantized(typed for plan in plans for typed in plan.typed)
    return (requant_table(losses),) if losses else ()


def requant_table(losses: Sequence[Requantized]) -> Table:
    """The tensors that go from one lossy type to another, by role and pair of types."""
    rows = [
        Row((ROLE_TITLES[one.role], one.source_type, one.type, one.n_tensors, one.nbytes))
        for one in losses
    ]
    n_tensors, nbytes = sum(one.n_tensors for one in losses), sum(one.nbytes for one in losses)
    total = Row(("total", None, None, n_tensors, nbytes), RowKind.TOTAL)
    columns = (
        Column("role"),
        Column("from"),
        Column("to"),
        Column("tensors", Format.COUNT),
        Column("bytes", Format.COUNT),
    )
    return Table("quantized a second time", columns, (*rows, total), (_NOTE,))


def origin_table(taken: Sequence[tuple[str, int, int]], notes: Sequence[str]) -> Table:
    """How much of the output comes from which source.

    Args:
        taken: What each source is called, with the tensors and output bytes made of it.
        notes: What a person should know of the sources.
    """
    columns = (Column("source"), Column("tensors", Format.COUNT), Column("bytes", Format.COUNT))
    return Table("where it comes from", columns, tuple(map(Row, taken)), tuple(notes))
