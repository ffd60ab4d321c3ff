"""A file made of pieces of another: what stays, what is left out, and new bytes between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline import files

_STEP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of the input that stay."""

    offset: int
    nbytes: int


Piece = bytes | Kept
"""New bytes, or kept ones."""


def picked(offset: int, nbytes: int, n_entries: int, entries: Sequence[int]) -> Iterator[Kept]:
    """Some of ``n_entries`` entries of equal size that lie from ``offset`` on."""
    size = nbytes // n_entries
    return (Kept(offset + entry * size, size) for entry in entries)


def write_pieces(path: Path, pieces: Iterable[Piece], out: Path) -> None:
    """Put ``pieces`` of ``path`` under ``out``, one after the other, all at once.

    Raises:
        SourceError: ``path`` cannot be read.
        OutputError: ``out`` cannot be written.
    """
    files.make_folder(out.parent)
    part = out.with_name(f".{out.name}.part")
    with files.reading(path) as fd_in, files.sole_writing(part) as fd_out:
        at = 0
        for piece in pieces:
            for content in _contents(fd_in, path, piece):
                files.write_exact(fd_out, content, at, part)
                at += content.nbytes
        files.set_length(fd_out, at, part)
        files.sync(fd_out, part)
        files.rename(part, out)


def _contents(fd: int, path: Path, piece: Piece) -> Iterator[memoryview]:
    if isinstance(piece, bytes):
        yield memoryview(piece)
        return
    end = piece.offset + piece.nbytes
    for offset in range(piece.offset, end, _STEP_NBYTES):
        content = memoryview(bytearray(min(_STEP_NBYTES, end - offset)))
        files.read_exact(fd, content, offset, path)
        yield content
