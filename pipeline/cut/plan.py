"""The plan of a finished model without some of its experts.

Files are those of the model, one by one: a file of which no byte changes is that file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from pipeline.cut.earlier import told_keep
from pipeline.cut.expert_tensors import check_groups, expert_tensors
from pipeline.experts.keep import KeepList, check_fits
from pipeline.experts.keys import PREFIX, keep_keys
from pipeline.experts.routing import routing_of
from pipeline.gguf.header import (
    ALIGNMENT_KEY,
    FILLER_KEY,
    TensorInfo,
    encode_padded_header,
    padded,
)
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import SPLIT_KEYS, model_stem
from pipeline.gguf.reader import GgufFile
from pipeline.model.targets.trunk import cut_model
from pipeline.plan import PAGE, Plan, PlannedShard, PlannedTensor
from pipeline.source.spec import Picks


def cut_plan(plan: Plan, keep: KeepList, *, name: str) -> Plan:
    """``plan`` with the experts of ``keep`` alone.

    Expert stacks, the router and its biases lose entries. Of the metadata, the number of experts
    changes, and the keep list is told: in the numbering of the first model, where this one was cut
    before. All else is as it was. Where no expert goes, no byte changes.

    Args:
        plan: Of a finished target (`pipeline.cut.file_plan.plan_of_file`).
        keep: The experts that stay, in the numbering of this target.
        name: Stem of the file names.

    Raises:
        PlanError: The list does not fit the model, or the model cannot lose experts; several raise
            `Problems`.
        FormatError: A tensor may or may not have an entry per expert, or keys of an earlier cut
            are damaged.
    """
    names, routing = expert_tensors(plan), routing_of(plan.config)
    check_fits(keep, routing)
    check_groups(plan, keep)
    same = carried_plan(plan, name=name)
    if keep.n_kept == keep.n_experts:
        return same
    key_values = _key_values(plan, keep)
    return replace(
        same,
        config=cut_model(plan.config, keep.layers),
        key_values=key_values,
        shards=tuple(_cut_shard(shard, names, keep, key_values) for shard in same.shards),
    )


def carried_plan(plan: Plan, *, name: str) -> Plan:
    """``plan``, of finished files, as it is, but for the names of its files."""

    def renamed(shard: PlannedShard) -> PlannedShard:
        number = shard.file_name.removeprefix(model_stem(Path(shard.file_name)))
        return replace(shard, file_name=f"{name}{number}")

    return replace(plan, name=name, shards=tuple(map(renamed, plan.shards)))


def _key_values(plan: Plan, keep: KeepList) -> tuple[KeyValue, ...]:
    entries = {entry.key: entry for entry in plan.key_values}
    count = f"{plan.form.architecture}.expert_count"
    entries[count] = replace(entries[count], value=keep.n_kept)
    kept = [entry for key, entry in entries.items() if not key.startswith(PREFIX)]
    return (*kept, *keep_keys(told_keep(plan, keep)))


def _cut_shard(
    shard: PlannedShard,
    names: frozenset[str],
    keep: KeepList,
    key_values: Sequence[KeyValue],
) -> PlannedShard:
    """``shard`` without the experts that go; as it is where it holds none and no metadata."""
    file = shard.existing
    assert file is not None
    if shard.no > 0 and names.isdisjoint(tensor.name for tensor in shard.tensors):
        return shard
    tensors = [_cut(t, keep) if t.name in names else t for t in shard.tensors]
    starts = list(accumulate((padded(t.nbytes) for t in tensors), initial=0))
    infos = [
        TensorInfo(t.name, t.target.shape[::-1], t.type.type_id, start)
        for t, start in zip(tensors, starts, strict=False)
    ]
    header = encode_padded_header(_shard_keys(shard.no, file, key_values), infos, page=PAGE)
    placed = (
        replace(t, offset=len(header) + start) for t, start in zip(tensors, starts, strict=False)
    )
    return replace(shard, header=header, tensors=tuple(placed), existing=None)


def _shard_keys(no: int, file: GgufFile, key_values: Sequence[KeyValue]) -> tuple[KeyValue, ...]:
    """The metadata of a shard: the model's in the first, and what is true of this file alone.

    Some makers repeat the model's in every file.
    """
    model = {entry.key: entry for entry in key_values}
    own = [e for e in file.key_values.values() if e.key not in (ALIGNMENT_KEY, FILLER_KEY)]
    if no > 0:
        return tuple(model.get(entry.key, entry) for entry in own)
    return (*key_values, *(entry for entry in own if entry.key in SPLIT_KEYS))


def _cut(tensor: PlannedTensor, keep: KeepList) -> PlannedTensor:
    target = tensor.target
    assert target.layer is not None
    entries = keep.layers[target.layer]
    shape = (len(entries), *target.shape[1:])
    rows = replace(
        target.matrices[0],
        n_rows=math.prod(shape[:-1]),
        n_cols=shape[-1],
        picks=Picks(entries, keep.n_experts),
    )
    return replace(tensor, target=replace(target, shape=shape, matrices=(rows,)))
