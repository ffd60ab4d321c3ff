"""A finished V4.1 model in the other layout, without quantizing anything again.

Only the engram differs between the layouts, so all else is copied as it is. Shards that would not
change by a byte are shared with the input by hard link, and so is the draft that lies beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline import files, sharing
from pipeline.errors import OutputError
from pipeline.gguf.header import padded
from pipeline.gguf.model_file import read_draft, read_model
from pipeline.model.layout import Layout
from pipeline.quant.dequant import dequantize
from pipeline.relayout.pieces import ByteRange, Piece, Product
from pipeline.relayout.shards import RelaidShard, plan_relayout


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
        FormatError: The model has no layouts, or its keys and tensors contradict each other.
    """
    model = read_model(path)
    draft = read_draft(model.files[0].path)
    shards = plan_relayout(model, layout, draft)
    inputs = [file.path for one in (model, draft) if one is not None for file in one.files]
    _check_names(inputs, shards, out)
    files.make_folder(out)
    _check_space(inputs, shards, out)
    written = [shard for shard in shards if shard.shared is None]
    for shard in written:
        _write(shard, _part(out, shard), progress)
    for shard in reversed(shards):
        _publish(shard, out)
    return out / shards[0].file_name


def _check_names(inputs: Sequence[Path], shards: Sequence[RelaidShard], out: Path) -> None:
    """Refuse before anything is opened for writing: an input, or somebody's file, is in the way."""
    if out.resolve() == inputs[0].parent.resolve():
        raise OutputError(
            "the output folder is the model's own",
            file=out,
            next_step="Name another folder; what does not change is shared, not copied.",
        )
    for shard in shards:
        target = out / shard.file_name
        if not target.exists() and not target.is_symlink():
            continue
        is_input = any(target.exists() and target.samefile(path) for path in inputs)
        if is_input and shard.shared is not None and target.samefile(shard.shared):
            continue
        raise OutputError(
            "the output is a link to the model itself" if is_input else "the file is there already",
            file=target,
            next_step="Delete it, or name another folder.",
        )


def _check_space(inputs: Sequence[Path], shards: Sequence[RelaidShard], out: Path) -> None:
    needed = sum(shard.nbytes for shard in shards)
    if inputs[0].stat().st_dev != out.stat().st_dev:
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
