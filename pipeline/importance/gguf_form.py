"""Importance matrices as GGUF files.

llama.cpp ``tools/imatrix`` since pull request 9400: for each tensor ``X.in_sum2`` F32
``[n_matrices, n_in]``, the sums of squares of what its matrices were multiplied with, and
``X.counts`` F32 ``[n_matrices, 1]``, the tokens these are of. What else a file holds (later
programs add plain sums) is passed over. Metadata: ``general.type`` imatrix, ``imatrix.datasets``
(strings), ``imatrix.chunk_count`` and ``imatrix.chunk_size`` (u32).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import SourceError
from pipeline.files import read_bytes
from pipeline.gguf.keys import ValueType
from pipeline.gguf.reader import GgufFile, GgufTensor, read_gguf
from pipeline.importance.entry import Entry

TYPE_KEY = "general.type"
IMATRIX = "imatrix"
DATASETS_KEY = "imatrix.datasets"
CHUNKS_KEY = "imatrix.chunk_count"

SUMS = ".in_sum2"
COUNTS = ".counts"


def open_imatrix(path: Path) -> GgufFile:
    """The header of a GGUF importance matrix.

    Raises:
        SourceError: It is another kind of GGUF.
        FormatError: The file is damaged.
    """
    file = read_gguf(path)
    kind = file.key_values.get(TYPE_KEY)
    if kind is None or kind.value != IMATRIX:
        raise SourceError(
            "this GGUF file is no importance matrix",
            file=path,
            expected=f"{TYPE_KEY} {IMATRIX}",
            found="nothing" if kind is None else kind.value,
        )
    return file


def gguf_entries(file: GgufFile) -> Iterator[Entry]:
    """What ``file`` says of each tensor.

    Raises:
        SourceError: Sums without counts or the other way round, or counts that do not fit.
    """
    names = dict.fromkeys(
        name.removesuffix(suffix)
        for name in file.tensors
        for suffix in (SUMS, COUNTS)
        if name.endswith(suffix)
    )
    for name in names:
        sums, counts = _part(file, name + SUMS), _part(file, name + COUNTS)
        n_values, n_counts = math.prod(sums.ne), math.prod(counts.ne)
        if n_values % n_counts:
            raise SourceError(
                "the counts of an importance matrix do not fit its sums",
                file=file.path,
                tensor=name,
                expected=f"a count for an equal part of {n_values:,} values",
                found=f"{n_counts:,} counts",
            )
        yield Entry(name, n_values, sums.offset, n_counts, counts.offset)


def datasets_of(file: GgufFile) -> tuple[str, ...]:
    """Names of the texts that a matrix was made with, as its maker wrote them."""
    entry = file.key_values.get(DATASETS_KEY)
    if entry is None or entry.element is not ValueType.STRING:
        return ()
    assert isinstance(entry.value, tuple)
    return tuple(str(name) for name in entry.value)


def chunks_of(file: GgufFile) -> int | None:
    """Chunks of text that a matrix was made with."""
    entry = file.key_values.get(CHUNKS_KEY)
    return entry.value if entry and type(entry.value) is int else None


def read_floats(file: GgufFile, tensor: GgufTensor) -> NDArray[np.float32]:
    """The values of one tensor of a matrix.

    Raises:
        SourceError: It is no F32 matrix, or cannot be read.
    """
    _check_floats(file, tensor)
    content = read_bytes(file.path, tensor.offset, tensor.nbytes)
    return np.frombuffer(content, "<f4").reshape(tensor.shape).astype(np.float32, copy=False)


def _part(file: GgufFile, name: str) -> GgufTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise SourceError(
            "the importance matrix has sums without counts, or counts without sums",
            file=file.path,
            expected=name,
        )
    _check_floats(file, tensor)
    return tensor


def _check_floats(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.type.name != "F32" or len(tensor.ne) > 2:
        raise SourceError(
            "an importance matrix holds F32 matrices only",
            file=file.path,
            tensor=tensor.name,
            found=f"{tensor.type.name} {tensor.shape}",
        )
