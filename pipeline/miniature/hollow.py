"""A full-size checkpoint without weights: true headers over holes, a few megabytes on disk."""

from __future__ import annotations

from pathlib import Path

from pipeline.files import read_bytes
from pipeline.miniature.blueprint import Blueprint, write_blueprint
from pipeline.miniature.released import config_bytes, config_of, tokenizer_config_bytes
from pipeline.miniature.shards import Shard, index_bytes, shards_of
from pipeline.miniature.vocabulary import released_vocabulary
from pipeline.model.config import read_config
from pipeline.model.expected.tensors import expected_tensors


def write_headers_only(folder: Path, *, like: str, tokenizer: Path | None) -> bool:
    """Write all shards of a release as headers over holes; True if written, False if there.

    File names, sizes, headers and config.json are the released ones; every weight reads as zero.

    Args:
        folder: Where to; new, empty, or begun with the same release and tokenizer.
        like: The release: ``v4.1-flash`` or ``v4-flash-0731``.
        tokenizer: A tokenizer.json to take along; without one, a made-up tokenizer with the
            released number of tokens, special ids and distinct compressed ids.

    Raises:
        ConfigError: No such release is known.
        OutputError: The folder holds something else, or the disk is too small.
        SourceError: ``tokenizer`` cannot be read.
    """
    blueprint = hollow_blueprint(like, tokenizer)
    described = len(blueprint.tokenizer) + len(index_bytes(blueprint.shards))
    headers = sum(len(shard.header) for shard in blueprint.shards)
    return write_blueprint(folder, blueprint, _leave_hollow, disk_nbytes=described + headers)


def hollow_blueprint(like: str, tokenizer: Path | None) -> Blueprint:
    """Everything about a full-size checkpoint but its weights."""
    config = config_bytes(like)
    return Blueprint(
        origin={"kind": "headers only", "like": like},
        config=config,
        tokenizer=read_bytes(tokenizer) if tokenizer else released_vocabulary(like),
        tokenizer_config=tokenizer_config_bytes(),
        shards=shards_of(expected_tensors(read_config(config_of(like)))),
    )


def _leave_hollow(fd: int, path: Path, shard: Shard) -> None:
    """Write nothing: what the file's length promises beyond its header is a hole."""
