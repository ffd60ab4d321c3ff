"""An unfinished download: laid out at its full length, filled by pieces in any order.

``<name>.part`` is the file at its final length, ``<name>.journal`` tells the pieces that are whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from pipeline import files
from pipeline.errors import OutputError, SourceError
from pipeline.source.hub.content import identity
from pipeline.source.hub.journal import PieceRecord, head_line, read_journal, record_line
from pipeline.source.hub.ranges import Piece
from pipeline.source.hub.snapshot import HubFile

_READ_NBYTES = 1 << 22

Receive = Callable[[Callable[[memoryview, int], None]], str]
"""Is given a function that writes bytes at an offset; puts those of a piece; gives their sha256."""


class DownloadPart:
    """The part and the journal of one target; safe from any thread.

    Every call opens what it needs, so a thread that is left behind in a dead connection never
    holds a descriptor that now belongs to another file.

    Args:
        target: The final name.
        file: What is to become of it.
    """

    def __init__(self, target: Path, file: HubFile) -> None:
        self.path = target.with_name(f"{target.name}.part")
        self._journal = _journal_of(target)
        self._target = target
        self.file = file
        self._content = identity(file)

    def open(self) -> list[PieceRecord]:
        """Lay the part out; the pieces that an earlier run has left in it.

        A part of other content is thrown away: it can never become this file.

        Raises:
            OutputError: The disk cannot hold the file.
        """
        files.make_folder(self._target.parent)
        kept = self._kept()
        if kept is None:
            self.discard()
        with files.writing(self.path, create=True) as fd:
            nbytes = os.fstat(fd).st_size
            if nbytes < self.file.nbytes:
                files.allocate(fd, self.file.nbytes, self.path)
            elif nbytes > self.file.nbytes:
                files.set_length(fd, self.file.nbytes, self.path)
        if kept is None:
            self._append(head_line(self._content))
            files.sync_folder(self._target.parent)
        return kept or []

    def write(self, piece: Piece, receive: Receive) -> None:
        """Let ``receive`` put the bytes of ``piece``, then make them durable and journal them.

        Raises:
            OutputError: Disk full, or a device error; the piece does not count.
        """
        with files.writing(self.path) as fd:
            digest = receive(lambda chunk, at: files.write_exact(fd, chunk, at, self.path))
            files.sync(fd, self.path)
        self._append(record_line(piece, digest))

    def drop_damaged(self) -> None:
        """Strike from the journal what is no longer what came.

        Where every piece is still as it came, the remote itself sent wrong bytes: then all goes.

        Raises:
            OutputError: The journal cannot be written.
        """
        records = self._kept() or []
        whole = [record for record in records if self._holds(record)]
        if len(whole) == len(records):
            self.discard()
            return
        lines = [record_line(Piece(one.offset, one.nbytes), one.sha256) for one in whole]
        files.write_whole(self._journal, head_line(self._content) + b"".join(lines))

    def publish(self) -> None:
        """Give the part its final name; a twin that was faster has done the same.

        Raises:
            OutputError: The disk failed, or somebody took the part away.
        """
        try:
            files.rename(self.path, self._target)
        except OutputError as error:
            if not (files.is_gone(error) and self._target.exists()):
                raise
        files.remove(self._journal)

    def discard(self) -> None:
        """Take part and journal away, the journal first: it must never speak of other bytes."""
        files.remove(self._journal)
        files.remove(self.path)

    def _kept(self) -> list[PieceRecord] | None:
        if not self.path.exists():
            return None
        return read_journal(self._journal, self._content, self.file.nbytes)

    def _append(self, line: bytes) -> None:
        with files.appending(self._journal) as fd:
            files.append_line(fd, line, self._journal)
            files.sync(fd, self._journal)

    def _holds(self, record: PieceRecord) -> bool:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_READ_NBYTES, record.nbytes)))
        try:
            with files.reading(self.path) as fd:
                for done in range(0, record.nbytes, _READ_NBYTES):
                    chunk = buffer[: record.nbytes - done]
                    files.read_exact(fd, chunk, record.offset + done, self.path)
                    digest.update(chunk)
        except SourceError:
            return False
        return digest.hexdigest() == record.sha256


def forget_download(target: Path) -> None:
    """Take a fetched file away, and a journal that a kill left beside it."""
    files.remove(_journal_of(target))
    files.remove(target)


def _journal_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.journal")
