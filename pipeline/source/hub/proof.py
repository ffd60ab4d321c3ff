"""Notes on what a file was found to be, so that it is not read again while it stays untouched."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError
from pipeline.source.json_object import read_json_object

_DAMAGED = "damaged "


@dataclass(frozen=True, slots=True)
class Proof:
    """What ``content`` a file of that size and modification time has been found to hold."""

    nbytes: int
    modified_ns: int
    content: str


def proof_beside(target: Path) -> Path:
    """Where the note on a file of our own lies: beside it, hidden."""
    return target.with_name(f".{target.name}.proof")


def proved(path: Path, note: Path) -> str | None:
    """The content that ``path`` is known to hold; None when unknown or changed since."""
    try:
        entry, _ = read_json_object(note)
        stat = path.stat()
    except (QuantmillError, OSError):
        return None
    match entry:
        case {"nbytes": stat.st_size, "modified_ns": stat.st_mtime_ns, "content": str(content)}:
            return content
    return None


def prove(path: Path, note: Path, content: str) -> None:
    """Remember what ``path`` holds as it is now.

    Raises:
        OutputError: The note cannot be written.
    """
    stat = path.stat()
    text = json.dumps(asdict(Proof(stat.st_size, stat.st_mtime_ns, content)))
    files.write_whole(note, text.encode() + b"\n")


def not_content(identity: str) -> str:
    """How a note says that a file is not what it should be."""
    return _DAMAGED + identity
