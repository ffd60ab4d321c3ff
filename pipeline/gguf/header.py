"""The head of a GGUF file as bytes: magic, metadata, tensor infos, padding.

Layout: GGUF specification (ggml/docs/gguf.md), version 3, little endian. Written with own struct
code because value types are said exactly here and ik type ids have no place in ``gguf``'s enum;
what ggml would refuse or misread when it loads the file is refused here.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, Scalar, ValueType, text

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
"""Alignment of tensor data where ``general.alignment`` is absent, as it is in all we write."""

ALIGNMENT_KEY = "general.alignment"
FILLER_KEY = "quantmill.header_pad"
MAX_NAME_NBYTES = 63
"""ggml keeps tensor names in 64 bytes with a closing zero (``GGML_MAX_NAME``)."""

MAX_KEY_NBYTES = 65535
MAX_DIMS = 4
MAX_ELEMENTS = 2**63 - 1
"""ggml counts elements and bytes in int64."""

CODES = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}
"""`struct` codes of the value types of fixed size."""

_FLOATS = (ValueType.FLOAT32, ValueType.FLOAT64)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of one tensor; ``offset`` counts from the start of the data region."""

    name: str
    ne: tuple[int, ...]
    type_id: int
    offset: int


def padded(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """``nbytes`` rounded up to where the next tensor may begin."""
    return -(-nbytes // alignment) * alignment


def encode_header(key_values: Sequence[KeyValue], infos: Sequence[TensorInfo]) -> bytes:
    """The bytes in front of the data region, padded with zeros to the alignment.

    Raises:
        FormatError: A key or tensor that no loader would accept, named.
    """
    return _assemble(_encode_key_values(key_values), len(key_values), _encode_infos(infos), infos)


def encode_padded_header(
    key_values: Sequence[KeyValue],
    infos: Sequence[TensorInfo],
    *,
    page: int = 4096,
    filler_key: str = FILLER_KEY,
) -> bytes:
    """A header whose length is a multiple of ``page``, made so by one more string entry.

    ``page`` is a multiple of the alignment. Loaders ignore keys they do not know.

    Raises:
        FormatError: As `encode_header`.
    """
    encoded, tensor_part = _encode_key_values(key_values), _encode_infos(infos)
    if any(entry.key == filler_key for entry in key_values):
        raise FormatError("the filler key is taken", found=filler_key)
    bare = _head_nbytes(encoded, tensor_part) + len(_entry(text(filler_key, "")))
    filler = _entry(text(filler_key, " " * (-bare % page)))
    return _assemble(encoded + filler, len(key_values) + 1, tensor_part, infos)


def padded_header_nbytes(
    key_values: Sequence[KeyValue],
    infos: Sequence[TensorInfo],
    *,
    page: int = 4096,
    filler_key: str = FILLER_KEY,
) -> int:
    """Length of `encode_padded_header` for the same arguments, without building or checking it."""
    nbytes = 24 + sum(map(_entry_nbytes, [*key_values, text(filler_key, "")]))
    nbytes += sum(24 + len(info.name.encode()) + 8 * len(info.ne) for info in infos)
    return -(-nbytes // page) * page


def _assemble(
    encoded: bytes, n_keys: int, tensor_part: bytes, infos: Sequence[TensorInfo]
) -> bytes:
    head = MAGIC + struct.pack("<IQQ", VERSION, len(infos), n_keys)
    padding = bytes(-_head_nbytes(encoded, tensor_part) % ALIGNMENT)
    return b"".join((head, encoded, tensor_part, padding))


def _head_nbytes(encoded: bytes, tensor_part: bytes) -> int:
    return 24 + len(encoded) + len(tensor_part)


def _encode_key_values(key_values: Sequence[KeyValue]) -> bytes:
    _refuse_duplicates("metadata key", (entry.key for entry in key_values))
    return b"".join(map(_entry, key_values))


def _entry(entry: KeyValue) -> bytes:
    try:
        return _key(entry.key) + struct.pack("<I", entry.type) + _value(entry)
    except (struct.error, OverflowError, TypeError) as error:
        kind = entry.type.name if entry.element is None else f"array of {entry.element.name}"
        raise FormatError(
            f"the value of {entry.key} does not fit its type", expected=kind, found=str(error)
        ) from error
    except UnicodeEncodeError as error:
        raise FormatError(f"{entry.key} holds text that is not Unicode", found=error.reason) from (
            error
        )


def _key(key: str) -> bytes:
    if not 0 < len(key.encode()) <= MAX_KEY_NBYTES:
        raise FormatError("a metadata key is empty or too long", found=key[:80])
    return _string(key)


def _value(entry: KeyValue) -> bytes:
    is_array = entry.type is ValueType.ARRAY
    if is_array is not isinstance(entry.value, tuple) or is_array is (entry.element is None):
        raise TypeError(type(entry.value).__name__)
    if entry.key == ALIGNMENT_KEY and entry.value != ALIGNMENT:
        raise FormatError(
            "only one alignment is written", expected=ALIGNMENT, found=str(entry.value)
        )
    if isinstance(entry.value, tuple):
        assert entry.element is not None
        return _array(entry.key, entry.element, entry.value)
    return _elements(entry.type, (entry.value,))


def _array(key: str, element: ValueType, values: tuple[Scalar, ...]) -> bytes:
    # gguf-py leaves an empty list out without a word, and llama.cpp cannot tell its type.
    if not values:
        raise FormatError(f"{key} is an empty array", next_step="Leave the key out.")
    return struct.pack("<IQ", element, len(values)) + _elements(element, values)


def _elements(element: ValueType, values: tuple[Scalar, ...]) -> bytes:
    kinds = set(map(type, values))
    if element is ValueType.STRING and kinds <= {str}:
        return b"".join(map(_string, values))  # type: ignore[arg-type]
    if element is ValueType.BOOL:
        fits = kinds <= {bool}
    else:
        fits = not kinds & {bool, str} and (element in _FLOATS or float not in kinds)
    if not fits or element not in CODES:
        raise TypeError(", ".join(sorted(kind.__name__ for kind in kinds)))
    return struct.pack(f"<{len(values)}{CODES[element]}", *values)


def _string(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _entry_nbytes(entry: KeyValue) -> int:
    values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    element = entry.element or entry.type
    nbytes = 8 + len(entry.key.encode()) + 4 + (12 if entry.element is not None else 0)
    if element is ValueType.STRING:
        return nbytes + 8 * len(values) + sum(len(str(value).encode()) for value in values)
    return nbytes + struct.calcsize(CODES[element]) * len(values)


def _encode_infos(infos: Sequence[TensorInfo]) -> bytes:
    _refuse_duplicates("tensor name", (info.name for info in infos))
    return b"".join(map(_info, infos))


def _info(info: TensorInfo) -> bytes:
    name = info.name.encode("utf-8", "replace")
    rules = {
        f"a tensor name has 1 to {MAX_NAME_NBYTES} bytes": 0 < len(name) <= MAX_NAME_NBYTES,
        "a tensor name is Unicode": name.decode() == info.name,
        f"a tensor has 1 to {MAX_DIMS} dimensions": 0 < len(info.ne) <= MAX_DIMS,
        "every dimension is positive": all(n > 0 for n in info.ne),
        "a tensor has less than 2^63 elements": math.prod(info.ne) <= MAX_ELEMENTS,
        "a type id is an unsigned 32-bit number": 0 <= info.type_id < 2**32,
        f"an offset is a multiple of {ALIGNMENT} below 2^63": info.offset % ALIGNMENT == 0
        and 0 <= info.offset <= MAX_ELEMENTS,
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise FormatError(broken[0], tensor=info.name, found=f"{info.ne}, offset {info.offset}")
    ne = struct.pack(f"<I{len(info.ne)}Q", len(info.ne), *info.ne)
    return _string(info.name) + ne + struct.pack("<IQ", info.type_id, info.offset)


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FormatError(f"a {what} stands twice", found=name)
        seen.add(name)
