"""The only room that opens, reads, writes, syncs, renames or links a file.

Every call that can fail half-way goes through the names at the head of this module, so a test can
make the n-th of them fail, come back short, or die there. Short reads and writes are completed or
refused; nothing ever appears unfinished under a final name.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import OutputError, SourceError

_open = os.open
_preadv = os.preadv
_pwrite = os.pwrite
_write = os.write
_fdatasync = getattr(os, "fdatasync", os.fsync)
_fsync = os.fsync
_replace = os.replace
_link = os.link
_truncate = os.truncate
_copy_file_range = os.copy_file_range
_libc_fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _libc_fallocate is not None:
    _libc_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(fd: int, nbytes: int) -> None:
    # Where a file system cannot reserve, glibc's posix_fallocate writes a zero into every block:
    # for hours, and over what a second worker has just put there. The system call refuses.
    if _libc_fallocate is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while _libc_fallocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


_HASH_NBYTES = 1 << 20
MAX_CALL_NBYTES = 1 << 30
"""Linux moves at most 2,147,479,552 bytes a call; half of that is asked for at a time."""


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """An open file descriptor for reading ``path``.

    Raises:
        SourceError: The file is missing or unreadable.
    """
    try:
        fd = _open(path, os.O_RDONLY)
    except OSError as error:
        raise SourceError(
            "cannot open for reading", file=path, found=os.strerror(error.errno or 0)
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def writing(path: Path, *, create: bool = False) -> Iterator[int]:
    """An open file descriptor for positioned writes; never truncates what is there."""
    flags = os.O_RDWR | (os.O_CREAT if create else 0)
    try:
        fd = _open(path, flags, 0o644)
    except OSError as error:
        raise output_error("cannot open for writing", path, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


def read_exact(fd: int, out: memoryview, offset: int, path: Path) -> None:
    """Fill ``out`` from ``offset``; a file that ends earlier is an error, never a short result.

    Raises:
        SourceError: The file ends before ``offset + len(out)``, or the device reports an error.
    """
    done = 0
    while done < out.nbytes:
        try:
            n = _preadv(fd, [out[done : done + MAX_CALL_NBYTES]], offset + done)
        except OSError as error:
            is_folder = isinstance(error, IsADirectoryError)
            raise SourceError(
                "a folder, where a file is wanted" if is_folder else "the device refused a read",
                file=path,
                offset=None if is_folder else offset + done,
                found=os.strerror(error.errno or 0),
            ) from error
        if n == 0:
            raise SourceError(
                "the file ends too early",
                file=path,
                offset=offset,
                expected=f"{out.nbytes:,} bytes",
                found=f"{done:,} bytes",
                next_step="Fetch the file again; it was cut or is still being written.",
            )
        done += n


def read_bytes(path: Path, offset: int = 0, nbytes: int | None = None) -> bytes:
    """``nbytes`` of ``path`` from ``offset``, to the end of the file when not given."""
    with reading(path) as fd:
        if nbytes is None:
            nbytes = os.fstat(fd).st_size - offset
        out = bytearray(nbytes)
        read_exact(fd, memoryview(out), offset, path)
    return bytes(out)


def write_exact(fd: int, content: memoryview, offset: int, path: Path) -> None:
    """Write all of ``content`` at ``offset``.

    Raises:
        OutputError: Disk full, file size limit, or a device error; what was written before stands.
    """
    done = 0
    while done < content.nbytes:
        try:
            n = _pwrite(fd, content[done : done + MAX_CALL_NBYTES], offset + done)
        except OSError as error:
            raise output_error("cannot write", path, error, offset + done) from error
        if n <= 0:
            raise OutputError("a write moved no byte", file=path, offset=offset + done)
        done += n


def append_line(fd: int, line: bytes, path: Path) -> None:
    """Append one line in a single write, so that a torn line can only be the last one."""
    try:
        n = _write(fd, line)
    except OSError as error:
        raise output_error("cannot append", path, error) from error
    if n != len(line):
        raise OutputError(
            "a line was appended only in part", file=path, expected=len(line), found=n
        )


@contextmanager
def appending(path: Path) -> Iterator[int]:
    """An open file descriptor whose writes go to the end of ``path``."""
    try:
        fd = _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise output_error("cannot open for appending", path, error) from error
    try:
        yield fd
    finally:
        os.close(fd)


def sync(fd: int, path: Path) -> None:
    """Make what was written to ``fd`` durable.

    Raises:
        OutputError: The device could not store it; the written bytes are then not to be trusted.
    """
    try:
        _fdatasync(fd)
    except OSError as error:
        raise output_error("cannot make writes durable", path, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable.

    Raises:
        OutputError: The folder is gone, or the device could not store them.
    """
    try:
        fd = _open(folder, os.O_RDONLY)
        try:
            _fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        # Some network file systems cannot sync a folder; the rename itself stands there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise output_error("cannot make names durable", folder, error) from error


def rename(part: Path, final: Path) -> None:
    """Give a whole, synced file its final name, durably."""
    try:
        _replace(part, final)
    except OSError as error:
        raise output_error("cannot rename", final, error) from error
    sync_folder(final.parent)


