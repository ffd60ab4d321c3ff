"""A cut checkpoint before it is made: bytes by kind of tensor, files, disk."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.prune.names import expert_tensor, router_layer
from pipeline.prune.plan import PrunedPlan
from pipeline.report.tables import Column, Format, Row, RowKind, Table
from pipeline.source.checkpoint import Checkpoint

_KINDS = ("routed experts", "their routers", "everything else")

_SIZES = (
    Column("bytes", Format.COUNT),
    Column("GB", Format.GB),
    Column("GiB", Format.GIB),
)


def _kind(name: str) -> str:
    if expert_tensor(name):
        return _KINDS[0]
    return _KINDS[2] if router_layer(name) is None else _KINDS[1]


def pruned_table(source: Checkpoint, plan: PrunedPlan) -> Table:
    """Tensor bytes of the source and of what is left of it, by kind of tensor."""
    before, after = dict.fromkeys(_KINDS, 0), dict.fromkeys(_KINDS, 0)
    counts = dict.fromkeys(_KINDS, 0)
    for file in source.files.values():
        for tensor in file.tensors.values():
            before[_kind(tensor.name)] += tensor.nbytes
    for _, spec in plan.tensors:
        after[_kind(spec.name)] += spec.nbytes
        counts[_kind(spec.name)] += 1
    rows = [
        Row(
            (kind, counts[kind], before[kind], after[kind], after[kind], after[kind] - before[kind])
        )
        for kind in _KINDS
    ]
    whole, left = sum(before.values()), sum(after.values())
    total = Row(("total", sum(counts.values()), whole, left, left, left - whole), RowKind.TOTAL)
    columns = (
        Column("tensors"),
        Column("n left", Format.COUNT),
        Column("bytes before", Format.COUNT),
        Column("bytes left", Format.COUNT),
        Column("GB left", Format.GB),
        Column("change", Format.CHANGE),
    )
    keep = plan.keep
    return Table(
        f"{keep.n_kept} of {keep.n_experts} experts in each of {keep.n_layers} layers",
        columns,
        (*rows, total),
    )


@dataclass(frozen=True, slots=True)
class CutDisk:
    """Bytes of disk: still to be written, and free."""

    missing: int
    free: int


def cut_disk_table(plan: PrunedPlan, disk: CutDisk) -> Table:
    """Files and the disk that they take."""
    written = [file.nbytes for file in plan.files if file.is_changed]
    shared = [file.nbytes for file in plan.files if not file.is_changed]
    rows = [
        ("written anew", len(written), sum(written)),
        ("the source's own files, shared by link", len(shared), sum(shared)),
        ("disk: still to be written", None, disk.missing),
        ("disk: free", None, disk.free),
    ]
    note = ("This does not fit on the disk.",) if disk.missing > disk.free else ()
    columns = (Column("files"), Column("n", Format.COUNT), *_SIZES)
    return Table("files", columns, tuple(Row((*row, row[2], row[2])) for row in rows), note)
