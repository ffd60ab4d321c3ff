"""An unfinished shard: laid out whole at the start, filled by positioned writes in any order.

    <name>.part      the file at its final length
    <name>.journal   the blocks that are whole (see `pipeline.gguf.journal`)
    <name>           appears by one rename, after every byte was read back and matched

A killed run goes on at the first block without a journal line. Lines are written by one committer
thread: data durable first, then the lines, then those durable too. On reopening, every journaled
block is hashed again, so a part that was damaged while nobody looked is mended, not trusted.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline import files
from pipeline.errors import OutputError, VerifyError
from pipeline.gguf.journal import BlockRecord, head_line, read_journal, record_lines

READ_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """A named byte range of a finished shard whose sha256 is wanted."""

    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardDigests:
    """sha256 of a shard file and of each of its spans."""

    file_sha256: str
    spans: dict[str, str]


class ShardPart:
    """Writes one shard; use as a context manager.

    Args:
        path: The final name.
        header: The bytes before the data.
        nbytes: The exact final length.
        spec: Digest of everything the bytes depend on.

    Raises:
        OutputError: Disk full, or a part of another spec stands in the way.
    """

    def __init__(self, path: Path, *, header: bytes, nbytes: int, spec: str) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.journal = path.with_name(path.name + ".journal")
        self._header = header
        self._nbytes = nbytes
        self._spec = spec
        self._queue: queue.SimpleQueue[BlockRecord | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.done: dict[int, BlockRecord] = {}

    def __enter__(self) -> Self:
        files.make_folder(self.path.parent)
        resumed = read_journal(self.journal, self._spec) if self.part.exists() else {}
        if not resumed:
            self.journal.unlink(missing_ok=True)
        self._file = files.writing(self.part, create=True)
        self._fd = self._file.__enter__()
        try:
            self._prepare()
            self._log = files.appending(self.journal)
            self._log_fd = self._log.__enter__()
            if not resumed:
                self._append(head_line(self._spec))
            self.done = {o: r for o, r in resumed.items() if self._holds(r)}
        except BaseException:
            self._file.__exit__(None, None, None)
            raise
        self._committer = threading.Thread(target=self._commit_all, daemon=True)
        self._committer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._drain()
        self._log.__exit__(None, None, None)
        self._file.__exit__(None, None, None)

    def write(self, content: memoryview, offset: int) -> None:
        """Put bytes at an absolute offset; safe from any thread."""
        files.write_exact(self._fd, content, offset, self.part)

    def commit(self, record: BlockRecord) -> None:
        """Hand a written block to the journal; returns at once.

        Raises:
            OutputError: An earlier block could not be made durable.
        """
        self._raise_failure()
        self._queue.put(record)

    def read_back(self, spans: Sequence[Span], *, n_threads: int) -> ShardDigests:
        """Make all bytes durable, read them back and compare them with the journal.

        Raises:
            VerifyError: Bytes on disk differ from those that were written.
            OutputError: A block is missing, or the disk failed.
        """
        self._drain()
        self._raise_failure()
        files.sync(self._fd, self.part)
        with ThreadPoolExecutor(n_threads, thread_name_prefix="hash") as pool:
            whole = pool.submit(self._hash_whole)
            digests = list(pool.map(self._hash_span, spans))
        names = (span.name for span in spans)
        return ShardDigests(whole.result(), dict(zip(names, digests, strict=True)))

    def publish(self) -> None:
        """Give the part its final name; to be called after `read_back` has succeeded."""
        try:
            files.rename(self.part, self.path)
        except OutputError:
            # Another worker published the same shard first: equal spec means equal bytes.
            if not (self.path.exists() and self.path.stat().st_size == self._nbytes):
                raise
        self.journal.unlink(missing_ok=True)

    def _prepare(self) -> None:
        if os.fstat(self._fd).st_size < self._nbytes:
            files.allocate(self._fd, self._nbytes, self.part)
        files.write_exact(self._fd, memoryview(self._header), 0, self.part)

    def _append(self, lines: bytes) -> None:
        files.append_line(self._log_fd, lines, self.journal)
        files.sync(self._log_fd, self.journal)

    def _commit_all(self) -> None:
        """Committer thread: everything that waits shares one sync."""
        while (record := self._queue.get()) is not None:
            batch: list[BlockRecord | None] = [record]
            while not self._queue.empty():
                batch.append(self._queue.get())
            records = [r for r in batch if r is not None]
            try:
                if self._failure is None:
                    files.sync(self._fd, self.part)
                    self._append(record_lines(records))
                    self.done.update((r.offset, r) for r in records)
            except BaseException as error:
                self._failure = error
            if None in batch:
                return

    def _drain(self) -> None:
        if self._committer.is_alive():
            self._queue.put(None)
            self._committer.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _holds(self, record: BlockRecord) -> bool:
        digest = hashlib.sha256()
        for chunk in _Chunks(self._fd, self.part, record.offset, record.offset + record.nbytes):
            digest.update(chunk)
        return digest.hexdigest() == record.sha256

    def _hash_whole(self) -> str:
        whole = hashlib.sha256()
        for chunk in _Chunks(self._fd, self.part, 0, self._nbytes):
            whole.update(chunk)
        return whole.hexdigest()

    def _hash_span(self, span: Span) -> str:
        """sha256 of a span, checking each of its blocks against the journal on the way."""
        tensor = hashlib.sha256()
        position, end = span.offset, span.offset + span.nbytes
        while position < end:
            record = self.done.get(position)
            if record is None:
                raise OutputError(
                    "a block of the shard was never written",
                    file=self.part,
                    tensor=span.name,
                    offset=position,
                )
            block = hashlib.sha256()
            for chunk in _Chunks(self._fd, self.part, position, position + record.nbytes):
                tensor.update(chunk)
                block.update(chunk)
            if block.hexdigest() != record.sha256:
                raise VerifyError(
                    "bytes read back differ from those written",
                    file=self.part,
                    tensor=span.name,
                    offset=position,
                    expected=record.sha256,
                    found=block.hexdigest(),
                    next_step="Check the disk; running again mends the block.",
                )
            position += record.nbytes
        return tensor.hexdigest()


class _Chunks:
    """A byte range of a file as chunks that share one buffer."""

    def __init__(self, fd: int, path: Path, begin: int, end: int) -> None:
        self._fd, self._path, self._begin, self._end = fd, path, begin, end

    def __iter__(self) -> Self:
        self._buffer = memoryview(bytearray(min(READ_NBYTES, max(self._end - self._begin, 1))))
        return self

    def __next__(self) -> memoryview:
        if self._begin >= self._end:
            raise StopIteration
        chunk = self._buffer[: self._end - self._begin]
        files.read_exact(self._fd, chunk, self._begin, self._path)
        self._begin += len(chunk)
        return chunk
