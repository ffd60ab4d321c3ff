"""The journal of an unfinished download: which byte ranges are here for good.

One JSON line per range, appended after the range is durable. A torn last line is cut off; a
journal that is damaged in any other way, or that of other content, counts for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError
from pipeline.source.hub.ranges import Piece

JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """A piece that is durable, with the sha256 of the bytes that came for it."""

    offset: int
    nbytes: int
    sha256: str


def head_line(content: str) -> bytes:
    """First line: the format, and the identity of the content that is being fetched."""
    return _line({"journal": JOURNAL_VERSION, "content": content})


def record_line(piece: Piece, digest: str) -> bytes:
    """The line of a finished piece."""
    return _line(asdict(PieceRecord(piece.offset, piece.nbytes, digest)))


def read_journal(path: Path, content: str, nbytes: int) -> list[PieceRecord] | None:
    """The finished pieces of ``content``; None where the journal is missing or of no use.

    Raises:
        OutputError: A torn last line cannot be cut off.
    """
    try:
        text = files.read_bytes(path)
    except QuantmillError:
        return None
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        files.truncate(path, len(whole))
    lines = whole.splitlines(keepends=True)
    if not lines or lines[0] != head_line(content):
        return None
    try:
        return list(_records(lines[1:], content, nbytes))
    except (ValueError, RecursionError):
        return None


def _records(lines: list[bytes], content: str, nbytes: int) -> Iterator[PieceRecord]:
    for line in lines:
        if line == head_line(content):  # a second process began at the same time
            continue
        match json.loads(line):
            case {"offset": int(offset), "nbytes": int(length), "sha256": str(digest)}:
                if 0 <= offset < offset + length <= nbytes:
                    yield PieceRecord(offset, length, digest)
                    continue
        raise ValueError(line)


def _line(entry: dict[str, object]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"
