"""Rows of a table that is far larger than memory, wherever in it they lie."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline import files
from pipeline.errors import DecodeError
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.decode import F32, BadCodeError, decode_bf16, decode_fp8
from pipeline.source.spec import Codec, MatrixRef
from pipeline.source.stored import StoredRows, store_of

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]

_N_READERS = 8
"""Reads in flight: single rows are a matter of latency."""


def table_rows(checkpoint: Checkpoint, matrix: MatrixRef, numbers: Ints) -> F32:
    """Rows ``numbers`` of a table, ``[n, n_cols]``; each different one is read once.

    Args:
        checkpoint: Where it is stored.
        matrix: BF16, or FP8 whose scale blocks are of one row (an engram's).
        numbers: In any order, repeated or not.

    Raises:
        SourceError: The stored tensors do not fit ``matrix``, or a read fails.
        DecodeError: A value is NaN or infinite; file, tensor and row are named.
    """
    assert matrix.block[0] == 1
    stored = store_of(checkpoint, matrix)
    different, places = np.unique(numbers, return_inverse=True)
    out = np.empty((len(different), matrix.n_cols), np.float32)
    codes = _read(stored.codes, different)
    try:
        if matrix.codec is Codec.BF16:
            decode_bf16(codes.view(np.uint16), out)
        else:
            assert stored.scales is not None
            decode_fp8(codes, _read(stored.scales, different), 0, matrix.block, out)
    except BadCodeError as error:
        bad = stored.scales if error.is_scale and stored.scales else stored.codes
        raise DecodeError(
            error.what,
            file=bad.file.path,
            tensor=bad.tensor,
            found=f"{error.code} at row {different[error.row]:,}, column {error.column:,}",
            next_step="Compare the shard's sha256 with the release; fetch it again if it differs.",
        ) from error
    return out[places]


def _read(rows: StoredRows, numbers: Ints) -> Bytes:
    """The stored bytes of rows in ascending order, ``[n, row bytes]``."""
    out = np.empty((len(numbers), rows.row_nbytes), np.uint8)
    parts = [part for part in np.array_split(np.arange(len(numbers)), _N_READERS) if len(part)]
    with files.reading(rows.file.path) as fd, ThreadPoolExecutor(_N_READERS) as pool:

        def fill(part: Ints) -> None:
            for begin, end in _runs(numbers, int(part[0]), int(part[-1]) + 1):
                at = rows.offset + int(numbers[begin]) * rows.row_nbytes
                files.read_exact(fd, out[begin:end].reshape(-1).data, at, rows.file.path)

        for _ in pool.map(fill, parts):
            pass
    return out


def _runs(numbers: Ints, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Ranges of places between ``begin`` and ``end`` whose numbers follow each other."""
    breaks = np.flatnonzero(np.diff(numbers[begin:end]) != 1) + begin + 1
    edges = [begin, *breaks.tolist(), end]
    return pairwise(edges)
