"""Which answers go wrong: by file, method, origin, byte position and number."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.hub_server.call import Call, Origin
from tests.hub_server.effects import Delivery, Effect
from tests.hub_server.reply import Reply


@dataclass(frozen=True, slots=True)
class Fault:
    """An effect, and the answers it strikes: ``times`` of them from the ``nth`` that matches on.

    Args:
        effect: What goes wrong.
        file: A pattern of names inside the repository, or of ``api/model``, ``api/revision``,
            ``api/tree``, ``api/paths-info``, ``api/refs``, ``api/auth-check``.
        nth: The first match to strike, from 1.
        times: How many in a row; None for all from there on.
        position: A byte of the file: only answers that carry it match, and the effect happens
            there. Without it, effects in a body count from the body's first byte.
        method: None for any.
        origin: ``hub`` or ``cdn``; None for both.
    """

    effect: Effect
    file: str = "*"
    nth: int = 1
    times: int | None = 1
    position: int | None = None
    method: str | None = "GET"
    origin: Origin | None = None

    def matches(self, call: Call, reply: Reply) -> bool:
        """Whether this answer counts."""
        return (
            fnmatchcase(call.file, self.file)
            and self.method in (None, call.method)
            and self.origin in (None, call.origin)
            and self.effect.fits(call, reply)
            and self._is_inside(reply)
        )

    def strikes(self, n: int) -> bool:
        """Whether the ``n``-th match, from 1, is struck."""
        return n >= self.nth and (self.times is None or n < self.nth + self.times)

    def applied(self, delivery: Delivery) -> Delivery:
        """The delivery with the effect, the position counted from the body's first byte."""
        place = None if self.position is None else self.position - delivery.reply.first
        return self.effect.applied(delivery, place)

    def _is_inside(self, reply: Reply) -> bool:
        if self.position is None:
            return True
        return reply.first <= self.position < reply.first + reply.nbytes


class Faults:
    """All faults of a server, and how often each has matched."""

    def __init__(self) -> None:
        self._n_matches: list[tuple[Fault, int]] = []
        self._lock = threading.Lock()

    def add(self, fault: Fault) -> None:
        """Let ``fault`` strike from now on, with those that are there already."""
        with self._lock:
            self._n_matches.append((fault, 0))

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._n_matches.clear()

    def strike(self, call: Call, reply: Reply) -> list[Fault]:
        """Count the answer, and give the faults that strike it."""
        with self._lock:
            self._n_matches = [
                (fault, n + fault.matches(call, reply)) for fault, n in self._n_matches
            ]
            return [
                fault
                for fault, n in self._n_matches
                if fault.matches(call, reply) and fault.strikes(n)
            ]
