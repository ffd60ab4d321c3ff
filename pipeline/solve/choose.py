"""The best answer to a question, held against the real plan; the answers around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import PlanError, QuantmillError, raise_problems
from pipeline.quant.types import GgmlType
from pipeline.solve.limits import Limit
from pipeline.solve.milp import Option, Picks, least_error
from pipeline.solve.question import Question

FileNbytes = Callable[[Mapping[str, GgmlType]], int]
"""Types by tensor name -> exact bytes of all files that have them."""

_MOST_PARTS = 8

_MOST_PLANS = 8
"""Header bytes follow from the number of files: a search settles after one or two plans."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The choice of least error within the limits.

    ``picks`` are numbers of types, one per group; ``used`` what each limit's bytes come to, headers
    included where the limit counts them; ``headers`` the bytes of headers and padding that were
    reckoned with.
    """

    picks: Picks
    types: Mapping[str, GgmlType]
    used: tuple[int, ...]
    headers: int

    @property
    def error(self) -> float:
        """What was made least, over the free tensors."""
        return self.picks.error


def choose(question: Question, file_nbytes: FileNbytes, *, seconds: float) -> Answer:
    """The types of least error within every limit.

    Args:
        question: What may be chosen, and what it costs.
        file_nbytes: The plan's own sum, for what no tensor's size tells: headers and their padding.
        seconds: How long one search may take.

    Raises:
        PlanError: No choice fits; the smallest is told, and by how much it does not.
        Problems: The smallest choice misses several limits.
    """
    headers = require_fits(question, file_nbytes)
    options = [question.options(group) for group in question.groups]
    for _ in range(_MOST_PLANS):
        _require_fits(question, headers)
        picks = search(question, options, headers, seconds=seconds)
        types = question.types_of(picks.options)
        found = _headers(question, types, file_nbytes)
        used = tuple(
            question.used(types, limit) + limit.has_headers * found for limit in question.limits
        )
        if all(n <= limit.nbytes for n, limit in zip(used, question.limits, strict=True)):
            return Answer(picks, types, used, found)
        headers = max(found, headers + 1)
    raise PlanError(
        "the number of files changes with every choice that just fits",
        found=f"{_MOST_PLANS} plans that were all too large",
        next_step="Lower the limit by a few thousand bytes, or choose another shard size.",
    )


def search(
    question: Question,
    options: Sequence[Sequence[Option]],
    headers: int,
    *,
    seconds: float,
) -> Picks:
    """The picks of least error, with so many bytes of headers.

    Raises:
        PlanError: None fits all limits at once, or none was found in time.
    """
    rooms = [
        limit.nbytes - question.fixed_cost(limit) - limit.has_headers * headers
        for limit in question.limits
    ]
    try:
        picks = least_error(options, rooms, seconds=seconds)
    except TimeoutError as error:
        raise PlanError(
            f"no choice was found in {seconds:g} seconds", next_step="Allow more seconds."
        ) from error
    except ArithmeticError as error:
        raise PlanError(
            "the solver gave up on this budget",
            found=str(error),
            next_step="Another limit, or another granularity, gives it other numbers.",
        ) from error
    if picks is None:
        raise PlanError(
            "no choice of types fits all limits of the budget at once",
            next_step="Each limit can be met alone: raise one of them.",
        )
    return picks


def require_fits(question: Question, file_nbytes: FileNbytes) -> int:
    """The bytes of headers and padding with the smallest types, which must fit every limit.

    A matter of sizes: ``question`` needs no losses for it.

    Raises:
        PlanError: They do not; it is told by how much, and what is fixed.
        Problems: They miss several limits.
    """
    headers = _headers(question, smallest_types(question), file_nbytes)
    _require_fits(question, headers)
    return headers


def smallest_types(question: Question) -> dict[str, GgmlType]:
    """Every group in the smallest of its types."""
    return question.types_of([0] * len(question.groups))


def _headers(question: Question, types: Mapping[str, GgmlType], file_nbytes: FileNbytes) -> int:
    counting = [limit for limit in question.limits if limit.has_headers]
    return file_nbytes(types) - question.used(types, counting[0]) if counting else 0


def _require_fits(question: Question, headers: int) -> None:
    """Refuse what even the smallest types are too large for."""
    problems: list[QuantmillError] = []
    costs = [question.costs(group) for group in question.groups]
    for at, limit in enumerate(question.limits):
        least = question.fixed_cost(limit) + limit.has_headers * headers
        least += sum(min(option[at] for option in group) for group in costs)
        if least > limit.nbytes:
            problems.append(_too_large(question, limit, least))
    raise_problems("no choice of types fits the budget", problems)


def _too_large(question: Question, limit: Limit, least: int) -> PlanError:
    parts = question.fixed_parts(limit)
    named = ", ".join(f"{what} ({n:,})" for what, n in parts[:_MOST_PARTS])
    more = f" and {len(parts) - _MOST_PARTS:,} more" if len(parts) > _MOST_PARTS else ""
    return PlanError(
        f"no choice of types fits the budget: {limit.title}",
        expected=f"{limit.nbytes:,} at most",
        found=f"{least:,} with the smallest types allowed, {least - limit.nbytes:,} too many; "
        f"{question.fixed_cost(limit):,} of them fixed",
        next_step="Allow smaller types, raise the limit to that, or free what is fixed"
        + (f": {named}{more}." if parts else "."),
    )


def with_limit(question: Question, at: int, nbytes: int) -> Question:
    """The same question with another number for one limit."""
    limits = list(question.limits)
    limits[at] = replace(limits[at], nbytes=nbytes)
    return replace(question, limits=tuple(limits))
