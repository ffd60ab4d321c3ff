"""The plan as tables: its files, and the disk and memory that making them takes."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.experts.keys import keep_sentence
from pipeline.fill import MEMORY_BASE_NBYTES, MEMORY_THREAD_NBYTES
from pipeline.model.engines import engines_sentence
from pipeline.plan import Plan
from pipeline.report.tables import Column, Format, Row, RowKind, Table

_SIZES = (
    Column("bytes", Format.COUNT),
    Column("GB", Format.GB),
    Column("GiB", Format.GIB),
)

LARGE_FILE_NBYTES = 200 * 10**9
"""Largest file that a common model hub accepts (since January 2026)."""

MANY_SHARDS = 64
"""More shards than one engine opens by default."""


def shard_table(plan: Plan) -> Table:
    """The files of ``plan`` with their exact lengths."""
    rows = [
        Row((s.file_name, s.kind, len(s.tensors), s.nbytes, s.nbytes, s.nbytes))
        for s in plan.shards
    ]
    total = Row(
        ("total", None, len(plan.tensors), plan.nbytes, plan.nbytes, plan.nbytes), RowKind.TOTAL
    )
    columns = (Column("file"), Column("holds"), Column("tensors", Format.COUNT), *_SIZES)
    return Table(f"files ({plan.form})", columns, (*rows, total), _warnings(plan))


def _warnings(plan: Plan) -> tuple[str, ...]:
    notes = [
        f"{shard.file_name} is larger than {LARGE_FILE_NBYTES / 1e9:.0f} GB, which a common model "
        "hub refuses; a tensor cannot be split over files."
        for shard in plan.shards
        if shard.nbytes > LARGE_FILE_NBYTES
    ]
    notes += [
        f"{shard.file_name} exceeds the {plan.shard_nbytes:,} bytes asked for: a layer's three "
        "stacks stay together."
        for shard in plan.shards
        if shard.kind == "experts" and shard.nbytes > plan.shard_nbytes
    ]
    if not plan.form.is_draft:
        types = {tensor.type for tensor in plan.tensors}
        sentence = engines_sentence(plan.form, types)
        notes.append(f"{sentence[0].upper()}{sentence[1:]}.")
    cut = keep_sentence(plan.key_values)
    if cut is not None:
        notes.append(cut)
    if len(plan.shards) > MANY_SHARDS:
        notes.append(f"More than {MANY_SHARDS} files: raise output.shard_nbytes in the recipe.")
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes of disk that a job takes.

    ``fetched`` is what comes from a hub in all, ``window`` the most of it that lies on the disk at
    a time while sources are let go; both are 0 for a source that is read where it lies.
    """

    missing: int
    free: int
    fetched: int
    window: int


def disk_table(nbytes: int, need: DiskNeed, *, n_threads: int) -> Table:
    """Disk still needed and free, and the most anonymous memory a run takes.

    ``nbytes`` is the length of all output files.
    """
    memory = MEMORY_BASE_NBYTES + n_threads * MEMORY_THREAD_NBYTES
    rows = [
        ("disk: all output files", nbytes),
        ("disk: output still to be written", need.missing),
        *(_fetching(nbytes, need) if need.fetched else ()),
        ("disk: free", need.free),
        (f"memory: at most, {n_threads} threads", memory),
    ]
    return Table(
        "needs",
        (Column("what"), *_SIZES),
        tuple(Row((what, nbytes, nbytes, nbytes)) for what, nbytes in rows),
        _too_small(need),
    )


def _too_small(need: DiskNeed) -> tuple[str, ...]:
    if need.missing + need.window > need.free:
        return ("This does not fit on the disk.",)
    if need.missing + need.fetched > need.free:
        return ("This fits on the disk only if sources are let go (--keep-source no).",)
    return ()


def _fetching(nbytes: int, need: DiskNeed) -> tuple[tuple[str, int], ...]:
    return (
        ("disk: source files from the hub", need.fetched),
        ("disk: peak, sources kept", nbytes + need.fetched),
        ("disk: peak, sources let go (--keep-source no)", nbytes + need.window),
    )
