"""One file from the hub: by pieces over several connections, resumed after any cut, verified.

Nothing appears under the final name before the whole content has been read back from the disk and
matches the release. What an earlier run has finished is not asked for again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError
from pipeline.source.hub.content import ContentMismatchError, check_content, identity
from pipeline.source.hub.crew import Crew
from pipeline.source.hub.events import QUIET, FetchEvents
from pipeline.source.hub.part import DownloadPart
from pipeline.source.hub.proof import not_content, proof_beside, prove, proved
from pipeline.source.hub.ranges import Line, Piece, missing_pieces, read_piece
from pipeline.source.hub.remote import RangeIgnored, Remote
from pipeline.source.hub.retry import CLOCK, PATIENCE, Clock, Patience
from pipeline.source.hub.snapshot import HubFile
from pipeline.source.hub.throttle import Throttle


@dataclass(frozen=True, slots=True)
class FetchHabits:
    """How a download goes about its work; nothing here changes a byte of the outcome.

    Args:
        piece_nbytes: What one request asks for, and the most that a killed connection loses.
        n_tries: How often a file whose digest is wrong is fetched in all.
        patience: How many faults in a row a connection bears.
        clock: Time.
    """

    piece_nbytes: int = 32 << 20
    n_tries: int = 3
    patience: Patience = PATIENCE
    clock: Clock = CLOCK


HABITS = FetchHabits()


def fetch_file(
    remote: Remote,
    file: HubFile,
    target: Path,
    *,
    n_connections: int = 4,
    limit: Throttle | None = None,
    events: FetchEvents = QUIET,
    habits: FetchHabits = HABITS,
) -> None:
    """Put ``file`` under ``target``, whole and with the right digest.

    A target that is so already is left alone: looked at only, where it was checked before and has
    not been touched since. One that is not is replaced at the end.

    Args:
        remote: Where the bytes come from.
        file: What is wanted.
        target: The final name; ``.part`` and ``.journal`` stand beside it meanwhile, and a hidden
            note on the digest stays there.
        n_connections: How many pieces come at the same time.
        limit: Bytes per second, shared by everything that is given the same one.
        events: Told what happens.
        habits: Sizes and patience.

    Raises:
        SourceError: The remote refuses, failed for too long, or keeps sending wrong bytes.
        OutputError: Disk full, or a device error; finished pieces are kept.
    """
    if is_fetched(file, target, events):
        events.advanced(file.nbytes)
        return
    line = Line(remote, file, habits.patience, habits.clock, limit, events)
    part = DownloadPart(target, file)
    try:
        _fill_rightly(part, line, n_connections, habits)
        part.publish()
    except QuantmillError as error:
        # Another process that fetches the same file may have been faster.
        if not (files.is_gone(error) and is_fetched(file, target, events)):
            raise
        part.discard()
    prove(target, proof_beside(target), identity(file))


def is_fetched(file: HubFile, target: Path, events: FetchEvents = QUIET) -> bool:
    """Whether ``target`` is ``file``; it is read only when no note tells.

    Raises:
        SourceError: It cannot be read.
        OutputError: The note cannot be written.
    """
    if not target.is_file() or target.stat().st_size != file.nbytes:
        return False
    wanted, note = identity(file), proof_beside(target)
    known = proved(target, note)
    if known is None:
        mismatch = check_content(target, file, hashed=events.hashed)
        known = wanted if mismatch is None else not_content(wanted)
        prove(target, note, known)
    return known == wanted


def _fill_rightly(part: DownloadPart, line: Line, n_connections: int, habits: FetchHabits) -> None:
    """Fetch what is missing until the whole has the right digest."""
    for n_left in range(habits.n_tries - 1, -1, -1):
        _fill(part, line, n_connections, habits.piece_nbytes)
        mismatch = check_content(part.path, line.file, hashed=line.events.hashed)
        if mismatch is None:
            return
        _throw_away(part, mismatch, n_left, line.events)


def _fill(part: DownloadPart, line: Line, n_connections: int, piece_nbytes: int) -> None:
    """Fetch what is missing, in one piece where the server cannot do better."""
    kept = [Piece(record.offset, record.nbytes) for record in part.open()]
    pieces = list(missing_pieces(line.file.nbytes, kept, piece_nbytes))
    n_kept = line.file.nbytes - sum(piece.nbytes for piece in pieces)
    line.events.advanced(n_kept)
    n_come = _Counted(line)
    try:
        n_come.run(part, pieces, n_connections)
    except RangeIgnored:
        line.events.advanced(-(n_kept + n_come.nbytes))
        line.events.noted(
            f"{line.remote.where(line.file)}: the server sends whole files only; it is read in "
            "one go and begins anew after a cut."
        )
        part.discard()
        part.open()
        _Counted(line).run(part, [Piece(0, line.file.nbytes)], 1)


class _Counted:
    """One pass over some pieces, and how many bytes came of it."""

    def __init__(self, line: Line) -> None:
        self._lock = threading.Lock()
        self._told = line.events.advanced
        events = replace(line.events, advanced=self._advanced)
        self._line = replace(line, events=events, stopped=threading.Event())
        self.nbytes = 0

    def run(self, part: DownloadPart, pieces: list[Piece], n_connections: int) -> None:
        """Fetch all of ``pieces`` into ``part``."""
        assert self._line.stopped is not None

        def fetch(piece: Piece) -> None:
            part.write(piece, lambda put: read_piece(self._line, piece, put))

        Crew(fetch, self._line.stopped).run(pieces, n_connections)

    def _advanced(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
        self._told(nbytes)


def _throw_away(
    part: DownloadPart, mismatch: ContentMismatchError, n_left: int, events: FetchEvents
) -> None:
    """Make room for another try after wrong bytes.

    Raises:
        ContentMismatchError: That was the last.
    """
    if not n_left:
        part.discard()
        raise mismatch
    part.drop_damaged()
    events.advanced(-part.file.nbytes)  # those that are kept are told again
    events.noted(f"{mismatch.what}; file {mismatch.file}; it is fetched again.")
