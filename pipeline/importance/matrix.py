"""An importance matrix on disk: what it says of which tensors, read when it is asked for.

A matrix for every expert of a V4.1 model takes 0.8 GB, so only names and offsets are held.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import SourceError
from pipeline.gguf.header import MAGIC
from pipeline.importance.dat_form import read_dat
from pipeline.importance.entry import Entry
from pipeline.importance.gguf_form import chunks_of, datasets_of, gguf_entries, open_imatrix

F32 = NDArray[np.float32]

_FLOAT = np.dtype("<f4")
_MEASURE_AGAIN = "Measure it again, or take the file from where it came from once more."


class Form(StrEnum):
    """How a matrix is written."""

    GGUF = "gguf"
    DAT = "dat"


@dataclass(frozen=True)
class ImportanceMatrix:
    """The head of one file; ``datasets`` are the texts it was made with, as its maker named them.

    ``n_chunks``: pieces of text it was made with, where the file says so.
    """

    path: Path
    form: Form
    sha256: str
    entries: Mapping[str, Entry] = field(repr=False)
    datasets: tuple[str, ...]
    n_chunks: int | None
    stamp: tuple[int, int] | None = field(compare=False)
    """Length and time of last change, as the head was read."""

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors that it has entries of, as the engine called them, in file order."""
        return tuple(self.entries)

    @property
    def n_entries(self) -> int:
        """Number of tensors that it has entries of."""
        return len(self.entries)

    def shape_of(self, name: str) -> tuple[int, int] | None:
        """``(n_matrices, n_cols)`` of an entry as the file says it (see `Entry.shape`)."""
        entry = self.entries.get(name)
        return None if entry is None else entry.shape

    def values(self, name: str) -> F32:
        """The values of an entry: sums of squares, or means times calls.

        Returns:
            ``[n_matrices, n_cols]``, shaped as `shape_of` says.

        Raises:
            SourceError: There is a NaN, an infinity or a number below zero, all are zero, or the
                file cannot be read or is not what it was.
        """
        entry = self.entries[name]
        values = self._floats(entry.offset, entry.n_values)
        self._check(name, values, "a value that is no sum of squares")
        if not values.any():
            raise SourceError(
                "an entry of the importance matrix holds nothing but zeros",
                file=self.path,
                tensor=name,
                next_step=_MEASURE_AGAIN,
            )
        return values.reshape(entry.shape)

    def counts(self, name: str) -> F32 | None:
        """How many tokens each matrix of an entry saw; None in the form before GGUF.

        Returns:
            ``[n_matrices]``.

        Raises:
            SourceError: There is a NaN, an infinity or a number below zero, or the file cannot be
                read or is not what it was.
        """
        entry = self.entries[name]
        if not entry.n_counts:
            return None
        counts = self._floats(entry.counts_offset, entry.n_counts)
        self._check(name, counts, "a count that is no number of tokens")
        return counts

    def _floats(self, offset: int, n: int) -> F32:
        content = files.read_bytes(self.path, offset, n * _FLOAT.itemsize)
        if files.stamp(self.path) != self.stamp:
            raise SourceError(
                "the importance matrix has changed since it was opened",
                file=self.path,
                next_step="Run the same command again once nothing writes to it.",
            )
        return np.frombuffer(content, _FLOAT).astype(np.float32, copy=False)

    def _check(self, name: str, values: F32, what: str) -> None:
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if len(wrong):
            first, n_wrong = wrong[0], len(wrong)
            raise SourceError(
                f"the importance matrix holds {what}",
                file=self.path,
                tensor=name,
                expected="finite numbers from 0 on",
                found=f"{values[first]} at {first:,}; {n_wrong:,} of {len(values):,} are wrong",
                next_step=_MEASURE_AGAIN,
            )


def read_importance(path: Path) -> ImportanceMatrix:
    """The importance matrix at ``path``, in whichever form it is.

    Raises:
        SourceError: It is no importance matrix, cannot be read, or has no entries.
        FormatError: It is a damaged GGUF file.
    """
    stamp = files.stamp(path)
    entries: tuple[Entry, ...]
    if is_gguf(path):
        file = open_imatrix(path)
        form, entries = Form.GGUF, tuple(gguf_entries(file))
        datasets, n_chunks = datasets_of(file), chunks_of(file)
    else:
        dat = read_dat(path)
        form, entries, datasets, n_chunks = Form.DAT, dat.entries, dat.datasets, dat.n_chunks
    if not entries:
        raise SourceError("the importance matrix has no entries", file=path)
    by_name = {entry.name: entry for entry in entries}
    return ImportanceMatrix(path, form, _sha256(path, stamp), by_name, datasets, n_chunks, stamp)


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does.

    Raises:
        SourceError: It cannot be read.
    """
    with files.reading(path) as fd:
        head = bytearray(min(len(MAGIC), os.fstat(fd).st_size))
        files.read_exact(fd, memoryview(head), 0, path)
    return head == MAGIC


@lru_cache(maxsize=4)
def _sha256(path: Path, stamp: tuple[int, int] | None) -> str:
    # A file of 0.8 GB that is opened several times in a run is hashed once.
    del stamp
    return files.sha256_of(path)
