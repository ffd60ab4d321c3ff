"""The choice itself: of every group one option, all costs within their limits, least error.

A multiple-choice knapsack with several limits, given to HiGHS as a mixed-integer linear programme.
Costs go in as whole numbers of their largest common unit, which loses nothing. The solver works in
floating point with tolerances all the same, so what it returns is added up again exactly, and a
choice that is a byte too large is forbidden by name and the search repeated: no limit is ever
exceeded. Nor is the solver believed when it says that nothing fits or that nothing is better, which
it has been seen to say wrongly: `pipeline.solve.proof` proves either, or tells how much is open.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.solve.highs import Programme

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

    ``gap``: no other choice has an error smaller by more than this part of it, as it was reckoned
    apart from the solver. ``is_done``: the solver searched to its end and knows no better one.
    """

    options: tuple[int, ...]
    error: float
    gap: float
    is_done: bool = True

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
        ArithmeticError: The solver gave up for another reason, or finds nothing and that is not so.
    """
    # Imported only where something is solved: scipy takes half a second to load.
    from pipeline.solve.highs import Programme
    from pipeline.solve.proof import prove

    kept = [undominated(group) for group in groups]
    sensible = [[group[n] for n in numbers] for group, numbers in zip(groups, kept, strict=True)]
    programme = Programme(sensible, rooms)
    picks, is_done = _searched(programme, sensible, rooms, seconds)
    found = float("inf") if picks is None else _error(sensible, picks)
    proof = prove(sensible, rooms, programme.prices(), found)
    best = proof.better or picks
    if best is None:
        if proof.gap > 0:
            raise ArithmeticError("it finds no choice that fits, and that is not proved")
        return None
    numbers = tuple(kept[g][n] for g, n in enumerate(best))
    return Picks(numbers, _error(sensible, best), proof.gap, is_done)


def _searched(
    programme: Programme, groups: Sequence[Sequence[Option]], rooms: Sequence[int], seconds: float
) -> tuple[tuple[int, ...] | None, bool]:
    """What the solver finds that is really within ``rooms``, and whether it searched to the end."""
    ends_at = time.monotonic() + seconds
    while True:
        found = programme.solve(max(1.0, ends_at - time.monotonic()))
        if found is None:
            return None, True
        picks, is_done = found
        chosen = [group[n] for group, n in zip(groups, picks, strict=True)]
        if all(sum(o.costs[at] for o in chosen) <= room for at, room in enumerate(rooms)):
            return picks, is_done
        if time.monotonic() > ends_at:
            raise TimeoutError
        programme.forbid(picks)


def _error(groups: Sequence[Sequence[Option]], picks: Sequence[int]) -> float:
    return sum(group[n].error for group, n in zip(groups, picks, strict=True))


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
