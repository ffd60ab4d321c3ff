"""The journal of an unfinished shard: which row blocks are whole, and what their bytes hash to.

One JSON line per block, appended after the block's bytes are durable. A torn last line (the
machine stopped while it was written) is cut off when the journal is opened again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import OutputError, QuantmillError

JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One finished row block: ``offset`` is absolute in the shard file."""

    offset: int
    nbytes: int
    sha256: str


def read_journal(path: Path, spec: str, *, mend: bool = True) -> dict[int, BlockRecord]:
    """The finished blocks by offset; a missing journal has none.

    Args:
        path: The journal.
        spec: The shard it must belong to.
        mend: Cut off a torn last line. Not for onlookers: a writer may be in the middle of it.

    Raises:
        OutputError: The journal belongs to another spec, or a line that is not the last is torn.
    """
    try:
        content = files.read_bytes(path)
        whole = content[: content.rfind(b"\n") + 1]
        if mend and len(whole) < len(content):
            files.truncate(path, len(whole))
    except QuantmillError as error:
        if files.is_gone(error):  # never there, or another worker has just finished the shard
            return {}
        raise
    lines = whole.splitlines()
    if lines and "journal" not in _entry(path, lines[0]):
        raise _damaged(path)
    return {record.offset: record for record in _records(path, lines, spec)}


def head_line(spec: str) -> bytes:
    """First line of a journal: its format version and the spec of the shard it belongs to."""
    return _line({"journal": JOURNAL_VERSION, "spec": spec})


def record_lines(records: Iterable[BlockRecord]) -> bytes:
    """The lines that ``records`` become."""
    return b"".join(_line(asdict(record)) for record in records)


def _line(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _records(path: Path, lines: Iterable[bytes], spec: str) -> Iterator[BlockRecord]:
    for line in lines:
        entry = _entry(path, line)
        if "journal" in entry:  # each worker writes a head of its own
            _check_head(path, entry, spec)
        else:
            yield _record(path, entry)


def _entry(path: Path, line: bytes) -> dict[str, object]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(entry, dict):
        raise _damaged(path)
    return entry


def _check_head(path: Path, entry: Mapping[str, object], spec: str) -> None:
    found = (entry["journal"], entry.get("spec"))
    if found != (JOURNAL_VERSION, spec):
        raise OutputError(
            "this unfinished shard belongs to another spec",
            file=path,
            expected=f"{spec} (journal version {JOURNAL_VERSION})",
            found=f"{found[1]} (journal version {found[0]})",
            next_step="Delete the part and its journal, or choose another output folder.",
        )


def _record(path: Path, entry: Mapping[str, object]) -> BlockRecord:
    match entry:
        case {"offset": int(offset), "nbytes": int(nbytes), "sha256": str(digest)}:
            if offset >= 0 and nbytes > 0:
                return BlockRecord(offset, nbytes, digest)
    raise _damaged(path)


def _damaged(path: Path) -> OutputError:
    return OutputError(
        "the journal is damaged",
        file=path,
        next_step="Delete it and the part beside it; the shard is then made again.",
    )
