"""Every request in the order of arrival, with what was answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tests.hub_server.call import Call, Origin


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for and what was sent.

    ``nbytes`` counts bytes of the body that were handed to the socket, so far; ``status`` is 0
    before an answer begins and stays 0 without one. ``at`` is in seconds of the monotonic clock,
    ``faults`` names the effects that struck.
    """

    origin: Origin
    method: str
    path: str
    query: Mapping[str, list[str]]
    file: str
    range: str | None
    is_authorized: bool
    at: float
    status: int = 0
    nbytes: int = 0
    faults: tuple[str, ...] = ()


class Log:
    """Grows by one entry a request; entries are brought up to date while an answer is sent."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._lock = threading.Lock()

    @property
    def requests(self) -> tuple[Request, ...]:
        """All of them, as they stand now."""
        with self._lock:
            return tuple(self._requests)

    def clear(self) -> None:
        """Forget the finished and the running ones."""
        with self._lock:
            self._requests = []

    def enter(self, call: Call) -> Entry:
        """A new entry."""
        request = Request(
            origin=call.origin,
            method=call.method,
            path=call.url_path,
            query=call.query,
            file=call.file,
            range=call.headers.get("range"),
            is_authorized="authorization" in call.headers,
            at=time.monotonic(),
        )
        with self._lock:
            self._requests.append(request)
            return Entry(self._requests, len(self._requests) - 1, self._lock)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log while its request is answered."""

    requests: list[Request]
    index: int
    lock: threading.Lock

    def begin(self, status: int, faults: tuple[str, ...]) -> None:
        """An answer is chosen."""
        with self.lock:
            request = self.requests[self.index]
            self.requests[self.index] = replace(request, status=status, faults=faults)

    def count(self, nbytes: int) -> None:
        """Bytes of the body: counted before they are sent, taken back if they could not be."""
        with self.lock:
            request = self.requests[self.index]
            self.requests[self.index] = replace(request, nbytes=request.nbytes + nbytes)
