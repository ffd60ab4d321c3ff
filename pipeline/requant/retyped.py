"""Integers of a file's metadata in the types that loaders ask for."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.gguf.keys import KeyValue, Scalar, ValueType
from pipeline.model.metadata.required import KeyType

_RANGES: Mapping[ValueType, range] = {
    ValueType.UINT32: range(1 << 32),
    ValueType.INT32: range(-(1 << 31), 1 << 31),
    ValueType.UINT64: range(1 << 64),
}
"""The integer types that keys are asked for in, and what each can hold."""


def is_of(entry: KeyValue, wanted: KeyType) -> bool:
    """Whether ``entry`` has the type ``wanted``."""
    return (entry.type, entry.element) == wanted


def retyped(entry: KeyValue, wanted: KeyType) -> KeyValue | None:
    """``entry`` in the type ``wanted``; nothing where it holds no integers, or some do not fit."""
    kind, element = wanted
    values = entry.value if isinstance(entry.value, tuple) else (entry.value,)
    if isinstance(entry.value, tuple) is not (kind is ValueType.ARRAY):
        return None
    room = _RANGES.get(kind if element is None else element)
    if room is None or not all(_is_in(value, room) for value in values):
        return None
    return KeyValue(entry.key, kind, entry.value, element)


def _is_in(value: Scalar, room: range) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value in room
