"""Progress for a person: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

LINE_SECONDS = 30.0
"""Seconds between plain lines."""


class Progress:
    """Bytes, rate, time left and current tensor of one file; safe from any thread."""

    def __init__(self, title: str, nbytes: int) -> None:
        self._title = title
        self._total = nbytes
        self._is_terminal = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._begin = self._said = time.monotonic()
        self._done = 0
        self._tensor = ""
        self._bar = tqdm(
            total=self._total,
            desc=self._title,
            unit="B",
            unit_scale=True,
            disable=not self._is_terminal,
            leave=False,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
        if error is None:
            self._say("whole")

    def at(self, block: str) -> None:
        """A worker begins ``block``."""
        tensor = block.partition(" ")[0]
        with self._lock:
            if tensor != self._tensor:
                self._tensor = tensor
                self._bar.set_postfix_str(tensor, refresh=False)

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more are in place."""
        with self._lock:
            self._done += nbytes
            self._bar.update(nbytes)
            if not self._is_terminal and time.monotonic() - self._said >= LINE_SECONDS:
                self._said = time.monotonic()
                self._say(self._tensor)

    def note(self, sentence: str) -> None:
        """Say something that a person should know of."""
        tqdm.write(f"{self._title}: {sentence}", file=sys.stderr)

    def _say(self, what: str) -> None:
        seconds = max(time.monotonic() - self._begin, 1e-9)
        rate = self._done / seconds
        left = (self._total - self._done) / rate if rate else 0.0
        sys.stderr.write(
            f"{self._title}: {self._done:,} of {self._total:,} bytes, "
            f"{rate / 1e6:.1f} MB/s, {left:.0f} s left, {what}\n"
        )
        sys.stderr.flush()
