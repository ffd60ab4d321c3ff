"""Pieces, waits, limits and crews, without a server: each with bytes and time made up."""

import threading
import time
from contextlib import contextmanager

import pytest

from pipeline.errors import SourceError
from pipeline.source.hub.crew import Crew
from pipeline.source.hub.fetch import fetch_file
from pipeline.source.hub.ranges import Line, Piece, missing_pieces, read_piece
from pipeline.source.hub.refusal import retry_after
from pipeline.source.hub.retry import Attempts, Clock, Patience, Stopped, TransferFault
from pipeline.source.hub.snapshot import HubFile
from pipeline.source.hub.throttle import Throttle
from tests.pipeline.hub_side import Timeless

CONTENT = bytes(range(250)) * 4
FILE = HubFile("a.bin", len(CONTENT), None, "6c6d4c5d3ae6d8ed4e0e5a3ef5e1c27ab1b6a3f7")


class FakeRemote:
    """Gives each request the next number of bytes of a script; None is a fault before any."""

    def __init__(self, *script, chunk=100):
        self.script, self.chunk, self.asked = list(script), chunk, []

    def where(self, file):
        return file.name

    @contextmanager
    def read_range(self, file, begin, nbytes):
        self.asked.append((begin, nbytes))
        give = self.script.pop(0) if self.script else nbytes
        if give is None:
            raise TransferFault("nothing came")
        yield (
            CONTENT[at : min(at + self.chunk, begin + give)]
            for at in range(begin, begin + give, self.chunk)
        )


def read(line, piece):
    out = bytearray(piece.nbytes)

    def put(chunk, at):
        out[at - piece.offset : at - piece.offset + len(chunk)] = chunk

    read_piece(line, piece, put)
    return bytes(out)


def test_a_piece_goes_on_where_it_was_cut():
    timeless, remote = Timeless(), FakeRemote(250, None, None, 100)
    line = Line(remote, FILE, Patience(n_retries=3), timeless.clock)
    assert read(line, Piece(200, 700)) == CONTENT[200:900]
    assert remote.asked == [(200, 700), (450, 450), (450, 450), (450, 450), (550, 350)]
    assert timeless.waits == [0.5, 1.0, 2.0, 0.5]  # bytes came: patience begins anew


def read_until_lost(line, piece):
    with pytest.raises(SourceError, match="again and again"):
        read(line, piece)


def test_patience_ends():
    timeless, remote = Timeless(), FakeRemote(*[None] * 99)
    read_until_lost(Line(remote, FILE, Patience(n_retries=4), timeless.clock), Piece(0, 10))
    assert len(remote.asked) == 5


@pytest.mark.parametrize(
    ("kept", "missing"),
    [
        ([], [(0, 4), (4, 4), (8, 2)]),
        ([(0, 10)], []),
        ([(4, 4)], [(0, 4), (8, 2)]),
        ([(4, 4), (0, 4), (4, 4)], [(8, 2)]),
        ([(1, 1), (7, 3)], [(0, 1), (2, 4), (6, 1)]),
        ([(2, 6), (3, 1)], [(0, 2), (8, 2)]),
    ],
)
def test_what_is_missing(kept, missing):
    pieces = missing_pieces(10, [Piece(*one) for one in kept], 4)
    assert [(piece.offset, piece.nbytes) for piece in pieces] == missing


@pytest.mark.parametrize("jitter", [0.0, 0.5, 1.0])
def test_waits_double_up_to_a_limit_and_are_spread(jitter):
    patience, fault = Patience(first_s=1, most_s=20), TransferFault("x")
    waits = [patience.wait_s(n, fault, jitter) / (0.5 + jitter / 2) for n in (1, 2, 3, 4, 5, 6, 99)]
    assert waits == [1, 2, 4, 8, 16, 20, 20]


@pytest.mark.parametrize("jitter", [0.0, 1.0])
def test_a_wait_is_never_shorter_than_asked(jitter):
    assert Patience().wait_s(1, TransferFault("x", retry_after=30), jitter) >= 30


def test_too_long_a_wait_is_not_waited():
    timeless = Timeless()
    attempts = Attempts("a.bin", Patience(most_asked_s=60), clock=timeless.clock)
    with pytest.raises(SourceError, match="asks to wait 61 s"):
        attempts.failed(TransferFault("x", retry_after=61))
    assert timeless.waits == []


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "120"}, 120),
        ({"retry-after": "soon"}, None),
        (
            {
                "date": "Sat, 01 Aug 2026 10:00:00 GMT",
                "retry-after": "Sat, 01 Aug 2026 10:01:30 GMT",
            },
            90,
        ),
        ({"ratelimit": '"api";r=0;t=55'}, 55),
        ({"ratelimit": '"api";r=0;t=55', "retry-after": "7"}, 7),
    ],
    ids=["nothing", "seconds", "nonsense", "date", "the hub's own", "both"],
)
def test_how_long_a_server_asks_to_wait(headers, seconds):
    assert retry_after(headers) == seconds


@pytest.mark.parametrize("sizes", [[100] * 100, [5000, 1, 4999]], ids=["even", "uneven"])
def test_a_limit_is_kept(sizes):
    timeless = Timeless()
    throttle = Throttle(1000, timeless.clock)
    for size in sizes:
        throttle.take(size, threading.Event())
    assert timeless.time == pytest.approx(10.0)


def test_a_pause_is_made_up_for_only_a_little():
    timeless = Timeless()
    throttle = Throttle(1000, timeless.clock)
    timeless.time = 100.0
    throttle.take(1000, threading.Event())
    assert timeless.time == pytest.approx(100.75)


def test_a_stop_ends_a_wait_at_once():
    stopped = threading.Event()
    attempts = Attempts("a.bin", Patience(first_s=60), stopped=stopped)
    threading.Timer(0.05, stopped.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        attempts.failed(TransferFault("x"))
    assert time.monotonic() - began < 30


def test_a_crew_does_every_job_once_and_at_the_same_time():
    meeting, done = threading.Barrier(3, timeout=60), []

    def work(job):
        meeting.wait()
        done.append(job)

    Crew(work, threading.Event()).run(range(6), 3)
    assert sorted(done) == list(range(6))


def test_a_crew_stops_at_the_first_failure_and_leaves_a_hanging_thread():
    stopped, done, hanging = threading.Event(), [], threading.Event()

    def work(job):
        if job == 0:
            hanging.wait(60)
        elif job == 1:
            raise ValueError("no")
        else:
            done.append(job)

    began = time.monotonic()
    with pytest.raises(ValueError, match="no"):
        Crew(work, stopped).run(range(100), 2)
    assert time.monotonic() - began < 30
    assert stopped.is_set()
    assert done == []
    hanging.set()


def test_the_first_failure_ends_the_file_and_the_waits(tmp_path):
    class Refusing(FakeRemote):
        def read_range(self, file, begin, nbytes):
            if begin:
                raise SourceError("no such thing", file=file.name)
            return super().read_range(file, begin, nbytes)

    from pipeline.source.hub.fetch import FetchHabits

    habits = FetchHabits(piece_nbytes=100, patience=Patience(first_s=60), clock=Clock())
    began = time.monotonic()
    with pytest.raises(SourceError, match="no such thing"):
        fetch_file(Refusing(None), FILE, tmp_path / "a.bin", n_connections=2, habits=habits)
    assert time.monotonic() - began < 30
