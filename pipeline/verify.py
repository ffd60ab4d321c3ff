"""Finished files held against their plan, their digests, and the checkpoint they came from.

Errors are measured from the bytes in the file, decoded by the gguf package, against the source: a
swapped pair of experts, a wrong scale or a lost row shows as an error no type can explain.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import FormatError, QuantmillError, VerifyError
from pipeline.gguf.digests import check_digests
from pipeline.gguf.header import ALIGNMENT, VERSION
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufFile, GgufTensor, read_gguf
from pipeline.model.contract.check import check_contract
from pipeline.model.roles import Role
from pipeline.plan import Plan, PlannedShard, PlannedTensor, Transform
from pipeline.quant.dequant import dequantize
from pipeline.quant.error_limits import ERROR_LIMITS
from pipeline.source.reader import SourceReader

__all__ = [
    "RoleError",
    "TensorError",
    "check_digests",
    "check_errors",
    "check_plan",
    "errors_by_role",
    "limit_of",
    "measure_errors",
    "sample_rows",
    "verify_files",
]

TILE_WEIGHTS = 1 << 18
"""Weights compared at a time; memory stays near eight times as many bytes."""


@dataclass(frozen=True, slots=True)
class TensorError:
    """What a tensor lost, over the sampled rows.

    ``squared_error`` and ``squared_norm`` are sums over ``n_rows`` sampled of ``n_rows_total``
    rows; ``limit`` is what the type explains, 0 for types and transforms that lose nothing.
    """

    name: str
    role: Role
    type_name: str
    n_rows: int
    n_rows_total: int
    squared_error: float
    squared_norm: float
    limit: float

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


def measure_errors(
    tensors: Sequence[PlannedTensor],
    path: Path,
    source: SourceReader,
    *,
    n_rows: int,
    has: Callable[[str], bool] = lambda _: True,
) -> tuple[TensorError, ...]:
    """The relative error of every tensor in a file, over a sample that is the same every time.

    Tensors in types of ik_llama.cpp, which cannot be decoded here, are left out.

    Args:
        tensors: What the file holds, where, and from which matrices it was made.
        path: The file, finished or filled but unnamed.
        source: The open checkpoint.
        n_rows: Rows per tensor at most: the first, the last, and between them at even steps over
            all matrices and experts.
        has: Whether a stored matrix, by the name of its weight, is at hand; rows of others are
            left out of the sample.

    Raises:
        SourceError: Reading a file failed.
    """
    assert n_rows > 0
    samples = [(t, _sampled(t, n_rows, has)) for t in tensors if t.type.family == "mainline"]
    return tuple(_measure(tensor, path, source, sample) for tensor, sample in samples if sample[0])


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
    return tuple(
        RoleError(
            role,
            len(members),
            _relative(
                sum(e.squared_error * e.n_rows_total / e.n_rows for e in members),
                sum(e.squared_norm * e.n_rows_total / e.n_rows for e in members),
            ),
            max(members, key=lambda e: math.inf if math.isnan(e.rmse) else e.rmse),
        )
        for role in Role
        if (members := by_role.get(role))
    )


def limit_of(tensor: PlannedTensor) -> float:
    """The largest relative error that the type and transform of ``tensor`` explain."""
    is_exact = tensor.transform in (Transform.COPY, Transform.REPACK, Transform.NARROW)
    return 0.0 if is_exact else ERROR_LIMITS.get(tensor.type.name, 0.0)


def _relative(squared_error: float, squared_norm: float) -> float:
    if squared_norm == 0:
        return 0.0 if squared_error == 0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def _measure(
    tensor: PlannedTensor, path: Path, source: SourceReader, sample: tuple[tuple[int, ...], int]
) -> TensorError:
    (rows, n_rows_total), starts = sample, _matrix_starts(tensor)
    most = max(1, TILE_WEIGHTS // tensor.target.n_cols)
    squared_error = squared_norm = 0.0
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
    return TensorError(
        name=tensor.name,
        role=tensor.target.role,
        type_name=tensor.type.name,
        n_rows=len(rows),
        n_rows_total=n_rows_total,
        squared_error=squared_error,
        squared_norm=squared_norm,
        limit=limit_of(tensor),
    )


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


def check_plan(plan: Plan) -> list[FormatError]:
    """What a loader would refuse or silently misread in the files that ``plan`` describes.

    Config values that no engine could use show here, before a weight is read. The files are looked
    at as one: which tensor lies in which is no loader's business.
    """
    tensors = {
        t.name: GgufTensor(t.name, t.target.shape[::-1], t.type, t.offset, t.nbytes)
        for t in plan.tensors
    }
    keys = {entry.key: entry for entry in plan.key_values}
    whole = GgufFile(Path(plan.name), plan.nbytes, VERSION, keys, tensors, 0, ALIGNMENT)
    return check_contract(GgufModel((whole,)), plan.form)


def verify_files(plan: Plan, paths: Sequence[Path]) -> list[QuantmillError]:
    """What differs between the files under ``paths``, in shard order, and their plan.

    Weights are not read.

    Every shard must have the exact length, the exact header bytes, and, as the reader understands
    that header, the planned tensors at the planned places, none over another.
    """
    problems: list[QuantmillError] = []
    for shard, path in zip(plan.shards, paths, strict=True):
        try:
            problems += _check_bytes(shard, path)
            problems += _check_tensors(shard, read_gguf(path))
        except QuantmillError as error:
            problems.append(error)
    return problems


def _check_bytes(shard: PlannedShard, path: Path) -> Iterator[VerifyError]:
    with files.reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        header = bytearray(min(nbytes, len(shard.header)))
        files.read_exact(fd, memoryview(header), 0, path)
    if nbytes != shard.nbytes:
        yield VerifyError(
            "the file has another length than planned",
            file=path,
            expected=f"{shard.nbytes:,} bytes",
            found=f"{nbytes:,} bytes",
        )
    if header != shard.header:
        at = next(
            (
                n
                for n, pair in enumerate(zip(header, shard.header, strict=False))
                if len({*pair}) > 1
            ),
            len(header),
        )
        yield VerifyError("the header is not the planned one", file=path, offset=at)


def _check_tensors(shard: PlannedShard, file: GgufFile) -> Iterator[VerifyError]:
    planned = {t.name: (t.target.shape, t.type.name, t.offset, t.nbytes) for t in shard.tensors}
    found = {t.name: (t.ne[::-1], t.type.name, t.offset, t.nbytes) for t in file.tensors.values()}
    for name in sorted({*planned, *found}):
        if planned.get(name) != found.get(name):
            yield VerifyError(
                "the tensor is not as planned",
                file=file.path,
                tensor=name,
                expected="shape {}, {}, offset {:,}, {:,} bytes".format(*planned[name])
                if name in planned
                else "no such tensor",
                found="shape {}, {}, offset {:,}, {:,} bytes".format(*found[name])
                if name in found
                else "no such tensor",
            )
    yield from _check_overlaps(file)


def _check_overlaps(file: GgufFile) -> Iterator[VerifyError]:
    in_order = sorted(file.tensors.values(), key=lambda tensor: tensor.offset)
    for before, tensor in pairwise(in_order):
        if before.offset + before.nbytes > tensor.offset:
            yield VerifyError(
                f"the tensor begins inside {before.name}",
                file=file.path,
                tensor=tensor.name,
                expected=f"offset {before.offset + before.nbytes:,} or later",
                found=f"{tensor.offset:,}",
            )
