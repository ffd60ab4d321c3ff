"""Showing a file under a second name, and copying ranges between files, at the least cost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from pipeline import files
from pipeline.errors import OutputError, SourceError

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})
"""What file systems answer that have no hard links, or not between these places."""

_NO_COPIES = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What they answer that cannot copy inside the kernel, or not between these places."""


def link_or_copy(existing: Path, name: Path) -> None:
    """Show ``existing`` under ``name`` too: hard link, else a copy, all or nothing."""
    files.make_folder(name.parent)
    part = name.with_name(f".{name.name}.link")
    files.remove(part)
    try:
        files.hard_link(existing, part)
        files.rename(part, name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise files.output_error("cannot link", name, error) from error
        _copy_whole(existing, name)
    except OutputError as error:
        if not (files.is_gone(error) and name.exists() and name.samefile(existing)):
            raise
    # A rename between two names of one file does nothing, not even take the old name away.
    files.remove(part)


def show_as(existing: Path, name: Path) -> None:
    """Show ``existing`` under ``name`` too without taking more space: hard or symbolic link.

    Only where the file system has neither is it copied.
    """
    files.make_folder(name.parent)
    part = name.with_name(f".{name.name}.link")
    files.remove(part)
    try:
        files.hard_link(existing, part)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise files.output_error("cannot link", name, error) from error
        try:
            part.symlink_to(os.path.relpath(existing.absolute(), name.parent.absolute()))
        except OSError:
            _copy_whole(existing, name)
            return
    files.rename(part, name)
    # A rename between two names of one file does nothing, not even take the old name away.
    files.remove(part)


def _copy_whole(existing: Path, name: Path) -> None:
    part = name.with_name(f".{name.name}.part")
    with files.sole_writing(part) as fd:
        nbytes = existing.stat().st_size
        copy_range(existing, 0, nbytes, part, 0)
        files.set_length(fd, nbytes, part)
        files.rename(part, name)


def copy_range(
    source: Path,
    source_offset: int,
    nbytes: int,
    target: Path,
    target_offset: int,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copy bytes between files inside the kernel; file systems that can share extents do so."""
    with files.reading(source) as fd_in, files.writing(target, create=True) as fd_out:
        done = 0
        while done < nbytes:
            n = _copy_some(
                fd_in,
                fd_out,
                (source, source_offset + done),
                (target, target_offset + done),
                min(nbytes - done, files.MAX_CALL_NBYTES),
            )
            done += n
            if progress:
                progress(n)
        files.sync(fd_out, target)


def share_range(
    fd_in: int, offset: int, nbytes: int, fd_out: int, target: Path, target_offset: int
) -> bool:
    """`copy_range` between open files, where the file systems can: whether all bytes are there.

    Raises:
        OutputError: The disk failed.
    """
    done = 0
    while done < nbytes:
        try:
            n = files.copy_inside(fd_in, fd_out, nbytes - done, offset + done, target_offset + done)
        except OSError as error:
            if error.errno in _NO_COPIES:
                return False
            raise files.output_error("cannot copy", target, error, target_offset + done) from error
        if n == 0:
            return False
        done += n
    return True


def _copy_some(
    fd_in: int, fd_out: int, source: tuple[Path, int], target: tuple[Path, int], nbytes: int
) -> int:
    try:
        n = files.copy_inside(fd_in, fd_out, nbytes, source[1], target[1])
    except OSError as error:
        if error.errno not in _NO_COPIES:
            raise files.output_error("cannot copy", target[0], error, target[1]) from error
        n = min(nbytes, 1 << 24)
        chunk = memoryview(bytearray(n))
        files.read_exact(fd_in, chunk, source[1], source[0])
        files.write_exact(fd_out, chunk, target[1], target[0])
    if n == 0:
        raise SourceError("the file ends too early", file=source[0], offset=source[1])
    return n
