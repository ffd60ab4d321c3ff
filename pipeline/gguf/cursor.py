"""Reads the values of a GGUF header one after the other, from a file that may lie about them.

Only as much of the file is read as the header asks for. A length is believed only once it fits
the file and the limits below, so a hostile header costs neither time nor memory.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NoReturn

import numpy as np

from pipeline.errors import FormatError
from pipeline.files import read_exact
from pipeline.gguf.header import CODES
from pipeline.gguf.keys import Scalar, ValueType

MAX_HEADER_NBYTES = 64 << 20
"""Twelve times the header of a V4.1 file, whose vocabulary makes up 5.3 MB."""

MAX_ARRAY_ELEMENTS = 1 << 21
"""Elements of all arrays of a file together; V4.1's hold 0.5 million."""

_CHUNK_NBYTES = 1 << 20
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in the header of an open file."""

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self.file_nbytes = os.fstat(fd).st_size
        self.offset = 0
        self._fd = fd
        self._buffer = bytearray()
        self._n_elements = 0

    def refuse(self, what: str, *, expected: object = None, found: object = None) -> NoReturn:
        """Raise a FormatError that names the file and where in it the cursor stands."""
        raise FormatError(what, file=self.path, offset=self.offset, expected=expected, found=found)

    def take(self, nbytes: int, what: str) -> bytes:
        """The next ``nbytes`` bytes, which hold ``what``."""
        self._need(nbytes, what)
        start = self.offset
        self.offset += nbytes
        return bytes(self._buffer[start : self.offset])

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        self._need(4, what)
        (number,) = _U32.unpack_from(self._buffer, self.offset)
        self.offset += 4
        return int(number)

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        self._need(8, what)
        (number,) = _U64.unpack_from(self._buffer, self.offset)
        self.offset += 8
        return int(number)

    def string(self, what: str) -> str:
        """A length and that many bytes of UTF-8."""
        content = self.take(self.u64(f"the length of {what}"), what)
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            self.refuse(f"{what} is not UTF-8", found=error.reason)

    def scalar(self, kind: ValueType, what: str) -> Scalar:
        """One value of ``kind``."""
        return self._values(kind, 1, what)[0]

    def array(self, kind: ValueType, what: str) -> tuple[Scalar, ...]:
        """A count and that many values of ``kind``."""
        n = self.u64(f"the length of {what}")
        if n > MAX_ARRAY_ELEMENTS - self._n_elements:
            self.refuse(
                f"{what} is too long", expected=f"at most {MAX_ARRAY_ELEMENTS:,}", found=f"{n:,}"
            )
        self._n_elements += n
        return self._values(kind, n, what)

    def _values(self, kind: ValueType, n: int, what: str) -> tuple[Scalar, ...]:
        if kind is ValueType.STRING:
            self._need(8 * n, what)
            return tuple([self.string(what) for _ in range(n)])
        code = CODES[kind]
        content = self.take(n * struct.calcsize(code), what)
        if kind is ValueType.BOOL and content.strip(b"\0\1"):
            self.refuse(f"{what} is a boolean other than 0 and 1", found=content[:8].hex())
        return tuple(np.frombuffer(content, np.dtype(code).newbyteorder("<")).tolist())

    def _need(self, nbytes: int, what: str) -> None:
        end = self.offset + nbytes
        if end <= len(self._buffer):
            return
        if end > self.file_nbytes:
            self.refuse(
                f"the file ends inside {what}",
                expected=f"{nbytes:,} bytes",
                found=f"{self.file_nbytes - self.offset:,}",
            )
        if end > MAX_HEADER_NBYTES:
            self.refuse(
                f"the header is too long at {what}",
                expected=f"at most {MAX_HEADER_NBYTES:,} bytes",
                found=f"{end:,}",
            )
        have = len(self._buffer)
        more = bytearray(min(max(end - have, _CHUNK_NBYTES), self.file_nbytes - have))
        read_exact(self._fd, memoryview(more), have, self.path)
        self._buffer += more
