"""Faults that pass, and how long to bear them: growing waits with jitter, and a last attempt."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import SourceError


class TransferFault(Exception):
    """Something that may be better at the next attempt.

    Args:
        reason: What happened, without a full stop.
        retry_after: Seconds that the server asked us to wait.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


class Stopped(Exception):
    """Another thread has failed or the user has had enough: leave what is at hand."""


def _wait(seconds: float, stopped: threading.Event) -> None:
    stopped.wait(seconds)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and chance; tests bring their own.

    ``wait`` gets seconds and an event that ends the wait early; ``jitter`` gives 0 ... 1.
    """

    now: Callable[[], float] = time.monotonic
    wait: Callable[[float, threading.Event], None] = _wait
    jitter: Callable[[], float] = random.random


CLOCK = Clock()


@dataclass(frozen=True, slots=True)
class Patience:
    """How many faults in a row are borne, and the waits between: ``first_s``, doubled each time.

    The defaults outlast about a quarter of an hour without network. A server that asks for a
    longer wait than ``most_asked_s`` is not waited for.
    """

    n_retries: int = 20
    first_s: float = 1.0
    most_s: float = 60.0
    most_asked_s: float = 1800.0

    def wait_s(self, n_faults: int, fault: TransferFault, jitter: float) -> float:
        """Seconds to wait after the ``n_faults``-th fault in a row; never less than asked."""
        doubled = min(self.most_s, self.first_s * 2.0 ** min(n_faults - 1, 32))
        if fault.retry_after is None:
            return doubled * (0.5 + jitter / 2)
        # Many clients were told the same moment; the jitter spreads them behind it.
        return fault.retry_after + jitter * self.first_s


PATIENCE = Patience()


class Attempts:
    """Counts the faults in a row of one transfer and waits after each; for one thread."""

    def __init__(
        self,
        what: str,
        patience: Patience,
        *,
        clock: Clock = CLOCK,
        stopped: threading.Event | None = None,
        noted: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._what = what
        self._patience = patience
        self._clock = clock
        self._stopped = stopped or threading.Event()
        self._noted = noted
        self._n_faults = 0

    def progressed(self) -> None:
        """Bytes came: what failed before counts no more."""
        self._n_faults = 0

    def failed(self, fault: TransferFault) -> None:
        """Wait for the next attempt.

        Raises:
            SourceError: That was the last one, or the server asks for too long a wait.
            Stopped: The transfer is no longer wanted.
        """
        self._n_faults += 1
        if self._n_faults > self._patience.n_retries:
            raise self._lost(f"{fault.reason}; {self._n_faults} attempts in a row")
        if (fault.retry_after or 0) > self._patience.most_asked_s:
            raise self._lost(f"{fault.reason}; the server asks to wait {fault.retry_after:,.0f} s")
        seconds = self._patience.wait_s(self._n_faults, fault, self._clock.jitter())
        self._noted(f"{self._what}: {fault.reason}; next attempt in {seconds:.1f} s.")
        self._clock.wait(seconds, self._stopped)
        if self._stopped.is_set():
            raise Stopped

    def _lost(self, found: str) -> SourceError:
        return SourceError(
            "a transfer from the hub failed again and again",
            file=self._what,
            found=found,
            next_step="Run the same command again later; finished pieces are kept.",
        )
