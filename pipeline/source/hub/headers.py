"""A checkpoint without its weights: small files whole, and of every shard the header over a hole.

`pipeline.source.checkpoint.open_checkpoint` reads the folder like any other, so everything that
headers decide is known before the first big byte is fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pipeline import files
from pipeline.errors import SourceError
from pipeline.source.checkpoint import CONFIG_NAME
from pipeline.source.header import read_source_file
from pipeline.source.hub.content import identity
from pipeline.source.hub.crew import Crew
from pipeline.source.hub.events import QUIET, FetchEvents
from pipeline.source.hub.fetch import HABITS, FetchHabits, fetch_file
from pipeline.source.hub.proof import proof_beside, prove, proved
from pipeline.source.hub.ranges import Line, Piece, read_piece
from pipeline.source.hub.remote import Remote
from pipeline.source.hub.snapshot import HubFile, HubSnapshot
from pipeline.source.index import INDEX_NAME, read_index
from pipeline.source.json_object import MAX_JSON_NBYTES, shown
from pipeline.source.lfs_pointer import refuse_lfs_pointer
from pipeline.source.scope import WHOLE, Scope

SMALL_FILES = (
    CONFIG_NAME,
    INDEX_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is fetched whole of those that the snapshot has."""

_SHARD = ".safetensors"
_FIRST_NBYTES = 1 << 18
"""Asked for first; the header of a released layer (258,144 bytes) lies in it."""
_LENGTH_NBYTES = 8
_HOLLOW = "header of "
_UNFINISHED = ".unfinished"


def fetch_headers(
    remote: Remote,
    snapshot: HubSnapshot,
    folder: Path,
    *,
    scope: Scope = WHOLE,
    n_connections: int = 8,
    events: FetchEvents = QUIET,
    habits: FetchHabits = HABITS,
) -> None:
    """Make ``folder`` a checkpoint that can be planned with: true sizes, headers, no weights.

    What is there already, hollow or whole, is left alone; a second run asks for nothing.

    Args:
        remote: Where the bytes come from.
        snapshot: The release.
        folder: Where to.
        scope: Which tensors are looked at: only shards that hold them, as the index says, are
            asked for. Without an index every shard is.
        n_connections: How many files are fetched at the same time.
        events: Told what happens; the bytes are those that really come.
        habits: Sizes and patience.

    Raises:
        SourceError: No config.json or no shard in the snapshot, the remote refuses, or what it
            sends for a shard is no safetensors header (a pointer, an error page, a cut header).
        OutputError: The folder cannot be written.
    """
    shards = [name for name in snapshot.files if _is_shard(name)]
    small = [snapshot.files[name] for name in SMALL_FILES if name in snapshot.files]
    if CONFIG_NAME not in snapshot.files or not shards:
        raise SourceError(
            "the repository holds no safetensors checkpoint",
            file=str(snapshot),
            expected=f"{CONFIG_NAME} and files that end in {_SHARD} at its root",
            next_step="Name the repository of the original weights.",
        )
    line = Line(remote, small[0], habits.patience, habits.clock, None, events, threading.Event())
    assert line.stopped is not None

    def fetch(file: HubFile) -> None:
        if _is_shard(file.name):
            _fetch_header(replace(line, file=file), folder / file.name)
        else:
            fetch_file(
                remote, file, folder / file.name, n_connections=1, events=events, habits=habits
            )

    Crew(fetch, line.stopped).run(small, n_connections)
    needed = _needed(shards, folder, scope)
    Crew(fetch, line.stopped).run([snapshot.files[name] for name in needed], n_connections)
    files.remove_folder(folder / _UNFINISHED)


def _needed(shards: Sequence[str], folder: Path, scope: Scope) -> Sequence[str]:
    index = read_index(folder) if scope.only else None
    if index is None:
        return shards
    named = set(index.of(scope).values())
    return [name for name in shards if name in named]


def _is_shard(name: str) -> bool:
    return name.endswith(_SHARD) and PurePosixPath(name).name == name and not name.startswith(".")


def _fetch_header(line: Line, target: Path) -> None:
    file = line.file
    if target.is_file() and target.stat().st_size == file.nbytes:
        known = proved(target, proof_beside(target))
        if known is None or known in (identity(file), _HOLLOW + identity(file)):
            return
    # Under its own name in a folder of its own, so that a message about it names the shard.
    unfinished = target.parent / _UNFINISHED / target.name
    files.make_folder(unfinished.parent)
    files.remove(unfinished)
    with files.writing(unfinished, create=True) as fd:
        files.write_exact(fd, memoryview(_header(line)), 0, unfinished)
        files.set_length(fd, file.nbytes, unfinished)
        files.sync(fd, unfinished)
    read_source_file(unfinished)
    files.rename(unfinished, target)
    prove(target, proof_beside(target), _HOLLOW + identity(file))


def _header(line: Line) -> bytes:
    """The length field and the header; whatever the remote sends in their place is named."""
    where = Path(line.remote.where(line.file))
    first = _read(line, Piece(0, min(_FIRST_NBYTES, line.file.nbytes)))
    refuse_lfs_pointer(first, where)
    if first.lstrip()[:1] == b"<":
        raise SourceError(
            "the server sent a web page in place of the file",
            file=where,
            found=shown(first[:60].decode("ascii", "replace")),
            next_step="Check HF_ENDPOINT, and that no login page stands before the network.",
        )
    length = int.from_bytes(first[:_LENGTH_NBYTES], "little")
    if length > min(MAX_JSON_NBYTES, line.file.nbytes - _LENGTH_NBYTES):
        raise SourceError(
            "the file does not begin like a safetensors file: its header length is too large",
            file=where,
            expected=f"at most {MAX_JSON_NBYTES:,} bytes, in a file of {line.file.nbytes:,} bytes",
            found=f"{length:,} bytes",
            next_step="Check that this revision holds the original weights.",
        )
    nbytes = _LENGTH_NBYTES + length
    if nbytes > len(first):
        first += _read(line, Piece(len(first), nbytes - len(first)))
    return first[:nbytes]


def _read(line: Line, piece: Piece) -> bytes:
    content = bytearray(piece.nbytes)

    def put(chunk: memoryview, at: int) -> None:
        begin = at - piece.offset
        content[begin : begin + len(chunk)] = chunk

    read_piece(line, piece, put)
    return bytes(content)
