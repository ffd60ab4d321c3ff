"""Layers as they are written: ranges in a recipe, alternatives in a regular expression."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence


def as_ranges(wanted: Collection[int], present: Collection[int]) -> str:
    """``wanted`` layers as in `Selection.layers`; a range may run over layers not ``present``."""
    parts = (
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in _runs(wanted, present)
    )
    return ",".join(parts)


def as_pattern(wanted: Collection[int], present: Collection[int]) -> str:
    """``wanted`` layers as part of a regular expression, ``[0-9]+`` where all of ``present`` are.

    Every kind of expression has these forms, those of a shell too.
    """
    if set(wanted) >= set(present):
        return "[0-9]+"
    numbers = [str(layer) for layer in sorted(wanted)]
    return numbers[0] if len(numbers) == 1 else f"({'|'.join(numbers)})"


def _runs(wanted: Collection[int], present: Collection[int]) -> Iterator[Sequence[int]]:
    run: list[int] = []
    for layer in sorted(present):
        if layer in wanted:
            run.append(layer)
        elif run:
            yield run
            run = []
    if run:
        yield run
