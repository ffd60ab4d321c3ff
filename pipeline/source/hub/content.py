"""Digests of content: sha256 as git-lfs has it, and the object ids of git."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pipeline import files
from pipeline.errors import SourceError
from pipeline.source.hub.snapshot import HubFile

_READ_NBYTES = 1 << 22

Kind = Literal["sha256", "git-sha1"]


class _Hash(Protocol):
    def update(self, content: memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """A digest of a file's whole content; ``said_by`` names who vouches for it."""

    kind: Kind
    value: str
    said_by: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


def digests_of(file: HubFile) -> tuple[ContentDigest, ...]:
    """Every digest that the content of ``file`` must have, the hub's own first."""
    own = (
        ContentDigest("sha256", file.sha256, "the hub")
        if file.sha256
        else ContentDigest("git-sha1", file.blob_id, "the hub")
    )
    if file.listed_sha256 in (None, file.sha256):
        return (own,)
    assert file.listed_sha256 is not None
    return own, ContentDigest("sha256", file.listed_sha256, "the checksum list")


def identity(file: HubFile) -> str:
    """One word for the content that ``file`` must have."""
    return "+".join(f"{digest.kind}:{digest.value}" for digest in digests_of(file))


def check_content(
    path: Path,
    file: HubFile,
    *,
    hashed: Callable[[int], None] = lambda _: None,
) -> ContentMismatchError | None:
    """Read all of ``path`` and compare it with what ``file`` must be; None when it is that.

    Args:
        path: A file of the right size.
        file: What it should be.
        hashed: Told the bytes read.

    Raises:
        SourceError: The file cannot be read, or hub and checksum list contradict each other.
    """
    wanted = digests_of(file)
    running = [_new_hash(digest.kind, file.nbytes) for digest in wanted]
    for chunk in _chunks(path, file.nbytes):
        for one in running:
            one.update(chunk)
        hashed(len(chunk))
    found = [one.hexdigest() for one in running]
    wrong = [(w, f) for w, f in zip(wanted, found, strict=True) if w.value != f]
    if not wrong:
        return None
    if len(wrong) < len(wanted):
        raise SourceError(
            "the hub and the checksum list contradict each other",
            file=file.name,
            expected=" and ".join(f"{digest} ({digest.said_by})" for digest in wanted),
            found=f"content that only one of them describes ({wrong[0][0].kind} {wrong[0][1]})",
            next_step="Check that the list belongs to this revision.",
        )
    return ContentMismatchError(file, wrong[0][0], wrong[0][1])


class ContentMismatchError(SourceError):
    """The bytes are not those of the release."""

    def __init__(self, file: HubFile, wanted: ContentDigest, found: str) -> None:
        super().__init__(
            "the bytes that came have another digest than the release",
            file=file.name,
            expected=f"{wanted} (from {wanted.said_by})",
            found=found,
            next_step="Try again later or from another network: something between here and the "
            "hub changes the bytes.",
        )


def _new_hash(kind: Kind, nbytes: int) -> _Hash:
    if kind == "sha256":
        return hashlib.sha256()
    # git hashes "blob", the size in decimal and a NUL before the content (git-hash-object(1)).
    return hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)


def _chunks(path: Path, nbytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(nbytes, _READ_NBYTES)))
    with files.reading(path) as fd:
        for begin in range(0, nbytes, _READ_NBYTES):
            chunk = buffer[: nbytes - begin]
            files.read_exact(fd, chunk, begin, path)
            yield chunk
            files.forget_cached(fd, begin, len(chunk))
