"""A finished V4.1 model in the other layout, without quantizing anything again.

Only the engram differs between the layouts, so all else is copied as it is. Shards that would not
change by a byte are shared with the input by hard link; those that change keep their number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline import files, sharing
from pipeline.errors import OutputError
from pipeline.gguf.header import TensorInfo, encode_padded_header, padded
from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import SPLIT_TENSORS_COUNT, GgufModel, read_model, split_keys
from pipeline.gguf.reader import GgufFile
from pipeline.model.contract.check import layout_of
from pipeline.model.layout import Layout
from pipeline.plan import PAGE
from pipeline.quant.dequant import dequantize
from pipeline.relayout.facts import read_hash_facts
from pipeline.relayout.keys import convert_keys
from pipeline.relayout.pieces import ENGRAM, ByteRange, Piece, Product, engram_pieces


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


def relayout(
    path: Path,
    layout: Layout,
    out: Path,
    *,
    progress: Callable[[int], None] = lambda _: None,
) -> Path:
    """Write the model at ``path`` to folder ``out`` in ``layout``; returns its first file there.

    Files keep their names, but for a layout at their end. They get them only after the last byte
    is written, the first shard last: what an interrupted run leaves are ``.part`` files that the
    next one replaces.

    Args:
        path: A file or folder that `read_model` takes; made by this project or not.
        layout: What the model is to become.
        out: Another folder than the model's.
        progress: Told the bytes written.

    Raises:
        OutputError: The model has that layout already, a file stands in the way, or the disk is
            too small.
        FormatError: The model is in neither layout, or its keys and tensors contradict each other.
    """
    model = read_model(path)
    shards = plan_relayout(model, layout)
    _check_names(model, shards, out)
    files.make_folder(out)
    _check_space(model, shards, out)
    written = [shard for shard in shards if shard.shared is None]
    for shard in written:
        _write(shard, _part(out, shard), progress)
    for shard in reversed(shards):
        _publish(shard, out)
    return out / shards[0].file_name


def plan_relayout(model: GgufModel, layout: Layout) -> tuple[RelaidShard, ...]:
    """What each file of ``model`` becomes in ``layout``; nothing but headers is read.

    Raises:
        OutputError: ``model`` has that layout already.
        FormatError: ``model`` is in neither layout, or its keys and tensors contradict each other.
    """
    have = layout_of(model)
    if have is layout:
        raise OutputError(
            f"the model already has the {layout} layout",
            file=model.files[0].path,
            next_step="There is nothing to do; use the files as they are.",
        )
    new = engram_pieces(model, read_hash_facts(model, have), layout)
    n_kept = sum(not ENGRAM.fullmatch(name) for name in model.tensors)
    key_values = convert_keys(model, have, layout)
    return tuple(
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


def relaid_name(name: str, have: Layout, layout: Layout) -> str:
    """A file or folder name in the new layout: one that ends in the old layout's name says so."""
    return re.sub(rf"-{have}(?=-\d{{5}}-of-\d{{5}}\.gguf$|\.gguf$|$)", f"-{layout}", name)


def _split_keys(model: GgufModel, no: int, n_tensors: int) -> tuple[KeyValue, ...]:
    if len(model.files) == 1:
        return ()
    keys = split_keys(no, len(model.files), n_tensors)
    has_total = SPLIT_TENSORS_COUNT in model.files[no].key_values
    return tuple(key for key in keys if has_total or key.key != SPLIT_TENSORS_COUNT)


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


def _check_names(model: GgufModel, shards: Sequence[RelaidShard], out: Path) -> None:
    """Refuse before anything is opened for writing: an input, or somebody's file, is in the way."""
    folder = model.files[0].path.parent
    if out.resolve() == folder.resolve():
        raise OutputError(
            "the output folder is the model's own",
            file=out,
            next_step="Name another folder; what does not change is shared, not copied.",
        )
    for shard, file in zip(shards, model.files, strict=True):
        target = out / shard.file_name
        if not target.exists() and not target.is_symlink():
            continue
        is_input = any(target.exists() and target.samefile(f.path) for f in model.files)
        if is_input and shard.shared is not None and target.samefile(file.path):
            continue
        raise OutputError(
            "the output is a link to the model itself" if is_input else "the file is there already",
            file=target,
            next_step="Delete it, or name another folder.",
        )


def _check_space(model: GgufModel, shards: Sequence[RelaidShard], out: Path) -> None:
    needed = sum(shard.nbytes for shard in shards)
    if model.files[0].path.stat().st_dev != out.stat().st_dev:
        needed += sum(s.shared.stat().st_size for s in shards if s.shared is not None)
    free = files.free_nbytes(out)
    if needed > free:
        raise OutputError(
            "the disk is too small for the model in its other layout",
            file=out,
            expected=f"{needed:,} bytes",
            found=f"{free:,} bytes free",
            next_step="Free some space, or name a folder on another disk.",
        )


def _part(out: Path, shard: RelaidShard) -> Path:
    return out / f"{shard.file_name}.part"


def _write(shard: RelaidShard, part: Path, progress: Callable[[int], None]) -> None:
    part.unlink(missing_ok=True)
    with files.writing(part, create=True) as fd:
        # Padding is what stays a hole: zeros.
        files.truncate(part, shard.nbytes)
        files.write_exact(fd, memoryview(shard.header), 0, part)
        progress(len(shard.header))
        ranges: list[tuple[ByteRange, int]] = []
        offset = len(shard.header)
        for piece in shard.pieces:
            if isinstance(piece.content, tuple):
                ranges += _placed(piece.content, offset)
            else:
                files.write_exact(fd, memoryview(_made(piece)), offset, part)
                progress(piece.nbytes)
            offset += padded(piece.nbytes)
        for span, at in _runs(ranges):
            sharing.copy_range(span.path, span.offset, span.nbytes, part, at, progress=progress)
        files.sync(fd, part)


def _made(piece: Piece) -> bytes:
    """The bytes of a tensor that the input does not hold."""
    weights = np.ones(piece.ne[::-1], np.float32)
    if isinstance(piece.content, Product):
        for ggml_type, span in piece.content.factors:
            content = files.read_bytes(span.path, span.offset, span.nbytes)
            rows = np.frombuffer(content, np.uint8).reshape(-1, ggml_type.row_nbytes(piece.ne[0]))
            weights *= dequantize(ggml_type, rows, piece.ne[0]).reshape(weights.shape)
    return weights.astype("<f4").tobytes()


def _placed(content: Sequence[ByteRange], offset: int) -> Iterator[tuple[ByteRange, int]]:
    for span in content:
        yield span, offset
        offset += span.nbytes


def _runs(ranges: Sequence[tuple[ByteRange, int]]) -> Iterator[tuple[ByteRange, int]]:
    """``ranges`` with neighbours joined: bytes that are adjacent on both sides go in one copy."""
    run: tuple[ByteRange, int] | None = None
    for span, at in ranges:
        if run is not None:
            first, begin = run
            follows = (first.path, first.offset + first.nbytes, begin + first.nbytes)
            if follows == (span.path, span.offset, at):
                run = ByteRange(first.path, first.offset, first.nbytes + span.nbytes), begin
                continue
            yield run
        run = span, at
    if run is not None:
        yield run


def _publish(shard: RelaidShard, out: Path) -> None:
    target = out / shard.file_name
    if shard.shared is None:
        files.rename(_part(out, shard), target)
    elif not target.exists():
        sharing.link_or_copy(shard.shared, target)
