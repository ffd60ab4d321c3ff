"""Writing one file of a cut checkpoint: streamed, read back, then named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from pipeline import files, sharing
from pipeline.errors import VerifyError
from pipeline.prune.plan import PrunedFile, Span
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.reader import check_unchanged

_STEP_NBYTES = 1 << 23
"""Read, hashed and written at a time: all the memory that a file takes."""

Told = Callable[[int], None]


def part_of(target: Path) -> Path:
    """Where a file is written before it has its name."""
    return target.with_name(f".{target.name}.part")


def write_file(file: PrunedFile, source: Checkpoint, target: Path, *, told: Told) -> str:
    """Put ``file`` under ``target``; its sha256.

    A file of which no byte changes is shown under one more name: by a hard link, or a copy.

    Args:
        file: What to write.
        source: What it is made of.
        target: The final name.
        told: Told the bytes that are in place.

    Raises:
        SourceError: The source cannot be read, or changed after its headers were read.
        OutputError: The disk is full or failed.
        VerifyError: What the disk gives back is not what was written.
    """
    if file.is_changed:
        return _write(file, source, target, told)
    origin = source.files[file.name].path.resolve()  # a link to a link may lead nowhere
    sharing.link_or_copy(origin, target)
    _require_settled(file, source)
    digest = files.sha256_of(target)
    told(file.nbytes)
    return digest


def _write(file: PrunedFile, source: Checkpoint, target: Path, told: Told) -> str:
    files.make_folder(target.parent)
    part = part_of(target)
    with files.sole_writing(part) as fd:
        files.allocate(fd, file.nbytes, part)
        digest, at = hashlib.sha256(), 0
        for piece in _pieces(file, source):
            files.write_exact(fd, piece, at, part)
            digest.update(piece)
            at += len(piece)
            told(len(piece))
        assert at == file.nbytes, (file.name, at)
        files.set_length(fd, at, part)  # an earlier attempt may have been longer
        files.sync(fd, part)
        files.forget_cached(fd, 0, at)
        _require_settled(file, source)
        found = files.sha256_of(part)
        if found != digest.hexdigest():
            raise VerifyError(
                "the disk gives back other bytes than were written",
                file=part,
                expected=digest.hexdigest(),
                found=found,
                next_step="Run the same command again; check the disk if it happens twice.",
            )
        files.rename(part, target)
    return found


def _pieces(file: PrunedFile, source: Checkpoint) -> Iterator[memoryview]:
    """The bytes of a file in order; each piece is good until the next one is asked for."""
    assert file.header is not None
    yield memoryview(file.header)
    buffer = memoryview(bytearray(_STEP_NBYTES))
    with ExitStack() as stack:
        opened: dict[str, int] = {}
        for tensor in file.tensors:
            for span in tensor.spans:
                path = source.files[span.file].path
                if span.file not in opened:
                    opened[span.file] = stack.enter_context(files.reading(path))
                yield from _span(span, opened[span.file], path, buffer)


def _span(span: Span, fd: int, path: Path, buffer: memoryview) -> Iterator[memoryview]:
    for begin in range(0, span.nbytes, len(buffer)):
        piece = buffer[: span.nbytes - begin]
        files.read_exact(fd, piece, span.offset + begin, path)
        yield piece
        files.forget_cached(fd, span.offset + begin, len(piece))


def _require_settled(file: PrunedFile, source: Checkpoint) -> None:
    """Refuse a source that was written to since its headers were read."""
    for name in file.source_names:
        known = source.files[name]
        check_unchanged(known, known.path.stat())


def missing_nbytes(file: PrunedFile, source: Checkpoint, target: Path) -> int:
    """Bytes of disk that writing ``file`` under ``target`` still takes."""
    if file.is_changed:
        return max(file.nbytes - files.allocated_nbytes(part_of(target)), 0)
    origin = source.files[file.name].path
    return 0 if files.is_same_disk(origin, target.parent) else file.nbytes
