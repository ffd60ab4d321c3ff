"""Cutting an importance matrix of the form before GGUF (`pipeline.importance.dat_form`).

The number of calls is of the whole stack and stays.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from pathlib import Path

from pipeline.cut.pieces import Kept, Piece, picked
from pipeline.errors import SourceError
from pipeline.experts.keep import KeepList
from pipeline.importance.dat_form import FIRST_ENTRY, VALUE_NBYTES, read_dat

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")


def dat_pieces(path: Path, keep: KeepList) -> tuple[int, Sequence[Piece]]:
    """What ``keep`` leaves of the matrix ``path``, and how many of its entries lost experts.

    Raises:
        SourceError: It is not of this form, or was not made for the model that ``keep`` is for.
    """
    dat = read_dat(path)
    pieces: list[Piece] = [Kept(0, FIRST_ENTRY)]
    n_cut, begin = 0, FIRST_ENTRY
    for entry in dat.entries:
        nbytes = entry.n_values * VALUE_NBYTES
        match = _STACK.fullmatch(entry.name)
        if match is None or int(match[1]) >= keep.n_layers:
            pieces.append(Kept(begin, entry.offset + nbytes - begin))
        elif entry.n_values % keep.n_experts or not entry.n_values:
            raise SourceError(
                "the importance matrix is not of a model with this many experts",
                file=path,
                tensor=entry.name,
                expected=f"a multiple of {keep.n_experts} values",
                found=entry.n_values,
            )
        else:
            n_cut += 1
            n_kept = entry.n_values // keep.n_experts * keep.n_kept
            # All of the entry's head but its last number, which counts the values.
            pieces.append(Kept(begin, entry.offset - VALUE_NBYTES - begin))
            pieces.append(struct.pack("<i", n_kept))
            entries = keep.layers[int(match[1])]
            pieces += picked(entry.offset, nbytes, keep.n_experts, entries)
        begin = entry.offset + nbytes
    return n_cut, [*pieces, Kept(begin, dat.nbytes - begin)]
