"""An importance matrix for a model that lost experts: the entries of those that stay.

The GGUF form is that of `pipeline.importance.gguf_form`; the one before it is cut by
`pipeline.cut.imatrix_dat`. A quantizer refuses a matrix with another number of experts than the
model; one with the entries in another order it takes without a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline import files
from pipeline.cut.imatrix_dat import dat_pieces
from pipeline.cut.pieces import Kept, Piece, picked, write_pieces
from pipeline.errors import SourceError
from pipeline.experts.keep import KeepList
from pipeline.gguf.header import ALIGNMENT_KEY, TensorInfo, encode_header, padded
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.reader import GgufFile, GgufTensor
from pipeline.importance.gguf_form import open_imatrix
from pipeline.importance.matrix import is_gguf

_STACK = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight\.(in_sum2|counts)")


def cut_imatrix(path: Path, keep: KeepList, out: Path) -> int:
    """Write what ``keep`` leaves of the importance matrix ``path`` to ``out``.

    Returns:
        How many of its matrices lost entries.

    Raises:
        SourceError: It is of no known form, or was not made for the model that ``keep`` is for.
        FormatError: The file is damaged.
        OutputError: ``out`` cannot be written.
    """
    n_cut, pieces = (_gguf_pieces if is_gguf(path) else dat_pieces)(path, keep)
    if not n_cut:
        raise SourceError(
            "the importance matrix knows none of the model's experts",
            file=path,
            expected="entries blk.N.ffn_*_exps.weight",
        )
    write_pieces(path, pieces, out)
    return n_cut


def _gguf_pieces(path: Path, keep: KeepList) -> tuple[int, Sequence[Piece]]:
    file = open_imatrix(path)
    infos: list[TensorInfo] = []
    pieces: list[Piece] = []
    n_cut = start = 0
    for tensor in file.tensors.values():
        entries = _entries(file, tensor, keep)
        if entries is not None:
            _check_values(file, tensor)
        ne, nbytes = tensor.ne, tensor.nbytes
        if entries is None:
            pieces.append(Kept(tensor.offset, nbytes))
        else:
            n_cut += 1
            ne = (*ne[:-1], len(entries))
            pieces += picked(tensor.offset, nbytes, keep.n_experts, entries)
            nbytes = nbytes // keep.n_experts * len(entries)
        infos.append(TensorInfo(tensor.name, ne, tensor.type.type_id, start))
        pieces.append(bytes(padded(nbytes) - nbytes))
        start += padded(nbytes)
    _require_layers(file, keep)
    return n_cut, [encode_header(_kept_keys(file), infos), *pieces]


def _check_values(file: GgufFile, tensor: GgufTensor) -> None:
    """Refuse sums that no text can give: a quantizer would take them for weights."""
    content = files.read_bytes(file.path, tensor.offset, tensor.nbytes)
    values = np.frombuffer(content, "<f4").reshape(tensor.shape)
    wrong = np.argwhere(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        at = tuple(int(place) for place in wrong[0])
        raise SourceError(
            "the importance matrix holds a value that is no sum of squares and no count",
            file=file.path,
            tensor=tensor.name,
            expected="finite numbers from 0 on",
            found=f"{values[at]} at {list(at)}",
            next_step="Measure it again.",
        )


def _require_layers(file: GgufFile, keep: KeepList) -> None:
    """Refuse a matrix that knows some layers only: the others would be quantized without a word."""
    known = {int(match[1]) for name in file.tensors if (match := _STACK.fullmatch(name))}
    lacking = sorted(set(range(keep.n_layers)) - known)
    if known and lacking:
        raise SourceError(
            "the importance matrix has no entries for the experts of some layers",
            file=file.path,
            expected=f"{keep.n_layers} layers",
            found=f"none for layer {', '.join(map(str, lacking[:8]))}",
        )


def _kept_keys(file: GgufFile) -> list[KeyValue]:
    """All but the alignment, which goes back to the usual one, and empty lists.

    Nobody can tell the type of the latter; readers take a missing one for empty.
    """
    entries = file.key_values.values()
    return [e for e in entries if e.key != ALIGNMENT_KEY and e.value != ()]


def _entries(file: GgufFile, tensor: GgufTensor, keep: KeepList) -> tuple[int, ...] | None:
    """The entries of a tensor that stay; nothing where it has none for experts."""
    match = _STACK.fullmatch(tensor.name)
    if match is None or int(match[1]) >= keep.n_layers:
        return None
    if tensor.ne[-1] != keep.n_experts or tensor.type.block != 1:
        raise SourceError(
            "the importance matrix is not of a model with this many experts",
            file=file.path,
            tensor=tensor.name,
            expected=f"F32, {keep.n_experts} entries",
            found=f"{tensor.type.name} {tensor.ne}",
        )
    return keep.layers[int(match[1])]
