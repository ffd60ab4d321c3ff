"""Finished GGUF files held against sha256 digests of whole files and of single tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline import files
from pipeline.errors import QuantmillError, VerifyError
from pipeline.gguf.reader import GgufTensor, read_gguf

READ_NBYTES = 1 << 20


def check_digests(
    folder: Path,
    digests: Mapping[str, str],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> list[QuantmillError]:
    """What differs between the bytes in ``folder`` and their digests; every byte is read once.

    Args:
        folder: Where the files lie.
        digests: Hex sha256 by file name (a whole file, as in SHA256SUMS) or by
            ``file name:tensor`` (the bytes of one tensor, without padding).
        progress: Told the bytes read.
    """
    wanted: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        file_name, _, tensor = name.partition(":")
        wanted.setdefault(file_name, {})[tensor] = digest.lower()
    problems: list[QuantmillError] = []
    for file_name, of_file in wanted.items():
        try:
            problems += _check_file_digests(folder / file_name, of_file, progress)
        except QuantmillError as error:
            problems.append(error)
    return problems


def _check_file_digests(
    path: Path, wanted: Mapping[str, str], progress: Callable[[int], None]
) -> list[VerifyError]:
    named = [name for name in wanted if name]
    tensors = read_gguf(path).tensors if named else {}
    spans = [tensors[name] for name in named if name in tensors]
    problems = [
        VerifyError("the file lacks a tensor that has a digest", file=path, tensor=name)
        for name in named
        if name not in tensors
    ]
    for name, digest in digests_of(path, spans, progress=progress).items():
        if digest != wanted.get(name, digest):
            problems.append(
                VerifyError(
                    "the bytes differ from their digest",
                    file=path,
                    tensor=name or None,
                    expected=wanted[name],
                    found=digest,
                    next_step="Fetch or make the file again; check the disk if it happens twice.",
                )
            )
    return problems


def digests_of(
    path: Path,
    spans: Sequence[GgufTensor],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, str]:
    """Hex sha256 of the whole file, under the empty name, and of each of ``spans``, in one pass.

    Raises:
        SourceError: The file cannot be read, or ends before a span does.
    """
    return dict(running_digests(path, spans, progress=progress))


def running_digests(
    path: Path,
    spans: Sequence[GgufTensor],
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[tuple[str, str]]:
    """Name and hex sha256 of each of ``spans`` in file order, then of the whole file.

    Each is given as soon as the bytes up to its end are read; the last has the empty name.

    Raises:
        SourceError: The file cannot be read, or ends before a span does.
    """
    whole = hashlib.sha256()
    with files.reading(path) as fd:
        position = 0
        for span in sorted(spans, key=lambda tensor: tensor.offset):
            for chunk in _chunks(fd, path, position, span.offset):
                whole.update(chunk)
                progress(len(chunk))
            tensor = hashlib.sha256()
            position = span.offset + span.nbytes
            for chunk in _chunks(fd, path, span.offset, position):
                whole.update(chunk)
                tensor.update(chunk)
                progress(len(chunk))
            yield span.name, tensor.hexdigest()
        for chunk in _chunks(fd, path, position, os.fstat(fd).st_size):
            whole.update(chunk)
            progress(len(chunk))
    yield "", whole.hexdigest()


def tensor_digest(path: Path, tensor: GgufTensor) -> str:
    """Hex sha256 of the bytes of a tensor of ``path``, without padding.

    Raises:
        SourceError: The file cannot be read, or ends before the tensor does.
    """
    digest = hashlib.sha256()
    with files.reading(path) as fd:
        for chunk in _chunks(fd, path, tensor.offset, tensor.offset + tensor.nbytes):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(fd: int, path: Path, begin: int, end: int) -> Iterator[memoryview]:
    """A byte range in pieces that share one buffer."""
    buffer = memoryview(bytearray(min(READ_NBYTES, max(end - begin, 0))))
    for at in range(begin, end, READ_NBYTES):
        chunk = buffer[: end - at]
        files.read_exact(fd, chunk, at, path)
        yield chunk
