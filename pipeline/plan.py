"""The plan: every output byte of one model file decided from headers alone.

A plan is of a target or of a draft. It names every tensor with its type, bytes, shard and absolute
offset, and holds the exact header of every shard. Filling, verifying, reporting and the inventory
all read this one object, so they cannot disagree.

Layout of the shards (fixed positions, so that variants of a model share what is equal):

    1      metadata and dense tensors
    2, 3   fork: one engram table each. mainline: the joined table, then the engram's own
           projections and gates
    4 ...  expert stacks in layer order, up to the shard size

A model without engram tables has no shards 2 and 3, a draft is one file.

Both layouts have the same number of shards and the same tensors in the expert shards, which
therefore are the same files byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from pipeline.errors import PlanError
from pipeline.gguf.header import (
    ALIGNMENT,
    TensorInfo,
    encode_padded_header,
    padded,
    padded_header_nbytes,
)
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import (
    SPLIT_COUNT,
    SPLIT_TENSORS_COUNT,
    shard_file_name,
    split_keys,
)
from pipeline.gguf.reader import GgufFile
from pipeline.model.config import ModelConfig
from pipeline.model.form import Form
from pipeline.model.layout import Layout
from pipeline.model.roles import ReadMode, Role
from pipeline.model.targets.tensor import Combine, TargetTensor
from pipeline.quant.types import GgmlType
from pipeline.source.spec import Codec

PAGE = 4096
"""Data regions start at a multiple of this, and page-multiple tensors come first, so that large
tensors can be read, mapped and shared by pages while ``general.alignment`` stays at its default
(files with a larger one are corrupted by common requantizers)."""


_LEFT_OUT_SPLIT_KEYS: Mapping[str, tuple[str, ...]] = {
    "experts": (SPLIT_TENSORS_COUNT,),
    "engram": (SPLIT_TENSORS_COUNT, SPLIT_COUNT),
}
"""Loaders take both counts from the first shard. The number of all tensors differs between the
layouts and would be all that keeps their expert shards apart; the number of shards differs between
recipes and would be all that keeps equal engram tables apart."""


class Transform(StrEnum):
    """How the stored bytes of a tensor become its output bytes."""

    ENCODE = "encode"
    """Decode to float32, quantize."""
    REPACK = "repack"
    """FP4 to MXFP4: the same bits in another order."""
    COPY = "copy"
    """The same bytes."""
    NARROW = "narrow"
    """64-bit integers to 32 bits: V4's table of the experts that a token is hashed to."""
    PRODUCT = "product"
    """Decode two matrices, multiply elementwise, encode."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor: ``offset`` is absolute in its shard file, ``shard`` counts from 0."""

    target: TargetTensor
    type: GgmlType
    transform: Transform
    shard: int
    offset: int

    @property
    def name(self) -> str:
        """GGUF name."""
        return self.target.name

    @property
    def is_encoded(self) -> bool:
        """Whether a quantizer makes its bytes."""
        return self.transform in (Transform.ENCODE, Transform.PRODUCT)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self.type.row_nbytes(self.target.n_cols)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return self.target.n_rows * self.row_nbytes