def remove(path: Path) -> None:
    """Take a name away; one that is not there is fine."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise output_error("cannot remove", path, error) from error


def is_gone(error: BaseException) -> bool:
    """Whether an error of this module says that a name was not there: another process took it."""
    return isinstance(error.__cause__, FileNotFoundError)


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` under ``path`` all at once: temporary name, sync, rename, sync.

    Several processes may do so at once. They take turns where the file system knows locks; where
    it does not, no harm is done as long as all of them write the same.
    """
    make_folder(path.parent)
    part = path.with_name(f".{path.name}.part")
    with sole_writing(part) as fd:
        write_exact(fd, memoryview(content), 0, part)
        # Only now: a twin that has this very file under its final name must not see it empty.
        set_length(fd, len(content), part)
        sync(fd, part)
        try:
            rename(part, path)
        except OutputError as error:
            if not (is_gone(error) and path.exists() and read_bytes(path) == content):
                raise


@contextmanager
def sole_writing(part: Path) -> Iterator[int]:
    """``part`` open for writing by nobody else; whoever had it before has renamed it away."""
    while True:
        with writing(part, create=True) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                    raise output_error("cannot lock", part, error) from error
            if is_open_as(fd, part):
                yield fd
                return


def is_open_as(fd: int, path: Path) -> bool:
    """Whether ``path`` still names the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Create ``folder`` and its parents.

    Raises:
        OutputError: Something that is no folder stands there, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error("cannot create the folder", folder, error) from error


def allocate(fd: int, nbytes: int, path: Path) -> None:
    """Reserve ``nbytes`` for an output, so that a full disk shows at the start and not at the end.

    File systems without preallocation get a sparse file of that size.

    Raises:
        OutputError: The disk cannot hold the file.
    """
    try:
        _fallocate(fd, nbytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise output_error("cannot reserve space", path, error) from error
        if os.fstat(fd).st_size < nbytes:
            set_length(fd, nbytes, path)


def truncate(path: Path, nbytes: int) -> None:
    """Cut or extend ``path`` to ``nbytes`` (extended bytes are a hole)."""
    with writing(path) as fd:
        set_length(fd, nbytes, path)


def set_length(fd: int, nbytes: int, path: Path) -> None:
    """Cut or extend an open file to ``nbytes`` (extended bytes are a hole)."""
    try:
        _truncate(fd, nbytes)
    except OSError as error:
        raise output_error("cannot set the length", path, error) from error


def hard_link(existing: Path, name: Path) -> None:
    """Give ``existing`` a second name; OSError where the file system cannot."""
    _link(existing, name)


def copy_inside(fd_in: int, fd_out: int, nbytes: int, offset_in: int, offset_out: int) -> int:
    """Let the kernel copy up to ``nbytes``; OSError where it cannot between these files."""
    return _copy_file_range(fd_in, fd_out, nbytes, offset_in, offset_out)


def forget_cached(fd: int, offset: int, nbytes: int) -> None:
    """Tell the kernel that a range will not be read again: a long pass must not flush the cache."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def free_nbytes(folder: Path) -> int:
    """Bytes that can still be written on the file system that holds (or will hold) ``folder``."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def is_same_disk(path: Path, folder: Path) -> bool:
    """Whether ``path`` lies on the file system that holds (or will hold) ``folder``."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    return path.stat().st_dev == existing.stat().st_dev


def output_error(what: str, path: Path, error: OSError, offset: int | None = None) -> OutputError:
    """What the system refused, as an error with the fitting next step."""
    steps = {
        errno.ENOSPC: "Free some space and run the same command again; finished work is kept.",
        errno.EDQUOT: "Free some quota and run the same command again; finished work is kept.",
        errno.EFBIG: "Raise the file size limit (ulimit -f) or lower the shard size.",
        errno.EACCES: "Choose an output folder that you can write.",
        errno.EROFS: "Choose an output folder on a writable file system.",
    }
    return OutputError(
        what,
        file=path,
        offset=offset,
        found=os.strerror(error.errno or 0),
        next_step=steps.get(error.errno or 0),
    )


def stamp(path: Path) -> tuple[int, int] | None:
    """Length and time of last change (ns) of ``path``; nothing if it is not there."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def inode(path: Path) -> tuple[int, int]:
    """What tells one file from another whatever its name."""
    state = path.stat()
    return state.st_dev, state.st_ino


def sha256_of(path: Path) -> str:
    """Hex sha256 of a whole file, read in pieces."""
    digest = hashlib.sha256()
    with reading(path) as fd:
        nbytes = os.fstat(fd).st_size
        buffer = memoryview(bytearray(min(_HASH_NBYTES, max(nbytes, 1))))
        for offset in range(0, nbytes, _HASH_NBYTES):
            piece = buffer[: nbytes - offset]
            read_exact(fd, piece, offset, path)
            digest.update(piece)
    return digest.hexdigest()


def modified_ns(path: Path) -> int:
    """When ``path`` was last changed, in nanoseconds."""
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise SourceError(
            "cannot look at the file", file=path, found=os.strerror(error.errno or 0)
        ) from error


def allocated_nbytes(path: Path) -> int:
    """Bytes of disk that ``path`` already occupies; none where it does not exist."""
    return path.stat().st_blocks * 512 if path.exists() else 0


def remove_folder(folder: Path) -> None:
    """Remove a folder of our own making with everything in it."""
    shutil.rmtree(folder, ignore_errors=True)
