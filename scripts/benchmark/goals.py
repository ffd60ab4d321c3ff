"""Goals, and the table lines whose medians are held against them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from benchmark.rounds import Rounds
from pipeline.fill import MEMORY_BASE_NBYTES, MEMORY_THREAD_NBYTES
from pipeline.report.tables import Row

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Goal:
    """What a median is held against, and how that is written."""

    text: str
    holds: Callable[[float], bool]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: ``value`` of the numbers under ``keys``, once per round."""

    name: str
    form: str
    keys: tuple[str, ...]
    value: Callable[..., float]
    goal: Goal | None = None

    def values(self, rounds: Rounds) -> tuple[float, ...]:
        """The value of each round."""
        turns = zip(*(rounds[key] for key in self.keys), strict=True)
        return tuple(self.value(*numbers) for numbers in turns)

    def verdict(self, rounds: Rounds) -> str:
        """Whether the median reaches the goal."""
        if self.goal is None:
            return ""
        return "reached" if self.goal.holds(median(self.values(rounds))) else "MISSED"

    def row(self, rounds: Rounds) -> Row:
        """Median, lowest and highest as text, goal and verdict."""
        values = self.values(rounds)
        shown = map(self.form.format, (median(values), min(values), max(values)))
        goal = self.goal.text if self.goal else ""
        return Row((self.name, *shown, goal, self.verdict(rounds)))


KERNEL_SHARE = Goal(">= 85 %", lambda value: value >= 0.85)
EQUAL = Goal("1, within 0.1 %", lambda value: abs(value - 1) < 0.001)


def speedup(n_threads: int) -> Goal:
    return Goal(f">= {0.95 * n_threads:.2f}", lambda value: value >= 0.95 * n_threads)


def memory(n_threads: int) -> Goal:
    limit = MEMORY_BASE_NBYTES + n_threads * MEMORY_THREAD_NBYTES
    return Goal(f"<= {limit // MIB}", lambda value: value * MIB <= limit)
