"""What a GGUF file says of itself: metadata and tensors, checked against the file's length.

Own reader because ``gguf.GGUFReader`` refuses ik types and sizes them wrongly, maps the whole
file, and accepts what ggml refuses. Rules after ggml ``src/gguf.cpp``; weights are never read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import FormatError, TypeRuleError
from pipeline.files import reading
from pipeline.gguf.cursor import Cursor
from pipeline.gguf.header import (
    ALIGNMENT,
    ALIGNMENT_KEY,
    MAGIC,
    MAX_DIMS,
    MAX_ELEMENTS,
    MAX_KEY_NBYTES,
    MAX_NAME_NBYTES,
    VERSION,
    TensorInfo,
    padded,
)
from pipeline.gguf.keys import KeyValue, ValueType
from pipeline.quant.types import TYPES_BY_ID, GgmlType

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
"""A V4.1 file holds 1046 tensors; no model with stacked experts comes near this."""

_READABLE_VERSIONS = (2, VERSION)
"""Version 1 had 32-bit lengths; 2 and 3 differ only in that 3 may be big endian."""

_AMBIGUOUS_ID = 43
"""F8_E4M3 in ggml; forks store MXFP8 (33 bytes per 32 weights) and STQ1_0 under the same id."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor; ``offset`` counts from the start of the file."""

    name: str
    ne: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions in numpy order."""
        return self.ne[::-1]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file; ``tensors`` stand in the order of their data."""

    path: Path
    nbytes: int
    version: int
    key_values: Mapping[str, KeyValue]
    tensors: Mapping[str, GgufTensor]
    data_offset: int
    alignment: int
    modified_ns: int | None = field(default=None, compare=False)
    """When the file was last changed, as its header was read."""


@dataclass(frozen=True, slots=True)
class RawHeader:
    """What the header of a file says, before it is held against the types and the file's length.

    ``nbytes`` counts the header itself, without the padding behind it.
    """

    path: Path
    file_nbytes: int
    nbytes: int
    version: int
    key_values: Mapping[str, KeyValue]
    infos: tuple[TensorInfo, ...]
    alignment: int
    modified_ns: int

    @property
    def data_offset(self) -> int:
        """Where the data of the first tensor begins."""
        return padded(self.nbytes, self.alignment)


def read_header(path: Path) -> RawHeader:
    """The header of ``path`` as it stands: for files that `read_gguf` refuses, too.

    Raises:
        FormatError: The header itself breaks the format.
        SourceError: The file cannot be opened or read.
    """
    with reading(path) as fd:
        # Before the header: a file that changes while it is read must not look settled.
        modified_ns = os.fstat(fd).st_mtime_ns
        cursor = Cursor(fd, path)
        version, n_tensors, n_keys = _counts(cursor)
        key_values = _key_values(cursor, n_keys)
        alignment = _alignment(cursor, key_values)
        infos = tuple(_info(cursor) for _ in range(n_tensors))
    return RawHeader(
        path=path,
        file_nbytes=cursor.file_nbytes,
        nbytes=cursor.offset,
        version=version,
        key_values=key_values,
        infos=infos,
        alignment=alignment,
        modified_ns=modified_ns,
    )


def read_gguf(path: Path) -> GgufFile:
    """The checked header of ``path``.

    Raises:
        FormatError: The header breaks the format, or does not fit the length of the file.
        SourceError: The file cannot be opened or read.
    """
    header = read_header(path)
    tensors = tuple(_tensor(path, info, header.data_offset) for info in header.infos)
    _check_names(path, tensors)
    _check_layout(path, tensors, header.data_offset, header.alignment)
    ends = (header.nbytes, header.data_offset, header.file_nbytes)
    _check_end(path, tensors, ends, header.alignment)
    return GgufFile(
        path=path,
        nbytes=header.file_nbytes,
        version=header.version,
        key_values=header.key_values,
        tensors={tensor.name: tensor for tensor in tensors},
        data_offset=header.data_offset,
        alignment=header.alignment,
        modified_ns=header.modified_ns,
    )


def _counts(cursor: Cursor) -> tuple[int, int, int]:
    magic = cursor.take(4, "the magic bytes")
    if magic != MAGIC:
        cursor.refuse("not a GGUF file", expected=MAGIC, found=magic)
    version = cursor.u32("the version")
    if version not in _READABLE_VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _READABLE_VERSIONS
        what = "big-endian GGUF is not read" if is_swapped else "this GGUF version is not read"
        cursor.refuse(what, expected="version 2 or 3", found=version)
    n_tensors, n_keys = cursor.u64("the tensor count"), cursor.u64("the key count")
    for what, count, most in (("tensor", n_tensors, MAX_TENSORS), ("key", n_keys, MAX_KEYS)):
        if count > most:
            cursor.refuse(f"the {what} count is absurd", expected=f"<= {most:,}", found=count)
    return version, n_tensors, n_keys


def _key_values(cursor: Cursor, n_keys: int) -> dict[str, KeyValue]:
    found: dict[str, KeyValue] = {}
    for _ in range(n_keys):
        entry = _entry(cursor)
        if entry.key in found:
            cursor.refuse("a metadata key stands twice", found=entry.key)
        found[entry.key] = entry
    return found


