"""The choice itself: of every group one option, all costs within their limits, least error.

A multiple-choice knapsack with several limits, given to HiGHS as a mixed-integer linear programme.
Costs go in as whole numbers of their largest common unit, which loses nothing. The solver works in
floating point with tolerances all the same, so what it returns is added up again exactly, and a
choice that is a byte too large is forbidden by name and the search repeated: no limit is ever
exceeded, and nothing that just fits is lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

PROVED = 1e-9
"""A remaining gap below this is rounding."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to make a group: its error, and what it takes of each limit."""

    error: float
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picks:
    """For every group the number of the option taken.

    ``gap``: no other choice has an error smaller by more than this part of it.
    """

    options: tuple[int, ...]
    error: float
    gap: float

    @property
    def is_proved(self) -> bool:
        """Whether no better choice exists."""
        return self.gap <= PROVED


def least_error(
    groups: Sequence[Sequence[Option]], rooms: Sequence[int], *, seconds: float
) -> Picks | None:
    """The choice of least error whose costs are within ``rooms``; nothing where none is.

    Args:
        groups: At least one option each, all with as many costs as there are rooms.
        rooms: Limits, in the unit of the costs.
        seconds: When the search ends with the best choice found so far.

    Raises:
        TimeoutError: There is none by then.
        ArithmeticError: The solver gave up for another reason.
    """
    # Imported only where something is solved: scipy takes half a second to load.
    from pipeline.solve.highs import Programme

    kept = [undominated(group) for group in groups]
    sensible = [[group[n] for n in numbers] for group, numbers in zip(groups, kept, strict=True)]
    programme = Programme(sensible, rooms)
    ends_at = time.monotonic() + seconds
    while True:
        found = programme.solve(max(1.0, ends_at - time.monotonic()))
        if found is None:
            return None
        picks, gap = found
        numbers = tuple(kept[g][n] for g, n in enumerate(picks))
        chosen = [groups[g][n] for g, n in enumerate(numbers)]
        if all(sum(o.costs[at] for o in chosen) <= room for at, room in enumerate(rooms)):
            return Picks(numbers, sum(o.error for o in chosen), gap)
        if time.monotonic() > ends_at:
            raise TimeoutError
        programme.forbid(picks)


def undominated(group: Sequence[Option]) -> list[int]:
    """Numbers of the options that no other is at least as good as in error and every cost."""
    order = sorted(range(len(group)), key=lambda n: (group[n].costs, group[n].error))
    kept: list[int] = []
    for n in order:
        if not any(_is_as_good(group[m], group[n]) for m in kept):
            kept.append(n)
    return sorted(kept)


def _is_as_good(one: Option, other: Option) -> bool:
    costs = zip(one.costs, other.costs, strict=True)
    return one.error <= other.error and all(a <= b for a, b in costs)
