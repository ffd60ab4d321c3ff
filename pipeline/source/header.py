"""The header of one safetensors file: which tensor lies where, checked before anything is read.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the payload
(huggingface/safetensors, README "Format"). Every rule of that format is held here, because a
header decides which bytes become which weights.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.files import modified_ns, read_exact, reading
from pipeline.source.json_object import MAX_JSON_NBYTES, parse_json_object, shown
from pipeline.source.lfs_pointer import HEAD_NBYTES, refuse_lfs_pointer
from pipeline.source.spec import DTYPE_NBYTES

_LENGTH_NBYTES = 8
_MAX_DIMS = 8
_MAX_NAME_LENGTH = 512
_MAX_COUNT = 2**63 - 1
_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}
_FETCH_AGAIN = "Fetch the file again; it was cut or is still being written."


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One stored tensor; ``offset`` counts from the start of the file, ``shape`` is numpy order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One safetensors file as its header describes it.

    ``header_nbytes`` counts the length field too, so it is the offset of the first tensor;
    ``header_sha256`` is taken over just those bytes. ``tensors`` are in file order.
    ``modified_ns`` is when the file was last changed as its header was read; None where its
    content is known by digest.
    """

    path: Path
    nbytes: int
    header_nbytes: int
    header_sha256: str
    tensors: Mapping[str, SourceTensor]
    modified_ns: int | None = None


def read_source_file(path: Path) -> SourceFile:
    """What the header of ``path`` says; no weight is read.

    Raises:
        SourceError: The file is missing, cut, a git-lfs pointer, or breaks a rule of the format.
    """
    # Before the header: a file that changes while it is read must not look settled.
    changed = modified_ns(path)
    header, nbytes = _read_header(path)
    entries = parse_json_object(header[_LENGTH_NBYTES:], path, "the safetensors header")
    _check_metadata(entries.pop("__metadata__", None), path)
    tensors = [_tensor(name, entry, len(header), path) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(tensors, len(header), nbytes, path)
    return SourceFile(
        path=path,
        nbytes=nbytes,
        header_nbytes=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        tensors={tensor.name: tensor for tensor in tensors},
        modified_ns=changed,
    )


def _read_header(path: Path) -> tuple[bytes, int]:
    """Length field and JSON of ``path``, and the size of the whole file."""
    with reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        if nbytes == 0:
            raise SourceError("the file is empty", file=path, next_step=_FETCH_AGAIN)
        head = bytearray(min(nbytes, HEAD_NBYTES))
        read_exact(fd, memoryview(head), 0, path)
        refuse_lfs_pointer(bytes(head), path)
        header = bytearray(_header_nbytes(bytes(head), nbytes, path))
        read_exact(fd, memoryview(header), 0, path)
    return bytes(header), nbytes


def _header_nbytes(head: bytes, nbytes: int, path: Path) -> int:
    if nbytes < _LENGTH_NBYTES:
        raise SourceError(
            "the file is too short for a safetensors file",
            file=path,
            expected=f"at least {_LENGTH_NBYTES} bytes",
            found=f"{nbytes} bytes",
            next_step=_FETCH_AGAIN,
        )
    length = int.from_bytes(head[:_LENGTH_NBYTES], "little")
    if length > MAX_JSON_NBYTES:
        raise SourceError(
            "the file does not begin like a safetensors file: its header length is too large",
            file=path,
            expected=f"at most {MAX_JSON_NBYTES:,} bytes",
            found=f"{length:,} bytes",
            next_step="Check that this is the shard itself and not an error page or an archive.",
        )
    if length > nbytes - _LENGTH_NBYTES:
        raise SourceError(
            "the file is cut inside its header",
            file=path,
            expected=f"a header of {length:,} bytes",
            found=f"{nbytes - _LENGTH_NBYTES:,} bytes after the length field",
            next_step=_FETCH_AGAIN,
        )
    return _LENGTH_NBYTES + length


def _check_metadata(metadata: object, path: Path) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise SourceError(
            "the safetensors header has a __metadata__ that is not a table of strings",
            file=path,
            found=shown(metadata),
        )


def _tensor(name: str, entry: object, header_nbytes: int, path: Path) -> SourceTensor:
    """One header entry as a tensor, after every rule that concerns it alone."""
    if len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        raise SourceError(
            f"a tensor name is not printable text of at most {_MAX_NAME_LENGTH} characters",
            file=path,
            found=shown(name),
        )
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise _rule("the header entry must hold dtype, shape and data_offsets", name, path, entry)
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    item_nbytes = DTYPE_NBYTES.get(dtype) if isinstance(dtype, str) else None
    if item_nbytes is None:
        raise _rule("the dtype is not one these checkpoints use", name, path, dtype)
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise _rule(f"the shape must be at most {_MAX_DIMS} counts", name, path, shape)
    if not _are_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise _rule("data_offsets must be two increasing byte offsets", name, path, span)
    nbytes = span[1] - span[0]
    if math.prod(shape) * item_nbytes != nbytes:
        raise SourceError(
            "the stored bytes of a tensor do not fit its shape",
            file=path,
            tensor=name,
            expected=f"{shown(math.prod(shape) * item_nbytes)} bytes for {dtype} {shown(shape)}",
            found=f"{nbytes} bytes",
        )
    return SourceTensor(name, dtype, tuple(shape), header_nbytes + span[0], nbytes)


def _are_counts(values: object) -> bool:
    # `type() is int` and not isinstance: JSON's true is an int in Python.
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MAX_COUNT for value in values
    )


def _rule(what: str, name: str, path: Path, found: object) -> SourceError:
    return SourceError(what, file=path, tensor=name, found=shown(found))


def _check_cover(tensors: list[SourceTensor], begin: int, nbytes: int, path: Path) -> None:
    """The tensors, in order of offset, must fill ``begin`` … ``nbytes`` with no gap or overlap."""
    end = begin
    for tensor in tensors:
        if tensor.offset != end:
            kind = "a gap before" if tensor.offset > end else "an overlap with"
            raise SourceError(
                f"the payload has {kind} a tensor",
                file=path,
                tensor=tensor.name,
                expected=f"offset {end:,}",
                found=f"offset {tensor.offset:,}",
            )
        end += tensor.nbytes
    if end > nbytes:
        raise SourceError(
            "the file is cut: it ends before its last tensor does",
            file=path,
            expected=f"{end:,} bytes",
            found=f"{nbytes:,} bytes",
            next_step=_FETCH_AGAIN,
        )
    if end < nbytes:
        raise SourceError(
            "the file goes on after its last tensor",
            file=path,
            expected=f"{end:,} bytes",
            found=f"{nbytes:,} bytes",
            next_step="Fetch the file again; something was appended to it.",
        )
