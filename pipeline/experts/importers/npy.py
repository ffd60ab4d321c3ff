"""Arrays out of an ``.npz`` archive, each header believed only once it fits its bytes.

Not by ``np.load``, which makes room for whatever shape a header claims. Format: NumPy enhancement
proposal 1 (``numpy.lib.format``).
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from pipeline.errors import SourceError
from pipeline.source.json_object import shown

_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_MOST_NBYTES = 1 << 28
"""Of one array, unpacked: two halves of a table of 1,024 layers of 16,384 experts."""


def read_arrays(path: Path, names: Collection[str]) -> dict[str, NDArray[np.generic]]:
    """The arrays of these names that the archive holds; objects are never read.

    Raises:
        SourceError: The archive is damaged, or an array is too large or not what its header says.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            return {name: _array(archive, members[name]) for name in names if name in members}
    except (ValueError, TypeError, OSError, EOFError, SyntaxError, RuntimeError) as error:
        raise _damaged(path, error) from None
    except (zipfile.BadZipFile, zlib.error) as error:
        raise _damaged(path, error) from None


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[np.generic]:
    if info.file_size > _MOST_NBYTES:
        raise ValueError(f"{info.filename} is too large: {info.file_size:,} bytes")
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{info.filename} is of version {version}")
        shape, is_fortran, dtype = _HEADERS[version](member)
        content = member.read()
    if dtype.hasobject or min(shape, default=0) < 0:
        raise ValueError(f"{info.filename} is of {dtype} {shape}")
    # A view of what was read: a shape that does not fit it makes no room, it is refused.
    flat = np.frombuffer(content, dtype)
    return flat.reshape(shape, order="F") if is_fortran else flat.reshape(shape)


def _damaged(path: Path, error: Exception) -> SourceError:
    return SourceError("the .npz file cannot be read", file=path, found=shown(error))
