"""The answers around an answer: what a little less would cost, and what a little more would buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.quant.types import GgmlType
from pipeline.solve.candidates import Group
from pipeline.solve.choose import Answer, search, with_limit
from pipeline.solve.milp import PROVED, Option, Picks
from pipeline.solve.question import Question

STEPS = (0.80, 0.85, 0.90, 0.95, 1.0, 1.05, 1.10, 1.20, 1.35)
"""The limits that are looked at, as parts of the one asked for."""

_GB = 10**9
_SMALL = 50
"""A step of 1 GB is for limits of at least this many; below, it is this part of the limit."""


@dataclass(frozen=True, slots=True)
class Point:
    """One answer on the way: the bytes it uses of the limit, and the sum of all errors left."""

    limit_nbytes: int
    nbytes: int
    error: float
    gap: float


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another type for a group, by what changes from the one it got."""

    type: GgmlType
    nbytes: int
    error: float


@dataclass(frozen=True, slots=True)
class GroupAnswer:
    """What a group got, and its options one step smaller and larger that make sense.

    ``error`` is its part of the sum that was made least, ``rmse`` its tensors' relative root mean
    square error.
    """

    group: Group
    type: GgmlType
    nbytes: int
    error: float
    rmse: float
    smaller: Neighbour | None
    larger: Neighbour | None


@dataclass(frozen=True, slots=True)
class Step:
    """What a little more of the limit buys: the error that goes, and who changes for it."""

    nbytes: int
    error: float
    changes: tuple[tuple[Group, GgmlType, GgmlType], ...]


@dataclass(frozen=True, slots=True)
class Frontier:
    """Answers along the limit numbered ``axis``, the one that decides.

    Every point is another answer; all have ``fixed_error`` in them, of what is not free. ``next``
    is what a little more of the limit buys.
    """

    axis: int
    points: tuple[Point, ...]
    next: Step | None
    fixed_error: float


def frontier(question: Question, answer: Answer, *, seconds: float) -> Frontier:
    """The answers at `STEPS`; those too small for any choice are left out.

    Headers are taken to be those of ``answer``: a point may be off by the header of a file.
    """
    axis = binding(question, answer, seconds=seconds)
    options = [question.options(group) for group in question.groups]
    fixed_error = question.fixed_error()
    asked = question.limits[axis].nbytes
    least = _used(question, options, [0] * len(options), axis, answer.headers)
    most = _used(question, options, [len(group) - 1 for group in options], axis, answer.headers)
    points: list[Point] = []
    for step in STEPS:
        nbytes = int(asked * step)
        if step == 1.0:
            picks = answer.picks
        elif least <= nbytes and (step < 1 or points[-1].nbytes < most):
            picks = search(
                with_limit(question, axis, nbytes), options, answer.headers, seconds=seconds
            )
        else:
            continue
        used = _used(question, options, picks.options, axis, answer.headers)
        points.append(Point(nbytes, used, fixed_error + picks.error, picks.gap))
    more = _next(question, answer, options, axis, seconds)
    return Frontier(axis, _different(points, asked), more, fixed_error)


def binding(question: Question, answer: Answer, *, seconds: float) -> int:
    """Number of the limit that decides: without it, less would be lost.

    Of several, and where none does so alone, it is the one that the answer comes closest to, in
    parts of the limit; one that every choice takes as much of decides nothing.
    """
    options = [question.options(group) for group in question.groups]
    slack = [
        1 - n / limit.nbytes if limit.nbytes else 0.0
        for n, limit in zip(answer.used, question.limits, strict=True)
    ]
    order = sorted(range(len(slack)), key=lambda at: slack[at])
    deciding = [at for at in order if _differs(options, at)] or order
    if len(deciding) == 1:
        return deciding[0]
    for at in deciding:
        most = sum(max(option.costs[at] for option in group) for group in options)
        open_end = question.fixed_cost(question.limits[at]) + answer.headers + most
        picks = search(with_limit(question, at, open_end), options, answer.headers, seconds=seconds)
        if picks.error < answer.error * (1 - PROVED):
            return at
    return deciding[0]


def _differs(options: Sequence[Sequence[Option]], at: int) -> bool:
    return any(len({option.costs[at] for option in group}) > 1 for group in options)


def _different(points: Sequence[Point], asked: int) -> tuple[Point, ...]:
    """Every answer once; of equal ones that to what was asked, else the first."""
    found: dict[tuple[int, float], Point] = {}
    for point in points:
        key = (point.nbytes, point.error)
        if key not in found or point.limit_nbytes == asked:
            found[key] = point
    return tuple(found.values())


def _next(
    question: Question,
    answer: Answer,
    options: Sequence[Sequence[Option]],
    axis: int,
    seconds: float,
) -> Step | None:
    asked = question.limits[axis].nbytes
    step = _GB if asked >= _SMALL * _GB else asked // _SMALL
    more = with_limit(question, axis, asked + step)
    picks = search(more, options, answer.headers, seconds=seconds)
    changes = _changes(question, answer.picks, picks)
    if picks.error >= answer.error or not changes:
        return None
    return Step(step, answer.error - picks.error, changes)


def _changes(
    question: Question, before: Picks, after: Picks
) -> tuple[tuple[Group, GgmlType, GgmlType], ...]:
    pairs = zip(question.groups, before.options, after.options, strict=True)
    return tuple((group, group.types[a], group.types[b]) for group, a, b in pairs if a != b)


def _used(
    question: Question,
    options: Sequence[Sequence[Option]],
    picks: Sequence[int],
    axis: int,
    headers: int,
) -> int:
    limit = question.limits[axis]
    free = sum(group[n].costs[axis] for group, n in zip(options, picks, strict=True))
    return free + question.fixed_cost(limit) + limit.has_headers * headers


def group_answers(question: Question, answer: Answer) -> tuple[GroupAnswer, ...]:
    """What every group got."""
    return tuple(
        _group_answer(question, group, number)
        for group, number in zip(question.groups, answer.picks.options, strict=True)
    )


def _group_answer(question: Question, group: Group, number: int) -> GroupAnswer:
    """Neighbours are on the group's own frontier: smaller and worse, or larger and better."""
    options = question.options(group)
    sizes = [group.nbytes(ggml_type) for ggml_type in group.types]

    def neighbour(n: int) -> Neighbour:
        error = options[n].error - options[number].error
        return Neighbour(group.types[n], sizes[n] - sizes[number], error)

    smaller = [n for n in range(len(sizes)) if sizes[n] < sizes[number]]
    larger = [
        n
        for n in range(len(sizes))
        if sizes[n] > sizes[number] and options[n].error < options[number].error
    ]
    # Of all that are smaller, the one that loses least; of the larger, the cheapest that gains.
    down = min(smaller, key=lambda n: (options[n].error, -sizes[n]), default=None)
    up = min(larger, key=lambda n: (sizes[n], options[n].error), default=None)
    return GroupAnswer(
        group,
        group.types[number],
        sizes[number],
        options[number].error,
        question.rmse(group.targets, group.types[number]),
        None if down is None else neighbour(down),
        None if up is None else neighbour(up),
    )
