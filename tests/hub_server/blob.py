"""One file of a commit: its digests, computed when first asked for, and its bytes by ranges.

Reads with `os` on purpose and not through `pipeline.files`: a test may make the n-th read of the
pipeline fail, and the server must not be the one that is hit.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LFS_SUFFIXES = (".bin", ".gguf", ".pt", ".safetensors")
LFS_NBYTES = 10 << 20
"""Files of this size and more are stored out of git whatever they are called."""

MAX_HASHED_NBYTES = 4 << 30
"""Bigger files need a declared sha256: hashing even a hole takes a second for 2 GB."""

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Blob:
    """A file as it was when its commit was made; a changed file is never served.

    Raises:
        RuntimeError: On reading, when the file is another one by now.
        ValueError: On hashing, when the file is too big to be hashed and no digest was declared.
    """

    path: Path
    nbytes: int
    modified_ns: int
    declared_sha256: str | None = None

    @classmethod
    def of(cls, path: Path, sha256: str | None = None) -> Blob:
        """The file at ``path``; ``sha256`` is believed and spares reading it."""
        status = path.stat()
        return cls(path, status.st_size, status.st_mtime_ns, sha256)

    @property
    def is_lfs(self) -> bool:
        """Whether git holds a pointer only and the bytes come from the CDN."""
        return self.path.suffix in LFS_SUFFIXES or self.nbytes >= LFS_NBYTES

    @cached_property
    def sha256(self) -> str:
        """Digest of the content; holes are hashed without being read."""
        if self.declared_sha256 is not None:
            return self.declared_sha256
        if self.nbytes > MAX_HASHED_NBYTES:
            raise ValueError(f"{self.path.name}: declare its sha256 in add_commit, it is too big")
        digest, zeros = hashlib.sha256(), memoryview(bytes(_CHUNK))
        with self.opened() as fd:
            for start, end, is_hole in _extents(fd, self.nbytes):
                for at in range(start, end, _CHUNK):
                    n = min(_CHUNK, end - at)
                    digest.update(zeros[:n] if is_hole else os.pread(fd, n, at))
        return digest.hexdigest()

    @property
    def pointer(self) -> bytes:
        """What git holds for an LFS file: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md."""
        lines = "version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}"
        return "\n".join([*lines, f"size {self.nbytes}\n"]).encode()

    @cached_property
    def git_sha1(self) -> str:
        """Git's object id of the content, or of the pointer where there is one."""
        content = self.pointer if self.is_lfs else self.path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        """The hub's ETag, quoted: sha256 for LFS files, git's object id for the others."""
        return f'"{self.sha256 if self.is_lfs else self.git_sha1}"'

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor for positioned reads."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            status = os.fstat(fd)
            if (status.st_size, status.st_mtime_ns) != (self.nbytes, self.modified_ns):
                raise RuntimeError(f"{self.path} was changed after its commit was added")
            yield fd
        finally:
            os.close(fd)


def _extents(fd: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
    """(start, end, whether it is a hole) of every run of data and every hole, in order."""
    at = 0
    while at < nbytes:
        data = _next_data(fd, at, nbytes)
        if data > at:
            yield at, data, True
        if data < nbytes:
            at = os.lseek(fd, data, os.SEEK_HOLE)
            yield data, at, False
        else:
            at = nbytes


def _next_data(fd: int, at: int, nbytes: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return nbytes
