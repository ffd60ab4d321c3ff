"""A model's headers, read as far as they go: also of files that no loader would take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Finding, Mend, Severity, counted, spread
from pipeline.diagnosis.gathered import gather
from pipeline.errors import QuantmillError, TypeRuleError
from pipeline.gguf.header import ALIGNMENT, ALIGNMENT_KEY, TensorInfo, padded
from pipeline.gguf.keys import i32
from pipeline.gguf.model_file import SPLIT_TENSORS_COUNT, GgufModel, read_model
from pipeline.gguf.reader import GgufFile, GgufTensor, RawHeader, read_header
from pipeline.quant.types import TYPES_BY_ID, GgmlType

_IK_REPACKED = range(202, 400)
_SHARED_ID = 43

_FOREIGN_43 = (GgmlType("MXFP8", _SHARED_ID, 32, 33),)
"""What forks store under the id of F8_E4M3: 32 FP8 bytes and a scale (Unsloth's tables)."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model as far as it can be read; ``is_readable`` says whether our own tasks read it.

    ``is_whole``: no shard is missing.
    """

    model: GgufModel
    findings: tuple[Finding, ...] = ()
    is_readable: bool = True
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor, and the bytes between its start and the next one's, where the file has a next."""

    tensor: GgufTensor
    span: int | None


def open_model(path: Path) -> Opened:
    """The model that the file ``path`` belongs to.

    Raises:
        FormatError: The header itself is broken.
        SourceError: A file cannot be read.
    """
    gathered = gather(read_header(path))
    files, findings = [], list(gathered.findings)
    for raw in gathered.shards.values():
        header, odd = _as_padded(raw)
        findings += odd
        placed = _placed(header)
        files.append(_file(header, placed))
        findings += _file_findings(header, placed)
    model, refusal = GgufModel(tuple(files)), _refusal(path)
    if refusal is not None and not findings and not stale_totals(model):
        mend = Mend("Make its like from the checkpoint:", alike=True)
        findings.append(Finding(Severity.STOPS, refusal.message(), mend=mend))
    is_whole = len(gathered.shards) == gathered.count
    return Opened(model, tuple(findings), refusal is None, is_whole)


def stale_totals(model: GgufModel) -> tuple[GgufFile, ...]:
    """The files that state another number of tensors than those of the model are together."""
    total = i32(SPLIT_TENSORS_COUNT, sum(len(file.tensors) for file in model.files))
    return tuple(
        file
        for file in model.files
        if file.key_values.get(SPLIT_TENSORS_COUNT, total) != total
        and file.key_values[SPLIT_TENSORS_COUNT].type is total.type
    )


def _as_padded(header: RawHeader) -> tuple[RawHeader, list[Finding]]:
    """The header with the alignment that its data has, and a finding where that is not the key's.

    Somebody has written the key without moving the data, or a tool has passed over it.
    """
    plain = replace(header, alignment=ALIGNMENT)
    if header.alignment == ALIGNMENT or _is_at(header) or not _is_at(plain):
        return header, []
    finding = Finding(
        Severity.STOPS,
        f"{ALIGNMENT_KEY} says {header.alignment:,} but the data are padded to {ALIGNMENT}",
        (header.path.name,),
        Mend("No reader finds the tensors. Make its like from the checkpoint:", alike=True),
    )
    return plain, [finding]


def _is_at(header: RawHeader) -> bool:
    """Whether tensors of known types lie as the alignment of ``header`` asks."""
    placed = _placed(header)
    end = max((one.tensor.offset + one.tensor.nbytes for one in placed), default=0)
    return end <= header.file_nbytes and all(_fits(one, header.alignment) for one in placed)


def _refusal(path: Path) -> QuantmillError | None:
    """Why the strict reader, on which all tasks rely, does not take the model."""
    try:
        read_model(path)
    except QuantmillError as error:
        return error
    return None


def _file(header: RawHeader, placed: Sequence[_Placed]) -> GgufFile:
    return GgufFile(
        path=header.path,
        nbytes=header.file_nbytes,
        version=header.version,
        key_values=header.key_values,
        tensors={one.tensor.name: one.tensor for one in placed},
        data_offset=header.data_offset,
        alignment=header.alignment,
        modified_ns=header.modified_ns,
    )


def _placed(header: RawHeader) -> list[_Placed]:
    spans = [after.offset - info.offset for info, after in pairwise(header.infos)]
    placed = []
    for info, span in zip(header.infos, [*spans, None], strict=True):
        kind, nbytes = _size(info, span, header.alignment)
        offset = header.data_offset + info.offset
        placed.append(_Placed(GgufTensor(info.name, info.ne, kind, offset, nbytes), span))
    return placed


def _size(info: TensorInfo, span: int | None, alignment: int) -> tuple[GgmlType, int]:
    """The type of a tensor and its bytes; what is not known takes what is left up to the next."""
    kind = TYPES_BY_ID.get(info.type_id)
    n_rows = math.prod(info.ne[1:])
    for one in (kind, *(_FOREIGN_43 if info.type_id == _SHARED_ID else ())):
        nbytes = _row_nbytes(one, info.ne[0])
        if one and nbytes and span in (None, padded(n_rows * nbytes, alignment)):
            return one, n_rows * nbytes
    nbytes = _row_nbytes(kind, info.ne[0])
    if kind and nbytes:
        return kind, n_rows * nbytes
    name = kind.name if kind else f"id {info.type_id}"
    return GgmlType(name, info.type_id, 1, 0), max(0, span or 0)


def _row_nbytes(kind: GgmlType | None, n_cols: int) -> int:
    """Bytes of a row, or 0 where the type is not known or does not divide it."""
    try:
        return kind.row_nbytes(n_cols) if kind else 0
    except TypeRuleError:
        return 0


def _file_findings(header: RawHeader, placed: Sequence[_Placed]) -> Iterator[Finding]:
    yield from _type_findings([one.tensor for one in placed], header.path.name)
    unlike = [one for one in placed if not _fits(one, header.alignment)]
    if unlike:
        yield _unlike(unlike, header.path.name)
    yield from _end_findings(header, [one.tensor for one in placed])


def _fits(one: _Placed, alignment: int) -> bool:
    is_known = one.tensor.type.block_nbytes > 0
    return not is_known or one.span in (None, padded(one.tensor.nbytes, alignment))


def _unlike(unlike: Sequence[_Placed], file: str) -> Finding:
    """Tensors that take other bytes than their type says."""
    first = unlike[0]
    overlap = any((one.span or 0) < one.tensor.nbytes for one in unlike)
    has_meta = any(one.tensor.type.row_meta_nbytes for one in unlike)
    why = " gguf-py does not count the bytes that these types put before each row." * has_meta
    return Finding(
        Severity.STOPS,
        f"{counted(len(unlike), 'tensor')} "
        + ("overlapping the next" if overlap else "followed by a hole")
        + f": {first.tensor.type.name} takes {first.tensor.nbytes:,} bytes, the file gives "
        f"{first.span or 0:,}.{why}",
        (file, spread(one.tensor.name for one in unlike)),
        Mend(
            "Bytes were lost or were never of this type. Make its like from the checkpoint:",
            alike=True,
        ),
    )


def _type_findings(tensors: Sequence[GgufTensor], file: str) -> Iterator[Finding]:
    by_type: dict[GgmlType, list[str]] = {}
    for tensor in tensors:
        if tensor.type.name == _FOREIGN_43[0].name or not tensor.type.block_nbytes:
            by_type.setdefault(tensor.type, []).append(tensor.name)
    for kind, names in by_type.items():
        yield Finding(
            Severity.STOPS,
            f"{counted(len(names), 'tensor')} of a type that cannot be read: {_unread(kind)}",
            (file, spread(names)),
            _mend_type(kind),
        )


def _unread(kind: GgmlType) -> str:
    if kind.name == _FOREIGN_43[0].name:
        return (
            "MXFP8 (33 bytes per 32 weights) under id 43, as Unsloth writes it. In ggml the id "
            "means F8_E4M3, 1 byte a weight; strata and inferzero read this form"
        )
    if kind.type_id in _IK_REPACKED:
        return f"id {kind.type_id}, one of ik_llama.cpp's repacked (row-interleaved) types"
    if kind.type_id in TYPES_BY_ID:
        return (
            f"{kind.name}, whose block of {TYPES_BY_ID[kind.type_id].block} does not divide the row"
        )
    return f"id {kind.type_id}, which neither ggml nor ik_llama.cpp has"


def _mend_type(kind: GgmlType) -> Mend:
    if kind.type_id in _IK_REPACKED:
        return Mend("Use the file it was repacked from: repacking is for one machine's memory.")
    return Mend("Convert the released checkpoint instead:", alike=True)


def _end_findings(header: RawHeader, tensors: Sequence[GgufTensor]) -> Iterator[Finding]:
    """The file ends before its last tensor does, or long after."""
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=header.nbytes)
    most = padded(end, header.alignment)
    if header.file_nbytes < end:
        cut = [t.name for t in tensors if t.offset + t.nbytes > header.file_nbytes]
        share = header.file_nbytes / end
        yield Finding(
            Severity.STOPS,
            f"the file is cut short: {header.file_nbytes:,} of {end:,} bytes ({share:.1%}), "
            f"{counted(len(cut), 'tensor')} of {len(tensors):,} not whole",
            (header.path.name, spread(cut)),
            Mend("Let the download go on, or fetch the file again."),
            "tensor data is not within the file bounds, model is corrupted or incomplete",
        )
    elif header.file_nbytes > most:
        yield Finding(
            Severity.NOTE,
            f"{header.file_nbytes - most:,} bytes follow the last tensor",
            (header.path.name,),
            Mend(
                "Engines pass over them, our own reader does not. If they are of no use to you:",
                (commands.cut_to(header.path, most),),
            ),
        )


def by_name(model: GgufModel) -> Mapping[str, GgufTensor]:
    """The tensors of a model without the numbers of their shards."""
    return {name: tensor for name, (_, tensor) in model.tensors.items()}
