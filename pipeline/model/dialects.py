"""Other projects' forms of a `deepseek41` GGUF, by the signs they bear, and what to do with one.

Several projects use the architecture name for files that no common loader shares. Signs after the
sources of each: antirez/ds4 and halo-box/strix-llama.cpp (``engram.encoding`` =
``e4m3_e8m0_32_row264``), masturm's mx-llama.cpp, tarruda/llama.cpp 021a4e2b, JigSawPT/llama.cpp,
HelloKS/llama.cpp 18ac4655, kmbandy/llama.cpp 0625f5d7, fairydreaming/llama.cpp 456d203f.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from pipeline.gguf.keys import KeyValue
from pipeline.gguf.model_file import GgufModel

MAINLINE_TABLE = "per_layer_token_embd.weight"
FORK_TABLE = re.compile(r"blk\.\d+\.engram_embd\.weight")

_ARCHITECTURE = "deepseek41"
_DS4_ROW_NBYTES = 264

_FROM_RELEASED = (
    "Convert the released checkpoint instead; its tensors are stored in another way, so adding "
    "keys cannot help."
)
_ADD_KEYS = (
    "Its tensors are those of the fork layout, so keys alone make it one: take it as a source, "
    "every tensor in its type."
)


@dataclass(frozen=True, slots=True)
class Dialect:
    """A form that this project neither writes nor reads.

    ``tensors_fit`` says that its tensors are the fork layout's: keys alone would make it readable.
    """

    name: str
    makers: str
    why: str
    tensors_fit: bool = False

    @property
    def next_step(self) -> str:
        """What the owner of such a file can do."""
        return _ADD_KEYS if self.tensors_fit else _FROM_RELEASED


@dataclass(frozen=True, slots=True)
class _Signs:
    """A file with one of these has the dialect: a tensor name or a key that matches."""

    dialect: Dialect
    tensor: str = r"(?!)"
    key: str = r"(?!)"


JIGSAW = Dialect(
    "JigSawPT: raw I8 tables, hash constants as tensors",
    "JigSawPT/llama.cpp",
    "The engram tables are FP8 bytes called I8, with their scales in tensors of their own.",
)
DS4 = Dialect(
    "ds4: rows of 264 bytes, FP8 and scales interleaved",
    "antirez/ds4, halo-box/strix-llama.cpp, ajaxdude, pestopoppa",
    "An engram row is 256 bytes of FP8 and 8 of scales, called I8 [264, rows].",
)
DS4_CONFIG = Dialect(
    "ds4: config.json as one key",
    "antirez/ds4 and its forks",
    "The hyper-parameters stand in one blob, deepseek41.config, that only ds4 reads.",
)
MX = Dialect(
    "mx-llama.cpp: engram_embed, indexer_compressor",
    "masturm/mx-llama.cpp, mxxm-t, aaron-ryckman",
    "Engram tables and indexer keys have other names and other companions.",
)
TARRUDA = Dialect(
    "tarruda: I8 tables with scale tensors",
    "tarruda/llama.cpp",
    "The engram tables are I8 with scales in tensors of their own, and the offsets UINT32.",
)
SIDECAR = Dialect(
    "hash constants in a file beside the GGUF (sidecar)",
    "fairydreaming/llama.cpp (DSE1 file), Skelectric's ik port (.engram-constants.bin)",
    "The GGUF holds no hash constant, so no engine that looks for them there can start.",
    tensors_fit=True,
)
HELLOKS = Dialect(
    "HelloKS: other key names than the nine",
    "HelloKS/llama.cpp",
    "Its hash constants are there, under names that only this fork looks for.",
    tensors_fit=True,
)
KMBANDY = Dialect(
    "kmbandy: primes rebuilt by the engine",
    "kmbandy/llama.cpp",
    "Primes and offsets are not stored: its engine computes them from engram.vocab_size.",
    tensors_fit=True,
)
BOTH_TABLES = Dialect(
    "both layouts' tables in one file; no loader reads that",
    "unknown",
    "Loaders count the tensors, and each layout has some that the other has not.",
)
NO_TABLE = Dialect(
    "no engram table",
    "unknown",
    "V4.1 looks up rows of two engram tables, and this file has neither layout's.",
)

_FOREIGN = (
    _Signs(
        JIGSAW,
        r"engram_(token_map|primes|offsets|multipliers)\.weight",
        r"deepseek41\.engram\.present",
    ),
    _Signs(DS4, r"\.engram_[qk]_norm\.weight", r"deepseek41\.engram\.encoding"),
    _Signs(DS4_CONFIG, key=r"deepseek41\.config"),
    _Signs(MX, r"\.engram_embed\.weight"),
    _Signs(TARRUDA, r"\.engram_(embd[._]scale|[qk]_weight)(\.weight)?$"),
)
"""Their tensors differ, so adding keys cannot help."""


def dialect_of(model: GgufModel) -> Dialect | None:
    """The foreign dialect of ``model``; none where it is a form of ours or another architecture.

    Keys count whatever stands before the first dot of their names: a file whose keys have lost
    their prefix, or have V4's, is broken, but no dialect.
    """
    if _architecture(model.key_values) != _ARCHITECTURE:
        return None
    tables = [t for name, (_, t) in model.tensors.items() if FORK_TABLE.fullmatch(name)]
    named = foreign_dialect(model.tensors, model.key_values)
    if named is None and any(table.type.name == "I8" for table in tables):
        return DS4 if all(table.ne[0] == _DS4_ROW_NBYTES for table in tables) else JIGSAW
    return named


def foreign_dialect(tensors: Collection[str], keys: Collection[str]) -> Dialect | None:
    """The foreign dialect of a `deepseek41` file with these tensor names and keys, if it is one."""
    for signs in _FOREIGN:
        if any(re.search(signs.tensor, name) for name in tensors) or any(
            re.fullmatch(signs.key, key) for key in keys
        ):
            return signs.dialect
    has_mainline = MAINLINE_TABLE in tensors
    has_fork = any(FORK_TABLE.fullmatch(name) for name in tensors)
    if has_mainline and has_fork:
        return BOTH_TABLES
    if not has_mainline and not has_fork:
        return NO_TABLE
    return _relative({_engram_name(key) for key in keys} - {None}) if has_fork else None


def _relative(names: Collection[str | None]) -> Dialect | None:
    """Files with the fork layout's tensors, told apart by where the hash constants are."""
    if not names:
        return SIDECAR
    if "primes" in names:
        return None
    if "head_bucket_sizes" in names:
        return HELLOKS
    return KMBANDY if "vocab_size" in names else None


def _engram_name(key: str) -> str | None:
    """What follows ``engram.``, whatever architecture, or none, stands before it."""
    match = re.fullmatch(r"(?:\w+\.)?engram\.(.+)", key)
    return match[1] if match else None


def _architecture(keys: Mapping[str, KeyValue]) -> object:
    entry = keys.get("general.architecture")
    return None if entry is None else entry.value