@dataclass(frozen=True, slots=True)
class PlannedShard:
    """One output file: header bytes, then ``tensors`` in file order.

    ``existing``: a finished file that is this shard, byte for byte.
    """

    no: int
    kind: str
    file_name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]
    existing: GgufFile | None = None

    @property
    def alignment(self) -> int:
        """Tensors begin at multiples of this."""
        return ALIGNMENT if self.existing is None else self.existing.alignment

    @property
    def nbytes(self) -> int:
        """Exact file length."""
        if self.existing is not None:
            return self.existing.nbytes
        if not self.tensors:
            return len(self.header)
        last = self.tensors[-1]
        return last.offset + padded(last.nbytes)

    @property
    def data_nbytes(self) -> int:
        """Bytes of the tensors, without header and padding."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything about an output model that can be known before a weight is read."""

    name: str
    form: Form
    config: ModelConfig
    key_values: tuple[KeyValue, ...]
    shards: tuple[PlannedShard, ...]
    shard_nbytes: int
    """Expert shards were to stay below this."""

    @property
    def layout(self) -> Layout | None:
        """Which engram tensors and keys the file has, where there is a choice."""
        return self.form.layout

    @property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """All tensors in shard and file order."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @property
    def typed(self) -> tuple[tuple[TargetTensor, GgmlType], ...]:
        """All tensors and their types, in the same order."""
        return tuple((tensor.target, tensor.type) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def data_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(shard.data_nbytes for shard in self.shards)


def per_token_nbytes(target: TargetTensor, nbytes: int, config: ModelConfig) -> int:
    """Bytes of a tensor of ``nbytes`` that one text token reads.

    Full tensors count whole, expert stacks by used over all experts, lookup tables by their rows
    (one n-gram row per order and head and engram layer; one embedding row).
    """
    mode = target.read_mode
    if mode is ReadMode.NONE:
        return 0
    if mode is ReadMode.SPARSE:
        return nbytes // target.shape[0] * config.n_experts_used
    if mode is ReadMode.ROWS:
        n_rows = 1
        if target.role is Role.ENGRAM and config.engram:
            n_rows = config.engram.n_columns * len(target.matrices)
        return nbytes // target.n_rows * n_rows
    return nbytes


def make_plan(
    *,
    name: str,
    form: Form,
    config: ModelConfig,
    targets: Sequence[TargetTensor],
    types: Mapping[str, GgmlType],
    key_values: Sequence[KeyValue],
    shard_nbytes: int,
) -> Plan:
    """Lay out ``targets`` in their ``types``.

    Args:
        name: Stem of the file names.
        form: Which loaders the file is for.
        config: The model; for a draft, the draft as a model of its own.
        targets: All tensors of the file.
        types: One type per tensor name.
        key_values: Metadata of the first shard, without the split keys.
        shard_nbytes: Expert shards are closed before they grow past this.

    Raises:
        PlanError: A tensor has no type.
    """
    missing = [target.name for target in targets if target.name not in types]
    if missing:
        raise PlanError("tensors without a type", tensor=", ".join(missing[:8]))
    groups = [("draft", list(targets))] if form.is_draft else _group(targets, types, shard_nbytes)
    count = len(groups)
    shards = []
    for no, (kind, members) in enumerate(groups):
        split = _split_keys(no, count, len(targets), kind)
        shards.append(
            _shard(
                no=no,
                kind=kind,
                file_name=shard_file_name(name, no, count),
                key_values=(*key_values, *split) if no == 0 else split,
                members=_pages_first(members, types),
                types=types,
            )
        )
    return Plan(name, form, config, tuple(key_values), tuple(shards), shard_nbytes)


def _split_keys(no: int, count: int, n_tensors: int, kind: str) -> tuple[KeyValue, ...]:
    left_out = _LEFT_OUT_SPLIT_KEYS.get(kind, ())
    return tuple(key for key in split_keys(no, count, n_tensors) if key.key not in left_out)


def _group(
    targets: Sequence[TargetTensor], types: Mapping[str, GgmlType], shard_nbytes: int
) -> list[tuple[str, list[TargetTensor]]]:
    tables = [t for t in targets if t.is_table]
    experts = [t for t in targets if t.role is Role.ROUTED]
    # One joined table leaves the second fixed position free: the engram's small tensors take it.
    beside = [t for t in targets if t.role is Role.ENGRAM and not t.is_table]
    is_joined = len(tables) == 1 and len(tables[0].matrices) > 1
    apart = {t.name for t in (*tables, *experts, *(beside if is_joined else ()))}
    groups = [("dense", [t for t in targets if t.name not in apart])]
    groups += [("engram", [table]) for table in tables]
    if is_joined:
        groups.append(("engram", beside))
    groups += [("experts", members) for members in _chunks(experts, types, shard_nbytes)]
    return groups


def _chunks(
    experts: Sequence[TargetTensor], types: Mapping[str, GgmlType], limit: int
) -> list[list[TargetTensor]]:
    """Expert stacks in layer order, in files of at most ``limit`` bytes.

    A layer's three stacks stay together; a layer larger than ``limit`` has a file of its own.
    """
    chunks: list[list[TargetTensor]] = []
    for layer in sorted({t.layer for t in experts if t.layer is not None}):
        stacks = [t for t in experts if t.layer == layer]
        if chunks and _expert_file_nbytes([*chunks[-1], *stacks], types) <= limit:
            chunks[-1] += stacks
        else:
            chunks.append(stacks)
    return chunks


def _expert_file_nbytes(members: Sequence[TargetTensor], types: Mapping[str, GgmlType]) -> int:
    # Numbers in a header have fixed widths, so any will do for its length.
    infos = [TensorInfo(t.name, t.shape, types[t.name].type_id, 0) for t in members]
    header = padded_header_nbytes(_split_keys(0, 1, 0, "experts"), infos, page=PAGE)
    return header + sum(padded(_nbytes(t, types)) for t in members)


def _nbytes(target: TargetTensor, types: Mapping[str, GgmlType]) -> int:
    return target.n_rows * types[target.name].row_nbytes(target.n_cols)


def _pages_first(
    members: Sequence[TargetTensor], types: Mapping[str, GgmlType]
) -> list[TargetTensor]:
    def is_odd(target: TargetTensor) -> bool:
        return _nbytes(target, types) % PAGE != 0

    return sorted(members, key=is_odd)


def _shard(
    *,
    no: int,
    kind: str,
    file_name: str,
    key_values: Sequence[KeyValue],
    members: Sequence[TargetTensor],
    types: Mapping[str, GgmlType],
) -> PlannedShard:
    starts = list(accumulate((padded(_nbytes(t, types)) for t in members), initial=0))
    infos = [
        TensorInfo(t.name, tuple(reversed(t.shape)), types[t.name].type_id, start)
        for t, start in zip(members, starts, strict=False)
    ]
    header = encode_padded_header(key_values, infos, page=PAGE)
    tensors = tuple(
        PlannedTensor(t, types[t.name], transform_of(t, types[t.name]), no, len(header) + start)
        for t, start in zip(members, starts, strict=False)
    )
    return PlannedShard(no, kind, file_name, header, tensors)


def transform_of(target: TargetTensor, ggml_type: GgmlType) -> Transform:
    """How ``target`` gets from its stored form to ``ggml_type``."""
    if target.combine is Combine.PRODUCT:
        return Transform.PRODUCT
    codec = target.matrices[0].codec
    if codec is Codec.FP4 and ggml_type.name == "MXFP4":
        return Transform.REPACK
    if codec is Codec.I64:
        return Transform.NARROW
    stored = {m.ggml_type if m.codec is Codec.GGML else m.codec.name for m in target.matrices}
    # Tables that become one may be of several types: then all are encoded, in one way.
    return Transform.COPY if stored == {ggml_type.name} else Transform.ENCODE
