"""What a file is, told by its first bytes and never by its name."""

from __future__ import annotations

import os
import zipfile
from enum import Enum, auto
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.files import read_exact, reading
from pipeline.source.lfs_pointer import HEAD_NBYTES, refuse_lfs_pointer

_HEAD_NBYTES = max(HEAD_NBYTES, 64)
_LENGTH_NBYTES = 8
_TENSOR_NAMES = (b"blk.", b"output", b"token_embd")
"""How the names of GGUF tensors with an importance begin."""


class Content(Enum):
    """Forms that saliency and keep lists come in."""

    TORCH = auto()
    NPZ = auto()
    SAFETENSORS = auto()
    GGUF = auto()
    JSON = auto()
    TEXT = auto()


def content_of(path: Path) -> Content:
    """The form of the file at ``path``.

    Raises:
        SourceError: It cannot be read, is empty, or is of a form that is not opened.
    """
    with reading(path) as fd:
        head = bytearray(min(os.fstat(fd).st_size, _HEAD_NBYTES))
        read_exact(fd, memoryview(head), 0, path)
    refuse_lfs_pointer(bytes(head), path)
    return _form(bytes(head), path)


def _form(head: bytes, path: Path) -> Content:
    if head.startswith(b"PK\x03\x04"):
        return _zip_form(path)
    if head.startswith(b"GGUF"):
        return Content.GGUF
    if head[_LENGTH_NBYTES : _LENGTH_NBYTES + 1] == b"{" and b"\0" in head[:_LENGTH_NBYTES]:
        return Content.SAFETENSORS
    if head.startswith(b"\x80") or _is_tar(head):
        raise SourceError(
            "the file is a bare pickle, which could run a program; it is not opened",
            file=path,
            next_step="Save it again with torch.save of today (a zip archive), tensors only.",
        )
    if _is_legacy_imatrix(head):
        raise SourceError(
            "a legacy imatrix does not say how often an expert was used",
            file=path,
            expected="the GGUF form, which counts the tokens of each expert",
            found="one count for all experts of a tensor",
            next_step="Make the matrix again with a llama-imatrix that writes GGUF.",
        )
    if head.lstrip().startswith((b"{", b"[")):
        return Content.JSON
    if head and b"\0" not in head:
        return Content.TEXT
    raise SourceError(
        "this is no form of saliency or keep list that is known",
        file=path,
        expected=".pt, .npz, .safetensors, GGUF imatrix, JSON, JSON lines or CSV",
        found=head[:16].hex(" ") or "an empty file",
    )


def _zip_form(path: Path) -> Content:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise SourceError("the zip archive is damaged", file=path, found=str(error)) from None
    if any(name.endswith("/data.pkl") for name in names):
        return Content.TORCH
    if names and all(name.endswith(".npy") for name in names):
        return Content.NPZ
    raise SourceError(
        "the zip archive is neither a torch file nor an .npz",
        file=path,
        found=", ".join(names[:4]) or "an empty archive",
    )


def _is_tar(head: bytes) -> bool:
    """Torch's oldest form was a tar archive of pickles; such a name stands at its start."""
    return head.startswith((b"sys_info\0", b"storages\0", b"pickle\0"))


def _is_legacy_imatrix(head: bytes) -> bool:
    """``int32`` number of entries, ``int32`` length of a name, then the name of a tensor."""
    return 0 < int.from_bytes(head[4:8], "little") < 256 and head[8:].startswith(_TENSOR_NAMES)