def _entry(cursor: Cursor) -> KeyValue:
    key = cursor.string("a metadata key")
    if not 0 < len(key.encode()) <= MAX_KEY_NBYTES:
        cursor.refuse("a metadata key is empty or too long", found=key[:80])
    kind = _value_type(cursor, key)
    if kind is not ValueType.ARRAY:
        return KeyValue(key, kind, cursor.scalar(kind, key))
    element = _value_type(cursor, key)
    if element is ValueType.ARRAY:
        cursor.refuse(f"{key} is an array of arrays, which no loader reads")
    return KeyValue(key, kind, cursor.array(element, key), element)


def _value_type(cursor: Cursor, key: str) -> ValueType:
    number = cursor.u32(f"the type of {key}")
    if number > max(ValueType):
        cursor.refuse(f"{key} has an unknown value type", expected="0 to 12", found=number)
    return ValueType(number)


def _alignment(cursor: Cursor, key_values: Mapping[str, KeyValue]) -> int:
    entry = key_values.get(ALIGNMENT_KEY)
    if entry is None:
        return ALIGNMENT
    value = entry.value
    if entry.type is not ValueType.UINT32 or not isinstance(value, int) or value.bit_count() != 1:
        cursor.refuse(f"{ALIGNMENT_KEY} is not a power of two in UINT32", found=value)
    return value


def _info(cursor: Cursor) -> TensorInfo:
    name = cursor.string("a tensor name")
    if not 0 < len(name.encode()) <= MAX_NAME_NBYTES:
        cursor.refuse(
            "a tensor name is empty or too long for ggml",
            expected=f"1 to {MAX_NAME_NBYTES} bytes",
            found=name[:80],
        )
    n_dims = cursor.u32(f"the dimensions of {name}")
    if not 0 < n_dims <= MAX_DIMS:
        cursor.refuse(f"{name} has {n_dims:,} dimensions", expected=f"1 to {MAX_DIMS}")
    ne = tuple(cursor.u64(f"the dimensions of {name}") for _ in range(n_dims))
    # A product of Python ints does not wrap, unlike the one in a reader written in C.
    if min(ne) < 1 or math.prod(ne) > MAX_ELEMENTS:
        cursor.refuse(f"{name} has an impossible shape", expected="1 to 2^63 - 1 weights", found=ne)
    return TensorInfo(name, ne, cursor.u32(f"the type of {name}"), cursor.u64("an offset"))


def _tensor(path: Path, info: TensorInfo, data_offset: int) -> GgufTensor:
    ggml_type = TYPES_BY_ID.get(info.type_id)
    if ggml_type is None:
        raise FormatError(
            "the tensor has a type this version does not know",
            file=path,
            tensor=info.name,
            found=f"type id {info.type_id}",
            next_step="Ids 202 to 399 are ik's repacked types: use the file they were made from."
            if 202 <= info.type_id <= 399
            else None,
        )
    try:
        row_nbytes = ggml_type.row_nbytes(info.ne[0])
    except TypeRuleError as error:
        raise FormatError(
            error.what, file=path, tensor=info.name, expected=error.expected, found=error.found
        ) from error
    nbytes = row_nbytes * math.prod(info.ne[1:])
    return GgufTensor(info.name, info.ne, ggml_type, data_offset + info.offset, nbytes)


def _check_names(path: Path, tensors: Sequence[GgufTensor]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise FormatError("a tensor name stands twice", file=path, tensor=tensor.name)
        seen.add(tensor.name)


def _check_layout(
    path: Path, tensors: Sequence[GgufTensor], data_offset: int, alignment: int
) -> None:
    """Each tensor begins where the padded one before it ends, as ggml demands."""
    expected = data_offset
    for before, tensor in zip((None, *tensors), tensors, strict=False):
        if tensor.offset != expected:
            closer = "overlaps" if tensor.offset < expected else "leaves a hole after"
            what = f"the tensor {closer} the one before it"
            raise FormatError(
                what if before else "the first tensor is not at the start of the data",
                file=path,
                tensor=tensor.name,
                expected=f"offset {expected:,}",
                found=f"offset {tensor.offset:,}",
                next_step=_doubt(before),
            )
        expected = padded(tensor.offset + tensor.nbytes, alignment)


def _check_end(
    path: Path, tensors: Sequence[GgufTensor], ends: tuple[int, int, int], alignment: int
) -> None:
    """The file ends with the last tensor (or the header), padded or not."""
    header_end, data_offset, file_nbytes = ends
    last = tensors[-1] if tensors else None
    least = last.offset + last.nbytes if last else header_end
    most = padded(least, alignment) if last else data_offset
    if not least <= file_nbytes <= most:
        raise FormatError(
            "the file is cut short" if file_nbytes < least else "bytes follow the last tensor",
            file=path,
            tensor=last.name if last else None,
            expected=f"{most:,} bytes",
            found=f"{file_nbytes:,} bytes",
            next_step=_doubt(last),
        )


def _doubt(tensor: GgufTensor | None) -> str | None:
    if tensor is None or tensor.type.type_id != _AMBIGUOUS_ID:
        return None
    return (
        f"{tensor.name} has type id {_AMBIGUOUS_ID} but not the 1 byte a weight of F8_E4M3: "
        "a fork stored another type under this id, which is not read."
    )
