"""Typed reading of the metadata of a finished file, where a key may be missing or of any type."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import FormatError
from pipeline.gguf.keys import KeyValue

PREFIX = "deepseek41."


class HeaderKeys:
    """Numbers of one model's metadata by key, written without `PREFIX`.

    Integers are integers here, whatever width stores them.
    """

    def __init__(self, entries: Mapping[str, KeyValue]) -> None:
        self._entries = entries

    def find_number(self, *names: str) -> int | None:
        """The integer under the first of ``names`` that holds one, or nothing."""
        for name in names:
            entry = self._entries.get(PREFIX + name)
            if entry is not None and _is_int(entry.value):
                assert isinstance(entry.value, int)
                return entry.value
        return None

    def find_numbers(self, *names: str) -> tuple[int, ...] | None:
        """The integers under the first of ``names`` that holds an array of them, or nothing."""
        for name in names:
            entry = self._entries.get(PREFIX + name)
            if entry is not None and isinstance(entry.value, tuple):
                values = tuple(value for value in entry.value if isinstance(value, int))
                if len(values) == len(entry.value) and all(map(_is_int, values)):
                    return values
        return None

    def number(self, *names: str) -> int:
        """The integer under the first of ``names`` that holds one.

        Raises:
            FormatError: None of them does.
        """
        value = self.find_number(*names)
        if value is None:
            raise _lacks("an integer", names)
        return value

    def numbers(self, *names: str) -> tuple[int, ...]:
        """The integers under the first of ``names`` that holds an array of them.

        Raises:
            FormatError: None of them does.
        """
        values = self.find_numbers(*names)
        if values is None:
            raise _lacks("an array of integers", names)
        return values


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lacks(kind: str, names: tuple[str, ...]) -> FormatError:
    return FormatError(
        "the file lacks a key", expected=f"{kind} under {' or '.join(PREFIX + n for n in names)}"
    )
