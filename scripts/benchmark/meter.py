"""Counters of this process and machine, summed lap by lap."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Numbers = dict[str, float]


class Meter:
    """Sums of wall time, CPU time and bytes, lap by lap, and of thread time inside calls."""

    def __init__(self) -> None:
        self.sums: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()
        self._last = self._counters()

    def start(self) -> None:
        """Forget what happened since the last lap."""
        self._last = self._counters()

    def lap(self, name: str) -> None:
        """Add everything since the last lap or start to ``name``."""
        now = self._counters()
        for key, value in now.items():
            self.sums[f"{name}_{key}"] += value - self._last[key]
        self._last = now

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Add this thread's CPU time to ``name``."""
        begin = time.thread_time()
        yield
        spent = time.thread_time() - begin
        with self._lock:
            self.sums[f"{name}_cpu"] += spent

    def _counters(self) -> Numbers:
        machine = Path("/proc/stat").read_text().splitlines()[0]
        # user nice system idle iowait irq softirq steal
        ticks = [int(word) for word in machine.split()[1:9]]
        moved = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {
            "wall": time.perf_counter(),
            "cpu": time.process_time(),
            "busy": (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"),
            "rchar": int(moved["rchar"]),
            "wchar": int(moved["wchar"]),
        }
