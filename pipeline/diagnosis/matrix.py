"""An importance matrix given in place of a model: what it was made with, what it never saw."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pipeline.diagnosis.finding import Finding, Mend, Severity, counted
from pipeline.diagnosis.identity import Fact
from pipeline.errors import QuantmillError
from pipeline.importance.coverage import THRESHOLD
from pipeline.importance.matrix import ImportanceMatrix, read_importance

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")


def importance_at(path: Path) -> ImportanceMatrix | None:
    """The matrix at ``path``, if that is what lies there."""
    try:
        return read_importance(path)
    except QuantmillError:
        return None


def why_no_importance(path: Path) -> str:
    """Why the matrix at ``path`` cannot be read."""
    try:
        read_importance(path)
    except QuantmillError as error:
        return error.message()
    return ""


def matrix_facts(matrix: ImportanceMatrix) -> Iterator[Fact]:
    """What a matrix says of itself."""
    yield Fact("what", f"an importance matrix ({matrix.form}), no model")
    yield Fact("datasets", ", ".join(matrix.datasets) or "not said")
    chunks = matrix.n_chunks
    yield Fact("chunks", "not said" if chunks is None else f"{chunks:,}")
    yield Fact("entries", f"{matrix.n_entries:,}")
    layers = {int(m[1]) for name in matrix.names if (m := _STACK.fullmatch(name))}
    if layers:
        yield Fact("experts", f"entries for {counted(len(layers), 'layer')} of expert stacks")
    yield Fact("use", f"scripts/run RunRecipe --recipe ... --source ... --imatrix {matrix.path}")


def matrix_findings(matrix: ImportanceMatrix) -> Iterator[Finding]:
    """Experts that the matrix has not seen, or hardly, and values that are none."""
    unseen = few = 0
    places: list[str] = []
    for name in matrix.names:
        if not _STACK.fullmatch(name):
            continue
        try:
            counts = matrix.counts(name)
        except QuantmillError as error:
            yield Finding(Severity.LOSES, error.message(), (name,))
            continue
        if counts is None:
            return
        n_unseen, n_few = int(np.sum(counts == 0)), int(np.sum((counts > 0) & (counts < THRESHOLD)))
        unseen, few = unseen + n_unseen, few + n_few
        if n_unseen or n_few:
            places.append(name)
    if places:
        yield Finding(
            Severity.LOSES,
            f"{counted(unseen, 'expert matrix', 'expert matrices')} never used by the text, "
            f"{few:,} by fewer than {THRESHOLD} tokens",
            tuple(places[:4]),
            Mend("They get a neutral weight. Measure over more, or other, text to change that."),
        )
