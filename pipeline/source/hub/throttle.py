"""A limit on bytes per second that any number of connections share."""

from __future__ import annotations

import threading

from pipeline.source.hub.retry import CLOCK, Clock

_BURST_S = 0.25
"""How much unused time may be made up for at once."""


class Throttle:
    """A token bucket, kept as the moment at which the next byte may pass.

    Args:
        nbytes_per_s: Bytes per second over all connections of this process together.
        clock: Time.
    """

    def __init__(self, nbytes_per_s: float, clock: Clock = CLOCK) -> None:
        assert nbytes_per_s > 0
        self._s_per_byte = 1 / nbytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock.now()

    def take(self, nbytes: int, stopped: threading.Event) -> None:
        """Return once ``nbytes`` more may pass, or as soon as ``stopped`` is set."""
        with self._lock:
            now = self._clock.now()
            self._free_at = max(self._free_at, now - _BURST_S) + nbytes * self._s_per_byte
            seconds = self._free_at - now
        if seconds > 0:
            self._clock.wait(seconds, stopped)
