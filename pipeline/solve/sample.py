"""Rows of a tensor to measure types on: few, the same ones every time, spread over all experts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pipeline.measure import sample_rows
from pipeline.model.targets.tensor import Combine, TargetTensor
from pipeline.source.reader import SourceReader

Floats = NDArray[np.float32]

RUN_WEIGHTS = 1 << 20
"""Most weights of one run: rows of a whole small tensor come in several."""


@dataclass(frozen=True, slots=True)
class SampledRows:
    """Decoded rows of one stored matrix, the ``no``-th of its tensor.

    ``rows``: [n, n_cols]; ``bound`` is at least their largest absolute value.
    """

    no: int
    rows: Floats
    bound: float


def read_sample(target: TargetTensor, source: SourceReader, n_rows: int) -> list[SampledRows]:
    """Up to ``n_rows`` rows: the first, the last, and between them at even steps.

    A stack of more matrices than that gives one row each of as many of them; a product of two
    matrices gives rows of the product.

    Raises:
        SourceError: Reading failed.
        DecodeError: A stored value cannot be decoded.
    """
    rows = sample_rows(target.n_rows, n_rows)
    if target.combine is Combine.PRODUCT:
        return [_product(target, source, run) for run in _runs(rows, (0,), target.n_cols)]
    starts = list(accumulate((m.n_rows for m in target.matrices[:-1]), initial=0))
    sampled = []
    for run in _runs(rows, starts, target.n_cols):
        no = bisect_right(starts, run.start) - 1
        out = np.empty((len(run), target.n_cols), np.float32)
        bound = source.decode_rows(target.matrices[no], run.start - starts[no], out)
        sampled.append(SampledRows(no, out, bound))
    return sampled


def _product(target: TargetTensor, source: SourceReader, run: range) -> SampledRows:
    rows = np.ones((len(run), target.n_cols), np.float32)
    factor = np.empty_like(rows)
    bound = 1.0
    for matrix in target.matrices:
        bound *= source.decode_rows(matrix, run.start, factor)
        rows *= factor
    return SampledRows(0, rows, bound)


def _runs(rows: Sequence[int], starts: Sequence[int], n_cols: int) -> Iterator[range]:
    """Adjacent rows together, never across one of ``starts``, and not too many at a time."""
    most = max(1, RUN_WEIGHTS // n_cols)
    first_rows = frozenset(starts)
    begin = end = rows[0]
    for row in rows:
        if row > end or row in first_rows or end - begin >= most:
            if end > begin:
                yield range(begin, end)
            begin = row
        end = row + 1
    yield range(begin, end)
