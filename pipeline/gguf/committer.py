"""The thread that makes blocks durable and then says so in the journal.

Data first, then the lines, then those durable too: a line never speaks of bytes that a power cut
could still take. Everything that waits shares one sync.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline import files
from pipeline.gguf.journal import BlockRecord, record_lines

N_WAITING = 16
"""Most blocks that wait for the sync in progress; more would be lost with a killed process."""


class Committer:
    """Journals blocks of one part.

    Args:
        part: The part's open file and its name.
        journal: The journal's open file and its name.
        done: Blocks by offset; gets every block that has become durable.
    """

    def __init__(
        self, part: tuple[int, Path], journal: tuple[int, Path], done: dict[int, BlockRecord]
    ) -> None:
        self._part = part
        self._journal = journal
        self._done = done
        self._queue: queue.Queue[BlockRecord | None] = queue.Queue(N_WAITING)
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        self._thread.start()

    def commit(self, record: BlockRecord) -> None:
        """Hand over a written block; waits only while `N_WAITING` others do.

        Raises:
            OutputError: An earlier block could not be made durable.
        """
        assert not self._is_closing
        self.raise_failure()
        self._queue.put(record)

    def finish(self) -> None:
        """Journal what waits and end the thread; to be called before the files are closed."""
        outlast_interrupts(self._finish)

    def raise_failure(self) -> None:
        """Raise what kept a block from becoming durable, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _finish(self) -> None:
        if not self._is_closing:
            self._queue.put(None)
            self._is_closing = True
        self._thread.join()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = self._batch()
            is_open = batch[-1] is not None
            self._make_durable([record for record in batch if record is not None])

    def _batch(self) -> list[BlockRecord | None]:
        batch = [self._queue.get()]
        while batch[-1] is not None and len(batch) < N_WAITING and not self._queue.empty():
            batch.append(self._queue.get())
        return batch

    def _make_durable(self, records: list[BlockRecord]) -> None:
        # After a failure the queue is still emptied, so that no worker waits for ever, but nothing
        # is trusted: a later sync may succeed without the pages that an earlier one lost.
        if self._failure is not None or not records:
            return
        try:
            files.sync(*self._part)
            append_durably(*self._journal, record_lines(records))
        except BaseException as error:  # raised again by whoever hands over next
            self._failure = error
        else:
            self._done.update((record.offset, record) for record in records)


def append_durably(fd: int, path: Path, lines: bytes) -> None:
    """Append to a journal and sync it."""
    files.append_line(fd, lines, path)
    files.sync(fd, path)


def outlast_interrupts(wait: Callable[[], object]) -> None:
    """Call ``wait`` to its end, however often Ctrl-C is pressed; then let that through.

    Threads that write must have ended before their files are closed. Catching KeyboardInterrupt
    would not do: up to Python 3.12, an interrupted ``Thread.join`` takes its thread for ended.
    """
    if threading.current_thread() is not threading.main_thread():
        wait()  # signals reach the main thread only
        return
    presses: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: presses.append(number))
    try:
        wait()
    finally:
        signal.signal(signal.SIGINT, before)
    if presses:
        raise KeyboardInterrupt
