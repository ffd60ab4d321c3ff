"""What quantizing lost, measured from the bytes in a file against the source they were made of.

A swapped pair of experts, a wrong scale or a lost row shows as an error that no type can explain.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import VerifyError
from pipeline.importance.columns import Importance, no_importance
from pipeline.model.roles import Role
from pipeline.plan import PlannedTensor, Transform
from pipeline.quant.backend import Quantizer
from pipeline.quant.dequant import can_decode, dequantize
from pipeline.quant.error_limits import ERROR_LIMITS
from pipeline.quant.guard import ABORTS_WITHOUT_IMPORTANCE, takes_importance
from pipeline.source.reader import SourceReader

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

TILE_WEIGHTS = 1 << 18
"""Weights compared at a time; memory stays near eight times as many bytes."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """What a tensor lost, over the sampled rows.

    ``squared_error`` and ``squared_norm`` are sums over ``n_rows`` sampled of ``n_rows_total``
    rows; ``limit`` is what the type explains, 0 for types and transforms that lose nothing.

    The weighted sums count each square as much as an importance matrix says, a column's mean weight
    being 1; ``weighted_without`` is the error that the same rows have when they are quantized
    without it. All are 0 where there is none.
    """

    name: str
    role: Role
    type_name: str
    n_rows: int
    n_rows_total: int
    squared_error: float
    squared_norm: float
    limit: float
    weighted_error: float = 0.0
    weighted_norm: float = 0.0
    weighted_without: float = 0.0

    @property
    def is_weighted(self) -> bool:
        """Whether it was made, and measured, with importance."""
        return self.weighted_norm > 0

    @property
    def rmse(self) -> float:
        """Relative root mean square error: sqrt(sum of e^2 / sum of x^2)."""
        return _relative(self.squared_error, self.squared_norm)

    @property
    def is_within(self) -> bool:
        """Whether the type explains the error; never for a value that is no number."""
        return self.rmse <= self.limit


def read_error(entry: Mapping[str, object]) -> TensorError:
    """A `TensorError` from the JSON object that it was written as.

    Raises:
        TypeError, ValueError, KeyError: ``entry`` is none.
    """
    error = TensorError(**entry)  # type: ignore[arg-type]
    return replace(error, role=Role(error.role))


@dataclass(frozen=True, slots=True)
class RoleError:
    """The relative error of all tensors of a role, and the worst of them."""

    role: Role
    n_tensors: int
    rmse: float
    worst: TensorError
    weighted: WeightedError | None


@dataclass(frozen=True, slots=True)
class WeightedError:
    """Relative weighted error of those tensors of a role that were made with importance.

    ``without``: what the same rows would have lost without it.
    """

    n_tensors: int
    rmse: float
    without: float


def measure_errors(
    tensors: Sequence[PlannedTensor],
    path: Path,
    source: SourceReader,
    *,
    n_rows: int,
    has: Callable[[str], bool] = lambda _: True,
    importance: Importance = no_importance,
    quantizer: Quantizer | None = None,
) -> tuple[TensorError, ...]:
    """The relative error of every tensor in a file, over a sample that is the same every time.

    Tensors in types that cannot be decoded here (those of ik_llama.cpp, without its library) are
    left out.

    Args:
        tensors: What the file holds, where, and from which matrices it was made.
        path: The file, finished or filled but unnamed.
        source: The open checkpoint.
        n_rows: Rows per tensor at most: the first, the last, and between them at even steps over
            all matrices and experts.
        has: Whether a stored matrix, by the name of its weight, is at hand; rows of others are
            left out of the sample.
        importance: What the tensors were made with.
        quantizer: Quantizes sampled rows without importance, to show what it is good for.

    Raises:
        SourceError: Reading a file failed.
    """
    assert n_rows > 0
    samples = [(t, _sampled(t, n_rows, has)) for t in tensors if can_decode(t.type)]
    return tuple(
        _measure(tensor, path, source, sample, importance, quantizer)
        for tensor, sample in samples
        if sample[0]
    )


def _sampled(
    tensor: PlannedTensor, n_rows: int, has: Callable[[str], bool]
) -> tuple[tuple[int, ...], int]:
    """The rows to measure, and how many rows they stand for."""
    rows = sample_rows(tensor.target.n_rows, n_rows)
    held = [has(matrix.weight) for matrix in tensor.target.matrices]
    if tensor.transform is Transform.PRODUCT:
        return (rows, tensor.target.n_rows) if all(held) else ((), 0)
    starts = _matrix_starts(tensor)
    kept = tuple(row for row in rows if held[bisect_right(starts, row) - 1])
    matrices = zip(tensor.target.matrices, held, strict=True)
    return kept, sum(matrix.n_rows for matrix, is_held in matrices if is_held)


def merged_errors(errors: Iterable[TensorError]) -> tuple[TensorError, ...]:
    """One error per tensor, where parts of it were measured apart."""
    merged: dict[str, TensorError] = {}
    for error in errors:
        known = merged.get(error.name)
        merged[error.name] = (
            error
            if known is None
            else replace(
                known,
                n_rows=known.n_rows + error.n_rows,
                n_rows_total=known.n_rows_total + error.n_rows_total,
                squared_error=known.squared_error + error.squared_error,
                squared_norm=known.squared_norm + error.squared_norm,
                weighted_error=known.weighted_error + error.weighted_error,
                weighted_norm=known.weighted_norm + error.weighted_norm,
                weighted_without=known.weighted_without + error.weighted_without,
            )
        )
    return tuple(merged.values())


def check_errors(errors: Iterable[TensorError]) -> list[VerifyError]:
    """An error for each tensor that lost more than its type explains."""
    return [
        VerifyError(
            "the tensor differs from the checkpoint by more than its type explains",
            tensor=error.name,
            expected=f"a relative error of {error.limit:g} at most for {error.type_name}",
            found=f"{error.rmse:.4g} over {error.n_rows:,} rows",
            next_step="Make its shard again; if it stays so, the quantizer or the source is wrong.",
        )
        for error in errors
        if not error.is_within
    ]


def errors_by_role(errors: Iterable[TensorError]) -> tuple[RoleError, ...]:
    """One error per role. Each tensor weighs what its sum of squares is estimated to be."""
    by_role: dict[Role, list[TensorError]] = {}
    for error in errors:
        by_role.setdefault(error.role, []).append(error)
    return tuple(_role_error(role, by_role[role]) for role in Role if role in by_role)


def _role_error(role: Role, members: Sequence[TensorError]) -> RoleError:
    weighted = [error for error in members if error.is_weighted]
    return RoleError(
        role,
        len(members),
        _estimated(members, "squared_error", "squared_norm"),
        max(members, key=lambda e: math.inf if math.isnan(e.rmse) else e.rmse),
        WeightedError(
            len(weighted),
            _estimated(weighted, "weighted_error", "weighted_norm"),
            _estimated(weighted, "weighted_without", "weighted_norm"),
        )
        if weighted
        else None,
    )


def _estimated(errors: Sequence[TensorError], error: str, norm: str) -> float:
    """The relative error of ``errors`` together, each standing for all rows of its tensor."""
    lost, whole = (
        sum(getattr(e, name) * e.n_rows_total / e.n_rows for e in errors) for name in (error, norm)
    )
    return _relative(lost, whole)


def limit_of(tensor: PlannedTensor) -> float:
    """The largest relative error that the type and transform of ``tensor`` explain."""
    is_exact = tensor.transform in (Transform.COPY, Transform.REPACK, Transform.NARROW)
    return 0.0 if is_exact else ERROR_LIMITS.get(tensor.type.name, 0.0)


def _relative(squared_error: float, squared_norm: float) -> float:
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def _measure(
    tensor: PlannedTensor,
    path: Path,
    source: SourceReader,
    sample: tuple[tuple[int, ...], int],
    importance: Importance,
    quantizer: Quantizer | None,
) -> TensorError:
    (rows, n_rows_total), starts = sample, _matrix_starts(tensor)
    is_weighted = tensor.is_encoded and takes_importance(tensor.type)
    weights = importance(tensor.target) if is_weighted else None
    most = max(1, TILE_WEIGHTS // tensor.target.n_cols)
    squared_error = squared_norm = 0.0
    weighted = np.zeros(3)
    # A damaged file holds anything: what is no number must fail the comparison, not warn.
    with files.reading(path) as fd, np.errstate(all="ignore"):
        for begin, end in _runs(rows, starts, most):
            packed = np.empty((end - begin, tensor.row_nbytes), np.uint8)
            offset = tensor.offset + begin * tensor.row_nbytes
            files.read_exact(fd, packed.reshape(-1).data, offset, path)
            wanted = _source_rows(tensor, source, range(begin, end), starts)
            found = dequantize(tensor.type, packed, tensor.target.n_cols)
            squared_error += float(np.square(found - wanted).sum())
            squared_norm += float(np.square(wanted).sum())
            if weights is not None and quantizer is not None:
                row = weights[bisect_right(starts, begin) - 1]
                without = _without_importance(tensor, wanted, quantizer)
                weighted += _weighted(row, (found - wanted, wanted, without - wanted))
    return TensorError(
        name=tensor.name,
        role=tensor.target.role,
        type_name=tensor.type.name,
        n_rows=len(rows),
        n_rows_total=n_rows_total,
        squared_error=squared_error,
        squared_norm=squared_norm,
        limit=limit_of(tensor),
        weighted_error=float(weighted[0]),
        weighted_norm=float(weighted[1]),
        weighted_without=float(weighted[2]),
    )


def _weighted(row: Floats, differences: Sequence[Doubles]) -> Doubles:
    """Sums of squares in which columns count by ``row`` [n_cols], on average 1."""
    counts = row.astype(np.float64) * len(row) / row.sum(dtype=np.float64)
    return np.array([float((np.square(one) * counts).sum()) for one in differences])


def _without_importance(
    tensor: PlannedTensor, wanted: Doubles, quantizer: Quantizer
) -> NDArray[np.float32]:
    """``wanted`` as it would be stored if all columns counted the same."""
    n_cols = tensor.target.n_cols
    packed = np.empty((len(wanted), tensor.row_nbytes), np.uint8)
    # Some kernels end the process without weights: equal ones say the same.
    must_have = tensor.type.name in ABORTS_WITHOUT_IMPORTANCE
    equal = np.ones(n_cols, np.float32) if must_have else None
    quantizer.quantize(tensor.type, wanted.astype(np.float32), packed, equal)
    return dequantize(tensor.type, packed, n_cols)


def sample_rows(n_total: int, n_rows: int) -> tuple[int, ...]:
    """Up to ``n_rows`` row numbers below ``n_total``: first, last, and even steps between them."""
    if n_rows >= n_total:
        return tuple(range(n_total))
    if n_rows == 1:
        return (0,)
    return tuple(i * (n_total - 1) // (n_rows - 1) for i in range(n_rows))


def _runs(rows: Sequence[int], starts: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Adjacent rows together, up to ``most`` and never across one of ``starts``."""
    begin = rows[0]
    for row, following in pairwise((*rows, -1)):
        if following != row + 1 or following in starts or following - begin >= most:
            yield begin, row + 1
            begin = following


def _matrix_starts(tensor: PlannedTensor) -> tuple[int, ...]:
    """First row of each stored matrix in the tensor; factors of a product all begin at row 0."""
    if tensor.transform is Transform.PRODUCT:
        return (0,)
    return tuple(accumulate((m.n_rows for m in tensor.target.matrices[:-1]), initial=0))


def _source_rows(
    tensor: PlannedTensor, source: SourceReader, rows: range, starts: Sequence[int]
) -> NDArray[np.float64]:
    """Rows of the decoded source that rows of the target were made from."""
    decoded = np.empty((len(rows), tensor.target.n_cols), np.float32)
    if tensor.transform is Transform.PRODUCT:
        product = np.ones_like(decoded)
        for matrix in tensor.target.matrices:
            source.decode_rows(matrix, rows.start, decoded)
            product *= decoded
        return product.astype(np.float64)
    no = bisect_right(starts, rows.start) - 1
    source.decode_rows(tensor.target.matrices[no], rows.start - starts[no], decoded)
    return decoded.astype(np.float64)
