"""A small V4.1 checkpoint with weights, in the released layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from pipeline.miniature.blueprint import Blueprint, write_blueprint
from pipeline.miniature.released import dump_config, tokenizer_config_bytes
from pipeline.miniature.shards import Shard, shards_of
from pipeline.miniature.size import MiniatureSize, miniature_config, with_engram
from pipeline.miniature.values import write_values
from pipeline.miniature.vocabulary import small_vocabulary
from pipeline.model.config import read_config
from pipeline.model.engram.arithmetic import row_counts
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.tokens.token_map import compress_vocabulary

_WEIGHTS_VERSION = 1
"""Counts up when the same size and seed give other bytes."""


def write_miniature(
    folder: Path,
    size: MiniatureSize,
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


def miniature_blueprint(size: MiniatureSize, seed: int) -> Blueprint:
    """Everything about a miniature but its weights.

    The engram's rows and the compressed vocabulary come from the same rules that a converter
    checks them by, and the tensors from the config alone.
    """
    tokenizer, token_ids = small_vocabulary(size.vocab_size)
    config = miniature_config(size, token_ids)
    n_compressed = int(compress_vocabulary(tokenizer, size.vocab_size).max()) + 1
    engram = read_config(config).engram
    assert engram is not None
    config = with_engram(config, row_counts(engram), n_compressed)
    return Blueprint(
        origin={
            "kind": "miniature",
            "seed": seed,
            "size": asdict(size),
            "weights": _WEIGHTS_VERSION,
        },
        config=dump_config(config),
        tokenizer=tokenizer,
        tokenizer_config=tokenizer_config_bytes(),
        shards=shards_of(expected_tensors(read_config(config))),
    )
