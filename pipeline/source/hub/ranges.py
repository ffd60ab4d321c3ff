"""Pieces of a file, and how one is read to its end whatever happens on the way."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from pipeline.source.hub.events import QUIET, FetchEvents
from pipeline.source.hub.remote import RangeIgnored, Remote
from pipeline.source.hub.retry import (
    CLOCK,
    PATIENCE,
    Attempts,
    Clock,
    Patience,
    Stopped,
    TransferFault,
)
from pipeline.source.hub.snapshot import HubFile
from pipeline.source.hub.throttle import Throttle

_SIP_NBYTES = 1 << 18
"""Most bytes that pass the throttle at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of a file."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Line:
    """One file's line to the remote, shared by all of its connections.

    Args:
        remote: Where bytes come from.
        file: The file.
        patience: How many faults in a row a connection bears.
        clock: Time.
        limit: Bytes per second, shared with other files.
        events: Told of bytes and faults.
        stopped: Set when no more bytes are wanted.
    """

    remote: Remote
    file: HubFile
    patience: Patience = PATIENCE
    clock: Clock = CLOCK
    limit: Throttle | None = None
    events: FetchEvents = QUIET
    stopped: threading.Event | None = None

    def attempts(self) -> Attempts:
        """A fresh count of faults."""
        return Attempts(
            self.remote.where(self.file),
            self.patience,
            clock=self.clock,
            stopped=self.stopped,
            noted=self.events.noted,
        )


def missing_pieces(nbytes: int, kept: Iterable[Piece], piece_nbytes: int) -> Iterator[Piece]:
    """What is left of a file beside the ``kept`` ranges, in pieces of at most ``piece_nbytes``."""
    position = 0
    for piece in [*sorted(kept, key=lambda piece: piece.offset), Piece(nbytes, 0)]:
        while position < piece.offset:
            length = min(piece_nbytes, piece.offset - position)
            yield Piece(position, length)
            position += length
        position = max(position, piece.offset + piece.nbytes)


def read_piece(line: Line, piece: Piece, put: Callable[[memoryview, int], None]) -> str:
    """Read all of ``piece``; the sha256 of its bytes.

    Args:
        line: Where from.
        piece: What.
        put: Told bytes and their offset in the file, in order; after a server without ranges had
            to begin anew, from the piece's first byte again.

    Raises:
        SourceError: The remote refuses, or failed more often than ``line.patience`` bears.
        RangeIgnored: The server sends whole files only, and the piece is not a whole file.
        Stopped: ``line.stopped`` was set.
    """
    attempts, digest, done = line.attempts(), hashlib.sha256(), 0
    while done < piece.nbytes:
        try:
            with closing(_received(line, piece.offset + done, piece.nbytes - done)) as chunks:
                for chunk in chunks:
                    put(chunk, piece.offset + done)
                    digest.update(chunk)
                    done += len(chunk)
                    attempts.progressed()
            if done < piece.nbytes:
                raise TransferFault("the body ended too early")
        except RangeIgnored:
            if piece != Piece(0, line.file.nbytes) or not done:
                raise
            line.events.advanced(-done)
            digest, done = hashlib.sha256(), 0
            attempts.failed(TransferFault("a server without ranges was cut off and begins anew"))
        except TransferFault as fault:
            attempts.failed(fault)
    return digest.hexdigest()


def _received(line: Line, begin: int, nbytes: int) -> Generator[memoryview, None, None]:
    with line.remote.read_range(line.file, begin, nbytes) as chunks:
        for chunk in chunks:
            for at in range(0, len(chunk), _SIP_NBYTES):
                sip = memoryview(chunk)[at : at + _SIP_NBYTES]
                if line.limit is not None:
                    line.limit.take(len(sip), line.stopped or threading.Event())
                if line.stopped is not None and line.stopped.is_set():
                    raise Stopped
                yield sip
                line.events.advanced(len(sip))
