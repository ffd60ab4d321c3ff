"""Whether a choice is the best, reckoned apart from the solver that found it.

With a price p >= 0 on every limit, no choice within the limits has an error below

    base = sum over groups of (least error + price of an option)  -  price of all that is allowed

and one that takes other options than those least ones is above it by what each of them costs more.
Any prices give such a bound, so it does not matter that they come from a solver; the bound itself
is reckoned in fractions. Choices whose bound is below the error that was found are then looked at
one group after the other (what is no larger and no worse than another stands for it), until none
is left, which is a proof, or a better one is, or there are too many to look at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from pipeline.solve.milp import PROVED, Option

MOST_STATES = 1 << 13
"""Partial choices that are held at a time; with more the proof is given up."""

_ROUNDING = 1e-12
"""More than sums of some thousand floats of one sign are off by, in parts."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Proof:
    """What is known of a choice: a ``better`` one, if there is, and the ``gap`` that is left.

    No choice has an error smaller than that of the better one, or else of the one that was asked
    about, by more than this part of it.
    """

    better: tuple[int, ...] | None
    gap: float


@dataclass(frozen=True, slots=True)
class _States:
    """Partial choices: what they take of each limit, their errors and how far above the base."""

    costs: Ints
    errors: Floats
    above: Floats


def prove(
    groups: Sequence[Sequence[Option]],
    rooms: Sequence[int],
    prices: Sequence[float],
    found: float,
) -> Proof:
    """Look for a choice with an error below ``found``.

    Args:
        groups: The options of each group; errors and costs are not below 0.
        rooms: Limits, in the unit of the costs; no sum of costs reaches 2^63.
        prices: Of each limit, in errors by unit; the better they are, the less is looked at.
        found: The error of a choice within the limits; infinite where none is known.
    """
    if not found:
        return Proof(None, 0.0)
    base, above = max(
        (_bound(groups, rooms, tried) for tried in (prices, [0.0] * len(rooms))),
        key=lambda bound: bound[0],
    )
    is_known = found < float("inf")
    spare = float(Fraction(found) * (1 - Fraction(PROVED)) - base) if is_known else found
    # Those that cost most to leave come first: they are soon settled.
    order = sorted(range(len(groups)), key=lambda g: -sorted([*above[g], np.inf])[1])
    better = _search(
        [groups[g] for g in order],
        [above[g] for g in order],
        _binding(groups, rooms),
        spare,
    )
    if better is None:
        gap = max(0.0, float((Fraction(found) - base) / Fraction(found))) if is_known else 1.0
        return Proof(None, gap)
    picks = [0] * len(groups)
    for g, pick in zip(order, better, strict=False):
        picks[g] = pick
    chosen = sum(groups[g][n].error for g, n in enumerate(picks))
    is_better = bool(better) and chosen < found * (1 - PROVED)
    return Proof(tuple(picks) if is_better else None, 0.0)


def _bound(
    groups: Sequence[Sequence[Option]], rooms: Sequence[int], prices: Sequence[float]
) -> tuple[Fraction, list[list[float]]]:
    """The base, and how far above its group's least each option is."""
    exact = [Fraction(price) for price in prices]
    base = -sum((p * room for p, room in zip(exact, rooms, strict=True)), Fraction())
    above = []
    for group in groups:
        priced = [
            sum((p * c for p, c in zip(exact, one.costs, strict=True)), Fraction(one.error))
            for one in group
        ]
        least = min(priced)
        base += least
        above.append([float(one - least) for one in priced])
    return base, above


def _binding(groups: Sequence[Sequence[Option]], rooms: Sequence[int]) -> dict[int, int]:
    """Limits that some choice exceeds, by number; of several that count alike the lowest."""
    lowest: dict[tuple[int, ...], tuple[int, int]] = {}
    for at, room in enumerate(rooms):
        if sum(max(option.costs[at] for option in group) for group in groups) > room:
            counted = tuple(option.costs[at] for group in groups for option in group)
            lowest[counted] = min(lowest.get(counted, (room, at)), (room, at))
    return {at: room for room, at in lowest.values()}


def _search(
    groups: Sequence[Sequence[Option]],
    above: Sequence[Sequence[float]],
    rooms: dict[int, int],
    spare: float,
) -> tuple[int, ...] | None:
    """The least of the choices that are not above the base by more than ``spare``.

    Empty where there is none; nothing where there are too many to tell.
    """
    costs = [np.array([[o.costs[at] for at in rooms] for o in g], np.int64) for g in groups]
    least = np.array([one.min(axis=0) for one in costs], np.int64).reshape(len(groups), len(rooms))
    limits = np.array(list(rooms.values()), object)
    states = _States(np.zeros((1, len(rooms)), np.int64), np.zeros(1), np.zeros(1))
    taken: list[tuple[Ints, Ints]] = []
    for at, group in enumerate(groups):
        # Python's integers: a limit may be larger, or lower, than any that fits into 64 bits.
        left = [int(n) for n in limits - least[at + 1 :].sum(axis=0).astype(object)]
        if any(n < 0 for n in left):
            return ()
        errors = np.array([option.error for option in group])
        n_grown = len(states.errors) * len(group)
        grown = _States(
            (states.costs[:, None] + costs[at]).reshape(n_grown, len(rooms)),
            (states.errors[:, None] + errors).ravel(),
            (states.above[:, None] + np.array(above[at])).ravel(),
        )
        fits = (grown.costs <= np.array(left, np.int64)).all(axis=1)
        kept = np.flatnonzero(fits & (grown.above * (1 - _ROUNDING) <= spare))
        kept = kept[_undominated(grown.costs[kept], grown.errors[kept])]
        if not len(kept):
            return ()
        if len(kept) > MOST_STATES:
            return None
        taken.append((kept // len(group), kept % len(group)))
        states = _States(grown.costs[kept], grown.errors[kept], grown.above[kept])
    picks, at = [], int(np.argmin(states.errors))
    for parents, numbers in reversed(taken):
        picks.append(int(numbers[at]))
        at = int(parents[at])
    return tuple(reversed(picks))


def _undominated(costs: Ints, errors: Floats) -> Ints:
    """Numbers of the states but for those that another is no larger and no worse than.

    With several limits, those are compared that differ in the first one alone.
    """
    if not len(errors):
        return np.zeros(0, np.int64)
    if not costs.shape[1]:
        return np.array([np.argmin(errors)])
    rest = costs[:, 1:].T
    order = np.lexsort((errors, costs[:, 0], *rest))
    sorted_rest = costs[order, 1:]
    segment = np.zeros(len(order), np.int64)
    segment[1:] = np.cumsum((sorted_rest[1:] != sorted_rest[:-1]).any(axis=1))
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(errors[order], kind="stable")] = np.arange(len(order))
    # Later segments lie wholly below earlier ones, so a running minimum starts anew in each.
    value = rank - segment * len(order)
    is_kept = np.ones(len(order), np.bool_)
    is_kept[1:] = value[1:] < np.minimum.accumulate(value)[:-1]
    return np.asarray(order[is_kept], np.int64)
