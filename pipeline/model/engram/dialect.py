"""Which engram layout a V4.1 GGUF has, told by tensor names and keys; others' forms by name.

Several projects use the architecture name `deepseek41` for files that no common loader shares.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from pipeline.model.layout import Layout

MAINLINE_TABLE = "per_layer_token_embd.weight"
_FORK_TABLE = re.compile(r"blk\.\d+\.engram_embd\.weight")
_ANY_ENGRAM = re.compile(r"per_layer_token_embd\.weight|.*\bengram_.*")
_KEYS = "deepseek41.engram."


@dataclass(frozen=True, slots=True)
class Dialect:
    """A layout this project knows, or the name of one it does not."""

    layout: Layout | None
    name: str


@dataclass(frozen=True, slots=True)
class _Foreign:
    name: str
    tensor: str | None = None
    key: str | None = None


_FOREIGN = (
    _Foreign(
        "JigSawPT: raw I8 tables, hash constants as tensors",
        r"engram_(token_map|primes|offsets|multipliers)\.weight",
        "deepseek41.engram.present",
    ),
    _Foreign(
        "ds4: rows of 264 bytes, FP8 and scales interleaved",
        r"\.engram_[qk]_norm\.weight",
        "deepseek41.engram.encoding",
    ),
    _Foreign("ds4: config.json as one key", key="deepseek41.config"),
    _Foreign("mx-llama.cpp: engram_embed, indexer_compressor", r"\.engram_embed\.weight"),
    _Foreign(
        "tarruda: I8 tables with scale tensors",
        r"\.engram_(embd[._]scale|[qk]_weight)(\.weight)?$",
    ),
)
"""Their tensors differ, so adding keys cannot help."""


def recognise(tensors: Collection[str], keys: Collection[str]) -> Dialect:
    """The layout of a file with these tensor names and keys."""
    for foreign in _FOREIGN:
        by_tensor = foreign.tensor and any(re.search(foreign.tensor, name) for name in tensors)
        if by_tensor or foreign.key in keys:
            return Dialect(None, foreign.name)
    has_mainline = MAINLINE_TABLE in tensors
    has_fork = any(_FORK_TABLE.fullmatch(name) for name in tensors)
    if has_mainline and has_fork:
        return Dialect(None, "both layouts' tables in one file; no loader reads that")
    if has_mainline:
        return Dialect(Layout.MAINLINE, Layout.MAINLINE.value)
    if has_fork:
        return _fork_or_relative(keys)
    return Dialect(None, "no engram table")


def _fork_or_relative(keys: Collection[str]) -> Dialect:
    """Files with the fork layout's tensors, told apart by where the hash constants are."""
    if not any(key.startswith(_KEYS) for key in keys):
        return Dialect(None, "hash constants in a file beside the GGUF (sidecar)")
    if f"{_KEYS}primes" not in keys and f"{_KEYS}head_bucket_sizes" in keys:
        return Dialect(None, "HelloKS: other key names than the nine")
    if f"{_KEYS}primes" not in keys and f"{_KEYS}vocab_size" in keys:
        return Dialect(None, "kmbandy: primes rebuilt by the engine")
    return Dialect(Layout.FORK, Layout.FORK.value)


def table_layers(tensors: Collection[str]) -> tuple[int, ...]:
    """The layers that have a table of their own (fork layout), in order."""
    return tuple(sorted(int(name.split(".")[1]) for name in tensors if _FORK_TABLE.fullmatch(name)))


def engram_tensors(tensors: Collection[str]) -> tuple[str, ...]:
    """The names among ``tensors`` that are those of engram tensors, in any form."""
    return tuple(sorted(name for name in tensors if _ANY_ENGRAM.fullmatch(name)))
