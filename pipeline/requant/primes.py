"""Bucket sizes found again from a table's rows: primes one after the other, of a known sum."""

from __future__ import annotations

from collections import deque


def prime_run(total: int, n: int) -> tuple[int, ...] | None:
    """The ``n`` consecutive primes whose sum is ``total``; nothing if no such run has it.

    Sums of runs grow with their first prime, so the one run around the mean tells.
    """
    # Half a second of import that few commands need.
    from sympy import nextprime, prevprime

    if n < 1 or total < 2 * n:
        return None
    first = total // n
    run = deque([int(prevprime(first + 1)) if first > 1 else 2])
    while len(run) < n and run[0] > 2:
        run.appendleft(int(prevprime(run[0])))
    while len(run) < n:
        run.append(int(nextprime(run[-1])))
    while sum(run) < total:
        run.append(int(nextprime(run[-1])))
        run.popleft()
    return tuple(run) if sum(run) == total else None
