"""Importance matrices in the form before GGUF, which ik_llama.cpp still writes.

The number of entries; for each its name, a number of calls and its values; then whatever the
program added (llama.cpp ``tools/imatrix`` before pull request 9400: chunks and the name of the
text). Numbers are of 32 bits, little endian. The values of a stack lie expert by expert; the number
of calls is of the whole and stays.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from pipeline import files
from pipeline.cut.pieces import Kept, Piece, picked
from pipeline.errors import SourceError
from pipeline.experts.keep import KeepList

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
_MOST_ENTRIES = 1 << 16
_MOST_NAME_NBYTES = 1 << 10
_VALUE_NBYTES = 4


def dat_pieces(path: Path, keep: KeepList) -> tuple[int, Sequence[Piece]]:
    """What ``keep`` leaves of the matrix ``path``, and how many of its entries lost experts.

    Raises:
        SourceError: It is not of this form, or was not made for the model that ``keep`` is for.
    """
    pieces: list[Piece] = []
    n_cut = 0
    with files.reading(path) as fd:
        reader = _Reader(fd, path)
        for _ in range(reader.count("the number of entries", _MOST_ENTRIES)):
            begin = reader.offset
            name = reader.text()
            reader.count("the number of calls", 2**31 - 1)
            n_values = reader.count(f"the number of values of {name}", 2**31 - 1)
            values = reader.skip(n_values * _VALUE_NBYTES, name)
            match = _STACK.fullmatch(name)
            if match is None or int(match[1]) >= keep.n_layers:
                pieces.append(Kept(begin, reader.offset - begin))
                continue
            if n_values % keep.n_experts or not n_values:
                raise SourceError(
                    "the importance matrix is not of a model with this many experts",
                    file=path,
                    tensor=name,
                    expected=f"a multiple of {keep.n_experts} values",
                    found=n_values,
                )
            n_cut += 1
            n_kept = n_values // keep.n_experts * keep.n_kept
            pieces.append(Kept(begin, values - _VALUE_NBYTES - begin))
            pieces.append(struct.pack("<i", n_kept))
            nbytes, entries = n_values * _VALUE_NBYTES, keep.layers[int(match[1])]
            pieces += picked(values, nbytes, keep.n_experts, entries)
        rest = Kept(reader.offset, reader.nbytes - reader.offset)
    return n_cut, [Kept(0, 4), *pieces, rest]


class _Reader:
    """A position in a file that may lie about its lengths."""

    def __init__(self, fd: int, path: Path) -> None:
        self.offset = 0
        self.nbytes = os.fstat(fd).st_size
        self._fd = fd
        self._path = path

    def count(self, what: str, most: int) -> int:
        """A number from 0 to ``most``."""
        (number,) = struct.unpack("<i", self._take(4, what))
        if not 0 <= number <= most:
            raise self._refusal(what, found=number)
        return int(number)

    def text(self) -> str:
        """The name of an entry."""
        content = self._take(self.count("the length of a name", _MOST_NAME_NBYTES), "a name")
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise self._refusal("a name", found=content[:40]) from None

    def skip(self, nbytes: int, what: str) -> int:
        """Pass over bytes that must be there; gives where they begin."""
        begin = self.offset
        if nbytes > self.nbytes - begin:
            raise self._refusal(what, found=f"{self.nbytes - begin:,} of {nbytes:,} bytes")
        self.offset += nbytes
        return begin

    def _take(self, nbytes: int, what: str) -> bytes:
        content = bytearray(nbytes)
        files.read_exact(self._fd, memoryview(content), self.skip(nbytes, what), self._path)
        return bytes(content)

    def _refusal(self, what: str, *, found: object) -> SourceError:
        return SourceError(
            f"this is no importance matrix, or a damaged one: {what} cannot be right",
            file=self._path,
            offset=self.offset,
            found=found,
        )
