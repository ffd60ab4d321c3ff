"""What an engram check found: rows of expected and found, and an error for each that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import EngramError


@dataclass(frozen=True, slots=True)
class EngramRow:
    """One thing that was checked."""

    what: str
    expected: str
    found: str
    ok: bool


@dataclass(frozen=True, slots=True)
class EngramReport:
    """All that was checked, in order, and the problems among it."""

    subject: str
    rows: tuple[EngramRow, ...]
    problems: tuple[EngramError, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing differed."""
        return not self.problems


class EngramChecks:
    """Collects the rows of one report.

    Args:
        subject: What is checked: ``checkpoint``, or a GGUF layout.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._rows: list[EngramRow] = []
        self._problems: list[EngramError] = []

    def equal(
        self,
        what: str,
        expected: object,
        found: object,
        *,
        tensor: str | None = None,
        cause: str | None = None,
    ) -> bool:
        """Add a row; where the two differ, also a problem, with its likely cause.

        Returns:
            Whether they are equal.
        """
        ok = expected == found
        row = EngramRow(what, _shown(expected), _shown(found), ok)
        self._rows.append(row)
        if not ok:
            self._problems.append(
                EngramError(
                    f"engram: {what}: not as computed",
                    tensor=tensor,
                    expected=row.expected,
                    found=row.found,
                    next_step=cause,
                )
            )
        return ok

    def same_run(
        self, what: str, expected: Sequence[int], found: Sequence[int], *, cause: str | None = None
    ) -> bool:
        """Add a row for two long lists of numbers; it shows the first place where they differ."""
        if tuple(expected) == tuple(found):
            return self.equal(what, f"{len(expected)} numbers", f"{len(found)} numbers")
        if len(expected) != len(found):
            return self.equal(
                what, f"{len(expected)} numbers", f"{len(found)} numbers", cause=cause
            )
        at = next(n for n, pair in enumerate(zip(expected, found, strict=True)) if len({*pair}) > 1)
        shown = [f"{numbers[at]:,} at position {at}" for numbers in (expected, found)]
        return self.equal(what, *shown, cause=cause)

    def report(self) -> EngramReport:
        """The report over everything added so far."""
        return EngramReport(self._subject, tuple(self._rows), tuple(self._problems))


def row_cause(
    found: Sequence[int], at: int, sums: Sequence[int], layers: Sequence[int]
) -> str | None:
    """The likely reason for a wrong row count, in a sentence.

    Args:
        found: The row count of every engram layer.
        at: Which of them is wrong.
        sums: The computed row counts.
        layers: The layer numbers.
    """
    wrong, expected, layer = found[at], sums[at], layers[at]
    if wrong == expected:
        return None
    if wrong in sums:
        other = list(sums).index(wrong)
        if found[other] == expected:
            return f"The tables of layers {layers[other]} and {layer} are swapped."
        return (
            f"This is the row count of layer {layers[other]}: the primes were started again for "
            f"layer {layer} (they must run on over all layers), or one table was taken twice."
        )
    if wrong == sum(sums):
        return "This is the row count of all layers together: the tables were joined."
    if abs(wrong - expected) == 1:
        return f"One row {'more' if wrong > expected else 'less'} than the buckets need."
    if wrong < expected:
        return f"{expected - wrong:,} rows are missing."
    return f"There are {wrong - expected:,} rows more than the buckets need."


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
