"""Importance matrices in the form before GGUF, which ik_llama.cpp still writes.

The number of entries; for each its name, a number of calls and its values; then whatever the
program added (llama.cpp ``tools/imatrix`` before pull request 9400: chunks and the name of the
text). Numbers are of 32 bits, little endian. The values of a stack lie expert by expert: means of
squares times the number of calls, which is one for the whole stack. An expert that saw no token has
ones for means; how many tokens the others saw is lost.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import SourceError
from pipeline.importance.entry import Entry

_MOST_ENTRIES = 1 << 16
_MOST_NAME_NBYTES = 1 << 10
_MOST = 2**31 - 1
VALUE_NBYTES = 4
FIRST_ENTRY = 4
"""Offset of the first entry, behind the number of entries."""


@dataclass(frozen=True, slots=True)
class DatFile:
    """Where everything lies.

    The first entry begins at `FIRST_ENTRY`; each ends with its values, where the next begins, or
    whatever follows the last.
    """

    entries: tuple[Entry, ...]
    nbytes: int
    n_chunks: int | None
    datasets: tuple[str, ...]


def read_dat(path: Path) -> DatFile:
    """Names, numbers and offsets of ``path``; no values.

    Raises:
        SourceError: It is not of this form, is cut short, or an entry stands twice.
    """
    entries: dict[str, Entry] = {}
    with files.reading(path) as fd:
        reader = _Reader(fd, path)
        for _ in range(reader.count("the number of entries", _MOST_ENTRIES)):
            name = reader.text()
            n_calls = reader.count("the number of calls", _MOST)
            n_values = reader.count(f"the number of values of {name}", _MOST)
            offset = reader.skip(n_values * VALUE_NBYTES, name)
            if name in entries:
                raise SourceError("an entry stands twice", file=path, tensor=name)
            entries[name] = Entry(name, n_values, offset, n_calls=max(n_calls, 1))
        n_chunks, datasets = _tail(reader)
    return DatFile(tuple(entries.values()), reader.nbytes, n_chunks, datasets)


def _tail(reader: _Reader) -> tuple[int | None, tuple[str, ...]]:
    """What llama.cpp and ik_llama.cpp add: chunks and a name. Others may add what they like."""
    try:
        n_chunks = reader.count("the number of chunks", _MOST)
    except SourceError:
        return None, ()
    try:
        dataset = reader.text()
    except SourceError:
        return n_chunks, ()
    return n_chunks, (dataset,) if dataset else ()


class _Reader:
    """A position in a file that may lie about its lengths."""

    def __init__(self, fd: int, path: Path) -> None:
        self.offset = 0
        self.nbytes = os.fstat(fd).st_size
        self._fd = fd
        self._path = path

    def count(self, what: str, most: int) -> int:
        """A number from 0 to ``most``."""
        (number,) = struct.unpack("<i", self._take(4, what))
        if not 0 <= number <= most:
            raise self._refusal(what, found=number)
        return int(number)

    def text(self) -> str:
        """A length and a name."""
        content = self._take(self.count("the length of a name", _MOST_NAME_NBYTES), "a name")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._refusal("a name", found=content[:40]) from None

    def skip(self, nbytes: int, what: str) -> int:
        """Pass over bytes that must be there; gives where they begin."""
        begin = self.offset
        if nbytes > self.nbytes - begin:
            raise self._refusal(what, found=f"{self.nbytes - begin:,} of {nbytes:,} bytes")
        self.offset += nbytes
        return begin

    def _take(self, nbytes: int, what: str) -> bytes:
        content = bytearray(nbytes)
        files.read_exact(self._fd, memoryview(content), self.skip(nbytes, what), self._path)
        return bytes(content)

    def _refusal(self, what: str, *, found: object) -> SourceError:
        return SourceError(
            f"this is no importance matrix, or a damaged one: {what} cannot be right",
            file=self._path,
            offset=self.offset,
            found=found,
        )
