"""The journal of an unfinished shard: which row blocks are whole, and what their bytes hash to.

One JSON line per block, appended after the block's bytes are durable. A torn last line (the
machine stopped while it was written) is cut off when the journal is opened again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import files
from pipeline.errors import OutputError

JOURNAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One finished row block: ``offset`` is absolute in the shard file."""

    offset: int
    nbytes: int
    sha256: str


def read_journal(path: Path, spec: str) -> dict[int, BlockRecord]:
    """The finished blocks by offset; a missing journal has none.

    Raises:
        OutputError: The journal belongs to another spec, or a line that is not the last is torn.
    """
    if not path.exists():
        return {}
    content = files.read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        files.truncate(path, len(whole))
    lines = whole.splitlines()
    if not lines:
        return {}
    _check_head(path, lines[0], spec)
    return {record.offset: record for record in _records(path, lines[1:])}


def head_line(spec: str) -> bytes:
    """First line of a journal: its format version and the spec of the shard it belongs to."""
    return _line({"journal": JOURNAL_VERSION, "spec": spec})


def record_lines(records: Iterable[BlockRecord]) -> bytes:
    """The lines that ``records`` become."""
    return b"".join(_line(asdict(record)) for record in records)


def _line(entry: Mapping[str, object]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _check_head(path: Path, line: bytes, spec: str) -> None:
    try:
        head = json.loads(line)
        found = (head["journal"], head["spec"])
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if found != (JOURNAL_VERSION, spec):
        raise OutputError(
            "this unfinished shard belongs to another spec",
            file=path,
            expected=(JOURNAL_VERSION, spec),
            found=found,
            next_step="Delete the part and its journal, or choose another output folder.",
        )


def _records(path: Path, lines: Iterable[bytes]) -> Iterable[BlockRecord]:
    for line in lines:
        try:
            entry = json.loads(line)
            if "journal" not in entry:  # a second worker on this shard writes a head of its own
                yield BlockRecord(**entry)
        except (ValueError, TypeError) as error:
            raise _damaged(path) from error


def _damaged(path: Path) -> OutputError:
    return OutputError(
        "the journal is damaged",
        file=path,
        next_step="Delete it and the part beside it; the shard is then made again.",
    )
