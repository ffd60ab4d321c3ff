"""What a recipe makes of a model: types and bytes by sub-role, alone or against another's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipeline.model.roles import SubRole
from pipeline.model.targets.tensor import TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.report.tables import Column, Format, Row, RowKind, Table

Resolved = tuple[Sequence[TargetTensor], Mapping[str, GgmlType]]
"""The tensors of a target, and the type of each by name."""


def type_table(targets: Sequence[TargetTensor], types: Mapping[str, GgmlType]) -> Table:
    """One row per sub-role and type."""
    n_tensors: Counter[tuple[SubRole, str]] = Counter()
    nbytes: Counter[tuple[SubRole, str]] = Counter()
    n_params: Counter[tuple[SubRole, str]] = Counter()
    for target in targets:
        key = (target.sub_role, types[target.name].name)
        n_tensors[key] += 1
        nbytes[key] += _nbytes(target, types)
        n_params[key] += target.n_params
    order = {sub_role: no for no, sub_role in enumerate(SubRole)}
    rows = [
        Row((sub_role, name, n_tensors[key], nbytes[key], nbytes[key], 8 * nbytes[key] / n))
        for key, n in sorted(n_params.items(), key=lambda item: (order[item[0][0]], item[0][1]))
        for sub_role, name in [key]
    ]
    whole = sum(nbytes.values())
    bpw = 8 * whole / max(1, sum(n_params.values()))
    total = Row(("total", None, len(targets), whole, whole, bpw), RowKind.TOTAL)
    columns = (
        Column("sub-role"),
        Column("type"),
        Column("tensors", Format.COUNT),
        Column("bytes", Format.COUNT),
        Column("GB", Format.GB),
        Column("bits per weight", Format.BITS),
    )
    return Table("types by sub-role", columns, (*rows, total))


def difference_table(old: Resolved, new: Resolved, names: tuple[str, str]) -> Table:
    """One row per sub-role and change of type; tensors of one side only count on that side."""
    before, after = _entries(old), _entries(new)
    n_tensors: Counter[tuple[SubRole, str, str]] = Counter()
    change: Counter[tuple[SubRole, str, str]] = Counter()
    for name in dict.fromkeys((*before, *after)):
        (sub_role, was, old_nbytes) = before.get(name, (None, "", 0))
        (other, now, new_nbytes) = after.get(name, (None, "", 0))
        key = (sub_role or other or SubRole.DRAFT, was, now)
        if was != now or old_nbytes != new_nbytes:
            n_tensors[key] += 1
            change[key] += new_nbytes - old_nbytes
    order = {sub_role: no for no, sub_role in enumerate(SubRole)}
    rows = [
        Row((sub_role, was, now, n_tensors[key], change[key], change[key]))
        for key in sorted(change, key=lambda key: (order[key[0]], key[1:]))
        for sub_role, was, now in [key]
    ]
    whole = sum(change.values())
    total = Row(("total", None, None, sum(n_tensors.values()), whole, whole), RowKind.TOTAL)
    columns = (
        Column("sub-role"),
        Column(names[0]),
        Column(names[1]),
        Column("tensors", Format.COUNT),
        Column("bytes", Format.CHANGE),
        Column("GB", Format.GB_CHANGE),
    )
    return Table("what differs", columns, (*rows, total))


def _entries(resolved: Resolved) -> dict[str, tuple[SubRole, str, int]]:
    targets, types = resolved
    return {t.name: (t.sub_role, types[t.name].name, _nbytes(t, types)) for t in targets}


def _nbytes(target: TargetTensor, types: Mapping[str, GgmlType]) -> int:
    return target.n_rows * types[target.name].row_nbytes(target.n_cols)
