"""What the files of a finished V4.1 model become in the other layout, planned from headers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import FormatError, OutputError
from pipeline.gguf.header import TensorInfo, encode_padded_header, padded
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import (
    GgufModel,
    draft_stem,
    model_stem,
    split_keys,
)
from pipeline.gguf.reader import GgufFile
from pipeline.model.contract.form import form_of
from pipeline.model.form import Architecture
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_facts import read_hash_facts
from pipeline.plan import PAGE
from pipeline.relayout.keys import convert_keys
from pipeline.relayout.pieces import ENGRAM, ByteRange, Piece, engram_pieces


@dataclass(frozen=True, slots=True)
class RelaidShard:
    """One output file: an input file as it is, or a header and pieces in file order."""

    file_name: str
    shared: Path | None
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to write; none for a shared file."""
        return len(self.header) + sum(padded(piece.nbytes) for piece in self.pieces)


def plan_relayout(
    model: GgufModel, layout: Layout, draft: GgufModel | None = None
) -> tuple[RelaidShard, ...]:
    """What each file of ``model`` becomes in ``layout``; nothing but headers is read.

    The files of its ``draft`` come last: they stay as they are, one draft suits both layouts.

    Raises:
        OutputError: ``model`` has that layout already.
        FormatError: ``model`` has no layouts, or its keys and tensors contradict each other.
    """
    have = present_layout(model)
    if have is layout:
        raise OutputError(
            f"the model already has the {layout} layout",
            file=model.files[0].path,
            next_step="There is nothing to do; use the files as they are.",
        )
    new = engram_pieces(model, read_hash_facts(model, have), layout)
    n_kept = sum(not ENGRAM.fullmatch(name) for name in model.tensors)
    key_values = convert_keys(model, have, layout)
    relaid = tuple(
        _relaid(
            file,
            pieces=[piece for home, piece in new if home == no],
            key_values=(
                *(key_values if no == 0 else ()),
                *_split_keys(model, no, n_kept + len(new)),
            ),
            is_first=no == 0,
            file_name=relaid_name(file.path.name, have, layout),
        )
        for no, file in enumerate(model.files)
    )
    return (*relaid, *_carried(draft, model_stem(Path(relaid[0].file_name))))


def _carried(draft: GgufModel | None, stem: str) -> Iterator[RelaidShard]:
    """The files of ``draft`` as they are, under names that go with a model called ``stem``."""
    for file in draft.files if draft is not None else ():
        number = file.path.name.removeprefix(model_stem(file.path))
        yield RelaidShard(f"{draft_stem(stem)}{number}", file.path, b"", ())


def present_layout(model: GgufModel) -> Layout:
    """The layout that ``model`` has now.

    Raises:
        FormatError: It is of a form that has no other layout.
    """
    form = form_of(model)
    if form.layout is None:
        raise FormatError(
            f"a {form} file has no other layout",
            file=model.files[0].path,
            expected=str(Architecture.DEEPSEEK41),
            found=str(form),
        )
    return form.layout


def relaid_name(name: str, have: Layout, layout: Layout) -> str:
    """A file or folder name in the new layout: one that ends in the old layout's name says so."""
    return re.sub(rf"-{have}(?=-\d{{5}}-of-\d{{5}}\.gguf$|\.gguf$|$)", f"-{layout}", name)


def _split_keys(model: GgufModel, no: int, n_tensors: int) -> tuple[KeyValue, ...]:
    if len(model.files) == 1:
        return ()
    keys = split_keys(no, len(model.files), n_tensors)
    has = model.files[no].key_values
    return tuple(key for key in keys if key.key in has)


def _relaid(
    file: GgufFile,
    *,
    pieces: Sequence[Piece],
    key_values: Sequence[KeyValue],
    is_first: bool,
    file_name: str,
) -> RelaidShard:
    kept = [
        Piece(t.name, t.ne, t.type, (ByteRange(file.path, t.offset, t.nbytes),))
        for t in file.tensors.values()
        if not ENGRAM.fullmatch(t.name)
    ]
    is_same = len(kept) == len(file.tensors) and not pieces and not is_first
    if is_same and all(file.key_values.get(entry.key) == entry for entry in key_values):
        return RelaidShard(file_name, file.path, b"", ())
    ordered = sorted((*kept, *pieces), key=lambda piece: (piece.nbytes % PAGE != 0, piece.layer))
    infos, start = [], 0
    for piece in ordered:
        infos.append(TensorInfo(piece.name, piece.ne, piece.type.type_id, start))
        start += padded(piece.nbytes)
    header = encode_padded_header(key_values, infos, page=PAGE)
    return RelaidShard(file_name, None, header, tuple(ordered))
