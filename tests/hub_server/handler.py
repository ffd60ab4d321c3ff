"""One connection: requests in, answers out, whole or as a fault wants them."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler
from typing import Protocol, cast

from tests.hub_server.call import Origin
from tests.hub_server.effects import Delivery
from tests.hub_server.log import Entry
from tests.hub_server.reply import Reply
from tests.hub_server.routes import answered, route
from tests.hub_server.state import HubState

_CHUNK = 1 << 18
_MAX_BODY_NBYTES = 1 << 20
_STEPS_PER_S = 20
_MAX_WAIT_S = 60.0
_MAX_DRAIN_S = 2.0


class Listener(Protocol):
    """What a handler needs of the server that accepted the connection."""

    origin: Origin
    state: HubState
    stopping: threading.Event


class Handler(BaseHTTPRequestHandler):
    """Speaks HTTP/1.1 with connections kept open; an idle one ends after ``timeout`` seconds."""

    protocol_version = "HTTP/1.1"
    server_version = "hub"
    sys_version = ""
    timeout = 30
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer one request."""
        listener = cast("Listener", self.server)
        state = listener.state
        headers = {name.lower(): value for name, value in self.headers.items()}
        n_body = min(int(headers.get("content-length", 0)), _MAX_BODY_NBYTES)
        body = self.rfile.read(n_body)
        call, answer = route(listener.origin, self.command, self.path, headers, body)
        entry = state.log.enter(call)
        reply = answered(state, call, answer)
        delivery = Delivery.of(reply)
        faults = state.faults.strike(call, reply)
        for fault in faults:
            delivery = fault.applied(delivery)
        if delivery.expires_link:
            state.links.expire(call)
        names = tuple(type(fault.effect).__name__ for fault in faults)
        entry.begin(0 if delivery.hangs_up else delivery.reply.status, names)
        self._deliver(delivery, entry)

    do_HEAD = do_GET
    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing: the log is for tests, not for people."""

    def _deliver(self, delivery: Delivery, entry: Entry) -> None:
        self._wait(delivery.delay_s)
        if delivery.hangs_up:
            self.close_connection = True
            return
        self._send_head(delivery)
        if self.command == "HEAD":
            return
        whole = delivery.reply.nbytes
        end = whole if delivery.stop_at is None else min(delivery.stop_at, whole)
        for piece, pause_s in _pieces(delivery, end):
            self._wait(pause_s)
            self._send(piece, entry)
        if delivery.resets:
            self._reset()
        if end < whole or delivery.declared_nbytes is None:
            self.close_connection = True

    def _send_head(self, delivery: Delivery) -> None:
        self.send_response(delivery.reply.status)
        for name, value in delivery.reply.headers.items():
            self.send_header(name, value)
        if delivery.declared_nbytes is None:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(delivery.declared_nbytes))
        self.end_headers()

    def _send(self, piece: bytes, entry: Entry) -> None:
        view = memoryview(piece)
        entry.count(len(view))
        try:
            while view:
                view = view[self.connection.send(view) :]
        except OSError:
            entry.count(-len(view))
            raise

    def _wait(self, seconds: float) -> None:
        stopping = cast("Listener", self.server).stopping
        if seconds > 0 and stopping.wait(min(seconds, _MAX_WAIT_S)):
            raise ConnectionAbortedError

    def _reset(self) -> None:
        """End the connection with a reset, once the client's side has all that was sent."""
        deadline = time.monotonic() + _MAX_DRAIN_S
        while _n_unsent(self.connection) and time.monotonic() < deadline:
            self._wait(0.002)
        linger_off = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_off)
        # The handler's files keep the socket object open, and a shutdown would say goodbye first.
        os.close(self.connection.detach())
        self.close_connection = True


def _pieces(delivery: Delivery, end: int) -> Iterator[tuple[bytes, float]]:
    """The body up to ``end``, piece by piece, and how long to wait before each is sent."""
    rate = delivery.nbytes_per_s
    step = min(_CHUNK, max(1, rate // _STEPS_PER_S)) if rate else _CHUNK
    reply, at = delivery.reply, 0
    with reply.blob.opened() if reply.blob else nullcontext(-1) as fd:
        while at < end:
            n = min(step, end - at)
            stall_at = delivery.stall_at
            if stall_at is not None and at < stall_at:
                n = min(n, stall_at - at)
            pause_s = delivery.stall_s if at == stall_at else 0.0
            piece = _read(reply, fd, at, n)
            yield _flipped(piece, delivery.flip_at, at), pause_s + (n / rate if rate else 0.0)
            at += n


def _read(reply: Reply, fd: int, at: int, nbytes: int) -> bytes:
    if reply.blob is None:
        return reply.text[at : at + nbytes]
    piece = os.pread(fd, nbytes, reply.first + at)
    if len(piece) != nbytes:
        raise RuntimeError(f"{reply.blob.path} ended while it was served")
    return piece


def _flipped(piece: bytes, flip_at: int | None, start: int) -> bytes:
    if flip_at is None or not start <= flip_at < start + len(piece):
        return piece
    changed = bytearray(piece)
    changed[flip_at - start] ^= 1
    return bytes(changed)


def _n_unsent(connection: socket.socket) -> int:
    answer = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, "little")
