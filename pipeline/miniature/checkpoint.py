"""A small checkpoint with weights, in the layout of the release that it is like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pipeline.miniature.blueprint import Blueprint, write_blueprint
from pipeline.miniature.released import dump_config, tokenizer_config_bytes
from pipeline.miniature.shards import Shard, shards_of
from pipeline.miniature.size import MiniatureSize
from pipeline.miniature.v4_size import V4Size
from pipeline.miniature.values import write_values
from pipeline.miniature.vocabulary import small_vocabulary
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors

AnySize = MiniatureSize | V4Size

SIZES: Mapping[str, type[AnySize]] = {size.release: size for size in (MiniatureSize, V4Size)}
"""Release -> the sizes that a miniature like it can have."""

_WEIGHTS_VERSION = 1
"""Counts up when the same size and seed give other bytes."""


def write_miniature(
    folder: Path,
    size: AnySize,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> bool:
    """Write a miniature; True if written, False if ``folder`` already held the very same one.

    Args:
        folder: Where to; new, empty, or begun with the same size and seed.
        size: Its sizes.
        seed: Same seed, same bytes.
        progress: Told the bytes of each finished shard.

    Raises:
        OutputError: The folder holds something else, or the disk is too small.
    """
    blueprint = miniature_blueprint(size, seed)

    def fill(fd: int, path: Path, shard: Shard) -> None:
        write_values(fd, path, shard, seed)
        if progress:
            progress(shard.nbytes)

    nbytes = sum(shard.nbytes for shard in blueprint.shards)
    return write_blueprint(folder, blueprint, fill, disk_nbytes=nbytes)


def miniature_blueprint(size: AnySize, seed: int) -> Blueprint:
    """Everything about a miniature but its weights; the tensors follow from the config alone."""
    vocabulary = small_vocabulary(size.vocab_size, size.release)
    config = size.config(vocabulary)
    return Blueprint(
        origin={
            "kind": "miniature",
            "seed": seed,
            "size": asdict(size),
            "weights": _WEIGHTS_VERSION,
        },
        config=dump_config(config),
        tokenizer=vocabulary.tokenizer,
        tokenizer_config=tokenizer_config_bytes(),
        shards=shards_of(expected_tensors(read_config(config))),
    )
