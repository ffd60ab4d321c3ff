"""What an observation will take, as tables: its text and time, then bytes."""

from __future__ import annotations

from pipeline.model.config import ModelConfig
from pipeline.observe.measure import Speed
from pipeline.observe.plan import Keeping, ObservationPlan, Room
from pipeline.observe.sequences import Sequences
from pipeline.report.tables import Column, Format, Row, RowKind, Table

_SIZES = (Column("bytes", Format.COUNT), Column("GB", Format.GB), Column("GiB", Format.GIB))


def observation_tables(
    plan: ObservationPlan,
    sequences: Sequences,
    asked: int,
    speed: Speed,
    room: Room,
    c: ModelConfig,
) -> tuple[Table, ...]:
    """The tables of a plan.

    Args:
        plan: How the observation runs.
        sequences: What it reads.
        asked: Tokens that were asked for.
        speed: What two small trials gave just now.
        room: What may be taken.
        c: The model.
    """
    return _work(plan, sequences, asked, speed, c), _memory(plan, room), _disk(plan, room)


def _work(
    plan: ObservationPlan, sequences: Sequences, asked: int, speed: Speed, c: ModelConfig
) -> Table:
    seconds = speed.seconds(plan, c)
    rows = (
        ("documents", f"{sequences.n_documents:,}"),
        ("sequences", f"{plan.n_sequences:,}, of {max(sequences.lengths):,} tokens at most"),
        ("tokens", f"{plan.n_tokens:,}"),
        ("floating-point operations", f"{plan.flops:.3g}"),
        ("products of matrices, as measured now", f"{speed.flops / 1e9:,.0f} GFLOP/s"),
        ("an expert read and decoded, as measured now", f"{speed.expert_seconds * 1e3:,.1f} ms"),
        ("passes over the experts of a layer", f"{len(plan.chunks):,}"),
        ("time, roughly", duration(seconds)),
    )
    notes = []
    if plan.n_tokens < asked - max(sequences.lengths):
        notes.append(f"The text has fewer than the {asked:,} tokens asked for; all of it is used.")
    if len(sequences.lengths) == 1:
        notes.append("A single sequence has no two halves to hold against each other.")
    columns = (Column("what"), Column("figure"))
    return Table("observation", columns, tuple(map(Row, rows)), tuple(notes))


def _memory(plan: ObservationPlan, room: Room) -> Table:
    sides = {"memory": plan.uses}
    if room.device is not None:
        sides = {
            "device memory": tuple(use for use in plan.uses if use.on_device),
            "host memory": tuple(use for use in plan.uses if not use.on_device),
        }
    rows = []
    for place, uses in sides.items():
        rows += [_row(f"{place}: {use.what}", use.nbytes) for use in uses]
        most = sum(use.nbytes for use in uses)
        rows.append(_row(f"{place}: at most", most, RowKind.TOTAL))
    return Table("memory", (Column("what"), *_SIZES), tuple(rows))


def _disk(plan: ObservationPlan, room: Room) -> Table:
    rows = [_row("read from the checkpoint, at most", plan.read_nbytes)]
    if plan.keeping is Keeping.DISK:
        rows += [_row("disk: two states, at most", plan.disk_nbytes), _row("disk: free", room.disk)]
    note = (
        "A killed run goes on with the layer where it stopped."
        if plan.keeping is Keeping.DISK
        else "The state is kept in memory: a killed run begins anew."
    )
    return Table("reading and disk", (Column("what"), *_SIZES), tuple(rows), (note,))


def _row(what: str, nbytes: int, kind: RowKind = RowKind.BODY) -> Row:
    return Row((what, nbytes, nbytes, nbytes), kind)


def duration(seconds: float) -> str:
    """A time for people: ``2 h 05 min``."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
