"""HiGHS as scipy carries it writes notes of its developers to standard output; nobody asked."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_STDOUT = 1
_lock = threading.Lock()


@contextmanager
def quiet() -> Iterator[None]:
    """What this process writes to its standard output meanwhile goes nowhere."""
    libc = ctypes.CDLL(None)
    with _lock:
        sys.stdout.flush()
        libc.fflush(None)
        kept, nowhere = os.dup(_STDOUT), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, _STDOUT)
            yield
        finally:
            # What the library has printed lies in a buffer of C's until now.
            libc.fflush(None)
            os.dup2(kept, _STDOUT)
            os.close(kept)
            os.close(nowhere)
