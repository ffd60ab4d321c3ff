"""GGUF metadata: keys with their exact value types.

Loaders check types, not only names (an i32 where a u64 array is asked for fails to load), so a
type is always said and never guessed from the Python value. Type numbers: GGUF specification,
ggml/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

Scalar = int | float | bool | str


class ValueType(IntEnum):
    """GGUF metadata value types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One metadata entry; ``element`` is set exactly when ``type`` is ``ARRAY``."""

    key: str
    type: ValueType
    value: Scalar | tuple[Scalar, ...]
    element: ValueType | None = None


def u16(key: str, value: int) -> KeyValue:
    """A 16-bit unsigned entry."""
    return KeyValue(key, ValueType.UINT16, value)


def u32(key: str, value: int) -> KeyValue:
    """A 32-bit unsigned entry."""
    return KeyValue(key, ValueType.UINT32, value)


def i32(key: str, value: int) -> KeyValue:
    """A 32-bit signed entry."""
    return KeyValue(key, ValueType.INT32, value)


def f32(key: str, value: float) -> KeyValue:
    """A 32-bit float entry."""
    return KeyValue(key, ValueType.FLOAT32, float(value))


def flag(key: str, value: bool) -> KeyValue:
    """A boolean entry."""
    return KeyValue(key, ValueType.BOOL, value)


def text(key: str, value: str) -> KeyValue:
    """A string entry."""
    return KeyValue(key, ValueType.STRING, value)


def array(key: str, element: ValueType, values: Sequence[Scalar]) -> KeyValue:
    """An array entry whose elements are stored as ``element``."""
    return KeyValue(key, ValueType.ARRAY, tuple(values), element)
