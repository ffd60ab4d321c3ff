"""An unfinished shard: laid out whole at the start, filled by positioned writes in any order.

    <name>.part      the file at its final length
    <name>.journal   the blocks that are whole (see `pipeline.gguf.journal`)
    <name>           appears by one rename, after every byte was read back and matched

A killed run goes on at the first block without a journal line (`pipeline.gguf.committer` writes
them). On reopening, every journaled block is hashed again, so a part that was damaged while nobody
looked is mended, not trusted. Several processes may fill one part, since equal spec means equal
bytes; once one of them has named it the others stop.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from pipeline import files
from pipeline.errors import OutputError, QuantmillError, SourceError, VerifyError
from pipeline.gguf.committer import Committer, append_durably, outlast_interrupts
from pipeline.gguf.journal import BlockRecord, head_line, read_journal, record_lines
from pipeline.sharing import share_range

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
        trusts_journal: Take journaled blocks as they are. For a part that is reopened often and
            hashed whole before it is published.

    Raises:
        OutputError: Disk full, or a part of another spec stands in the way.
    """

    def __init__(
        self,
        path: Path,
        *,
        header: bytes,
        nbytes: int,
        spec: str,
        trusts_journal: bool = False,
    ) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.journal = path.with_name(path.name + ".journal")
        self._header = header
        self._nbytes = nbytes
        self._spec = spec
        self._trusts_journal = trusts_journal
        self._stopped = threading.Event()
        self.done: dict[int, BlockRecord] = {}

    def __enter__(self) -> Self:
        files.make_folder(self.path.parent)
        with ExitStack() as stack:
            resumed = self._resumed()
            self._fd = stack.enter_context(files.writing(self.part, create=True))
            self._prepare()
            self._forget_damaged(resumed)
            log_fd = stack.enter_context(files.appending(self.journal))
            append_durably(log_fd, self.journal, head_line(self._spec))
            files.sync_folder(self.path.parent)
            self.done = resumed
            part, journal = (self._fd, self.part), (log_fd, self.journal)
            self._committer = Committer(part, journal, self.done)
            stack.callback(self._committer.finish)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._resources.close()

    def write(self, content: memoryview, offset: int) -> None:
        """Put bytes at an absolute offset; safe from any thread.

        Raises:
            OutputError: The disk failed, or another worker has finished or dropped the shard: a
                file that has its final name is not written to, not even with equal bytes.
        """
        self._require_unfinished()
        files.write_exact(self._fd, content, offset, self.part)

    def share(self, fd: int, offset: int, nbytes: int, at: int) -> bool:
        """Take bytes of an open file over without moving them, where the file systems can.

        What was shared counts as written; if not all of it was, nothing does.

        Raises:
            OutputError: As `write`.
        """
        self._require_unfinished()
        return share_range(fd, offset, nbytes, self._fd, self.part, at)

    def commit(self, record: BlockRecord) -> None:
        """Hand a written block to the journal; waits only while many others do.

        Raises:
            OutputError: An earlier block could not be made durable.
        """
        self._committer.commit(record)

    def settle(self) -> None:
        """Wait until every block handed over is journaled; none can be written after this.

        Raises:
            OutputError: A block could not be made durable.
        """
        self._committer.finish()
        self._committer.raise_failure()

    def read_back(self, spans: Sequence[Span], *, n_threads: int) -> ShardDigests:
        """Make all bytes durable, read them back and compare them with the journal.

        Raises:
            VerifyError: Bytes on disk differ from those that were written.
            OutputError: A block is missing, or the disk failed.
        """
        self.settle()
        self._mend_rest(spans)
        files.sync(self._fd, self.part)
        pool = ThreadPoolExecutor(n_threads, thread_name_prefix="hash")
        try:
            whole = pool.submit(self._hash_whole)
            digests = list(pool.map(self._hash_span, spans))
            names = (span.name for span in spans)
            return ShardDigests(whole.result(), dict(zip(names, digests, strict=True)))
        finally:
            self._stopped.set()
            outlast_interrupts(pool.shutdown)

    def discard(self) -> None:
        """Drop the part and its journal: what was written is not to be built on."""
        files.remove(self.journal)
        files.remove(self.part)

    def publish(self) -> None:
        """Give the part its final name; to be called after `read_back` has succeeded.

        Where another worker published the same shard first, its file stands.

        Raises:
            OutputError: The disk failed, or somebody took the part away.
        """
        if files.is_open_as(self._fd, self.part):
            try:
                files.rename(self.part, self.path)
            except OutputError as error:
                if not files.is_gone(error):
                    raise
        if not (self.path.exists() and self.path.stat().st_size == self._nbytes):
            raise OutputError(
                "the part was taken away while it was filled",
                file=self.part,
                next_step="Run the same command again.",
            )
        files.remove(self.journal)

    def _require_unfinished(self) -> None:
        if not files.is_open_as(self._fd, self.part):
            raise OutputError(
                "another worker finished or dropped this shard",
                file=self.part,
                next_step="Run the same command again.",
            )

    def _resumed(self) -> dict[int, BlockRecord]:
        """What the journal says; one without its part says nothing."""
        if self.part.exists():
            return read_journal(self.journal, self._spec)
        files.remove(self.journal)
        return {}

    def _forget_damaged(self, resumed: dict[int, BlockRecord]) -> None:
        """Take blocks that are not what they were out of ``resumed``.

        Those that read well but differ leave the journal too: others take it at its word.
        """
        if self._trusts_journal or not resumed:
            return
        found = {offset: self._digest(record) for offset, record in resumed.items()}
        kept = [r for o, r in resumed.items() if found[o] in (r.sha256, None)]
        if len(kept) < len(resumed):
            files.write_whole(self.journal, head_line(self._spec) + record_lines(kept))
        for offset, digest in found.items():
            if digest != resumed[offset].sha256:
                del resumed[offset]

    def _prepare(self) -> None:
        """Give the part its length and its header, whatever it had."""
        nbytes = os.fstat(self._fd).st_size
        if nbytes < self._nbytes:
            files.allocate(self._fd, self._nbytes, self.part)
        elif nbytes > self._nbytes:
            files.set_length(self._fd, self._nbytes, self.part)
        files.write_exact(self._fd, memoryview(self._header), 0, self.part)

    def _rest(self, spans: Sequence[Span]) -> Iterator[tuple[int, bytes]]:
        """What lies outside the spans, by offset: the header, and zeros between them."""
        yield 0, self._header
        position = len(self._header)
        for span in sorted(spans, key=lambda span: span.offset):
            yield position, bytes(span.offset - position)
            position = span.offset + span.nbytes
        yield position, bytes(self._nbytes - position)

    def _mend_rest(self, spans: Sequence[Span]) -> None:
        for offset, content in self._rest(spans):
            if b"".join(self._chunks(offset, offset + len(content))) != content:
                files.write_exact(self._fd, memoryview(content), offset, self.part)

    def _digest(self, record: BlockRecord) -> str | None:
        """sha256 of what lies where a journaled block should; nothing if it cannot be read."""
        if record.offset + record.nbytes > self._nbytes:
            return "beyond the end"
        digest = hashlib.sha256()
        try:
            for chunk in self._chunks(record.offset, record.offset + record.nbytes):
                digest.update(chunk)
        except QuantmillError:
            return None
        return digest.hexdigest()

    def _hash_whole(self) -> str:
        whole = hashlib.sha256()
        for chunk in self._chunks(0, self._nbytes):
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
            for chunk in self._chunks(position, position + record.nbytes):
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

    def _chunks(self, begin: int, end: int) -> Iterator[memoryview]:
        """A byte range of the part as chunks that share one buffer; ends early when stopped."""
        buffer = memoryview(bytearray(min(READ_NBYTES, end - begin)))
        while begin < end and not self._stopped.is_set():
            chunk = buffer[: end - begin]
            try:
                files.read_exact(self._fd, chunk, begin, self.part)
            except SourceError as error:
                raise OutputError(
                    "cannot read back what was written",
                    file=self.part,
                    offset=begin,
                    found=error.found,
                    next_step="Check the disk and run the same command again.",
                ) from error
            yield chunk
            begin += len(chunk)
