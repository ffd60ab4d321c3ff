"""A checkpoint folder before it exists, and the writing of it: whole, once, resumable.

A folder says what it holds in `MARKER`, written first; the index is written last. A folder with
the same marker is finished by the next run, or left alone when it is whole; any other folder that
holds something is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.digest import canonical_json, sha256
from pipeline.errors import OutputError
from pipeline.files import (
    free_nbytes,
    make_folder,
    read_bytes,
    rename,
    sync,
    truncate,
    write_exact,
    write_whole,
    writing,
)
from pipeline.miniature.shards import Shard, index_bytes
from pipeline.source.checkpoint import CONFIG_NAME, INDEX_NAME

MARKER = "generated.json"

Fill = Callable[[int, Path, Shard], None]
"""Writes the tensors of a shard into an open file that already has its header and its size."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All of a checkpoint but its tensor values.

    ``origin`` is what the bytes depend on: kind of checkpoint, sizes, seed, digests.
    """

    origin: Mapping[str, object]
    config: bytes
    tokenizer: bytes
    tokenizer_config: bytes
    shards: tuple[Shard, ...]

    @property
    def marker(self) -> bytes:
        """What identifies the checkpoint: its origin and the digests of its small files."""
        return canonical_json(
            {
                "config": sha256(self.config),
                "headers": sha256(b"".join(shard.header for shard in self.shards)),
                "origin": self.origin,
                "tokenizer": sha256(self.tokenizer),
            }
        )


def write_blueprint(folder: Path, blueprint: Blueprint, fill: Fill, *, disk_nbytes: int) -> bool:
    """Write the checkpoint; True if anything was written, False if it was all there.

    Args:
        folder: Where to; new, empty, or begun with the same blueprint.
        blueprint: What to write.
        fill: Writes the values of one shard.
        disk_nbytes: Space that the whole checkpoint takes on disk.

    Raises:
        OutputError: The folder holds something else, the disk is too small, or a write failed.
    """
    missing = [shard for shard in blueprint.shards if not _has(folder, shard)]
    _refuse_foreign(folder, blueprint)
    if not missing and (folder / INDEX_NAME).exists():
        return False
    _check_space(folder, disk_nbytes * len(missing) // len(blueprint.shards))
    make_folder(folder)
    write_whole(folder / MARKER, blueprint.marker)
    for shard in missing:
        _write_shard(folder, shard, fill)
    write_whole(folder / CONFIG_NAME, blueprint.config)
    write_whole(folder / "tokenizer.json", blueprint.tokenizer)
    write_whole(folder / "tokenizer_config.json", blueprint.tokenizer_config)
    write_whole(folder / INDEX_NAME, index_bytes(blueprint.shards))
    return True


def _has(folder: Path, shard: Shard) -> bool:
    path = folder / shard.file
    return path.exists() and path.stat().st_size == shard.nbytes


def _refuse_foreign(folder: Path, blueprint: Blueprint) -> None:
    if folder.exists() and not folder.is_dir():
        raise OutputError("a file stands where the checkpoint's folder should be", file=folder)
    marker = folder / MARKER
    if marker.exists() and read_bytes(marker) == blueprint.marker:
        return
    begun = {f".{MARKER}.part"}
    if folder.exists() and {path.name for path in folder.iterdir()} - begun:
        what = "another generated checkpoint" if marker.exists() else "files of another origin"
        raise OutputError(
            f"the folder already holds {what}",
            file=folder,
            next_step="Choose a new folder; nothing was changed in this one.",
        )


def _check_space(folder: Path, nbytes: int) -> None:
    free = free_nbytes(folder)
    if free < nbytes:
        raise OutputError(
            "the disk is too small for this checkpoint",
            file=folder,
            expected=f"{nbytes:,} bytes free",
            found=f"{free:,} bytes free",
            next_step="Choose smaller sizes or another disk.",
        )


def _write_shard(folder: Path, shard: Shard, fill: Fill) -> None:
    final = folder / shard.file
    part = final.with_name(f".{final.name}.part")
    with writing(part, create=True) as fd:
        truncate(part, 0)  # what a killed run left must not show through a hole
        truncate(part, shard.nbytes)
        write_exact(fd, memoryview(shard.header), 0, part)
        fill(fd, part, shard)
        sync(fd, part)
        assert os.fstat(fd).st_size == shard.nbytes
    rename(part, final)
