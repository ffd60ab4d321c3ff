"""Typed reading of the metadata of a finished file, where a key may be missing or of any type."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue, Scalar
from pipeline.model.form import Architecture


class HeaderKeys:
    """Values of one model's metadata by key, written without the architecture before it.

    Integers are integers here, whatever width stores them.
    """

    def __init__(self, entries: Mapping[str, KeyValue], architecture: Architecture) -> None:
        self._entries = entries
        self._architecture = architecture

    def full(self, name: str) -> str:
        """The whole key: ``block_count`` is ``deepseek4.block_count``, or the like."""
        return f"{self._architecture}.{name}"

    def find(self, name: str) -> Scalar | tuple[Scalar, ...] | None:
        """Whatever stands under ``name``, or nothing."""
        entry = self._entries.get(self.full(name))
        return None if entry is None else entry.value

    def find_number(self, *names: str) -> int | None:
        """The integer under the first of ``names`` that holds one, or nothing."""
        for name in names:
            value = self.find(name)
            if isinstance(value, int) and _is_int(value):
                return value
        return None

    def find_numbers(self, *names: str) -> tuple[int, ...] | None:
        """The integers under the first of ``names`` that holds an array of them, or nothing."""
        for name in names:
            found = self.find(name)
            if isinstance(found, tuple):
                values = tuple(value for value in found if isinstance(value, int))
                if len(values) == len(found) and all(map(_is_int, values)):
                    return values
        return None

    def number(self, *names: str) -> int:
        """The integer under the first of ``names`` that holds one.

        Raises:
            FormatError: None of them does.
        """
        value = self.find_number(*names)
        if value is None:
            raise self._lacks("an integer", names)
        return value

    def numbers(self, *names: str) -> tuple[int, ...]:
        """The integers under the first of ``names`` that holds an array of them.

        Raises:
            FormatError: None of them does.
        """
        values = self.find_numbers(*names)
        if values is None:
            raise self._lacks("an array of integers", names)
        return values

    def _lacks(self, kind: str, names: tuple[str, ...]) -> FormatError:
        wanted = f"{kind} under {' or '.join(map(self.full, names))}"
        return FormatError("the file lacks a key", expected=wanted)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
