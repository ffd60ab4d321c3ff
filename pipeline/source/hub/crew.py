"""Threads that work through one list of jobs and stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pipeline.source.hub.retry import Stopped

Job = TypeVar("Job")

_GRACE_S = 1.0
"""How long a crew that stops waits for its threads; one may hang in a read for a minute."""


class Crew(Generic[Job]):
    """Runs ``work`` on every job; one instance, one run.

    The threads are daemons and own what they touch, so that one which hangs in a dead connection
    can be left behind when another has failed or the user has pressed Ctrl-C.

    Args:
        work: What to do with a job; called from several threads. It looks at ``stopped`` often.
        stopped: Set when no more work is wanted.
    """

    def __init__(self, work: Callable[[Job], None], stopped: threading.Event) -> None:
        self._work = work
        self._stopped = stopped
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._n_running = 0
        self._failures: list[BaseException] = []

    def run(self, jobs: Iterable[Job], n_threads: int) -> None:
        """Return when every job is done.

        Raises:
            BaseException: Whatever the first failing job raised.
        """
        waiting = list(reversed(list(jobs)))
        self._n_running = min(n_threads, len(waiting))
        threads = [
            threading.Thread(target=self._serve, args=(waiting,), daemon=True, name="fetch")
            for _ in range(self._n_running)
        ]
        try:
            for thread in threads:
                thread.start()
            if threads:
                self._over.wait()
        except BaseException:
            self._stopped.set()
            raise
        for thread in threads:
            thread.join(_GRACE_S if self._failures else None)
        if self._failures:
            raise self._failures[0]

    def _serve(self, waiting: list[Job]) -> None:
        try:
            while not self._stopped.is_set():
                with self._lock:
                    if not waiting:
                        return
                    job = waiting.pop()
                self._work(job)
        except Stopped:
            return
        except BaseException as error:
            with self._lock:
                self._failures.append(error)
            self._stopped.set()
        finally:
            with self._lock:
                self._n_running -= 1
                if self._failures or not self._n_running:
                    self._over.set()
