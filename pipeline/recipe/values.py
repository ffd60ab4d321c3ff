"""What single values of a recipe may be: types, patterns, names, sizes, allowances."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from pipeline.model.layout import Layout
from pipeline.quant.types import TYPES
from pipeline.recipe.mistakes import did_you_mean, mistake, one_of

ALLOWANCES = {
    "below_bf16": "engram q/k, hyper-connection mixing and router matrices below BF16",
    "larger_than_fp4": "FP4 experts to another type that is no smaller than MXFP4",
}
"""What a recipe may be allowed by name, because published files did it."""

_NO_ENCODER = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "F8_E4M3"})
"""Types that ggml computes with or stores but never quantizes to."""

WRITABLE_TYPES = tuple(
    t.name for t in TYPES.values() if t.family == "mainline" and t.name not in _NO_ENCODER
)
"""The types this version can write, all of them by ggml."""

MIN_SHARD_NBYTES = 1 << 20


class DraftMode(StrEnum):
    """What becomes of the MTP/DSpark module."""

    KEEP = "keep"
    """A file of its own beside the target."""
    DROP = "drop"
    ONLY = "only"
    """Its file and no target; nothing but its shards is read."""


def _known_type(name: str) -> str:
    known = TYPES.get(name.upper())
    if known is None:
        raise mistake(
            "no ggml type has this name",
            expected=one_of(WRITABLE_TYPES),
            next_step=did_you_mean(name.upper(), WRITABLE_TYPES),
        )
    return known.name


def _compiles(pattern: str) -> str:
    if not pattern:
        raise mistake(
            "an empty pattern matches every tensor",
            expected="a regular expression for GGUF names",
            next_step="Give the type to the roles instead, or write '.' if every tensor is meant.",
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise mistake(
            f"not a regular expression: {error}",
            expected="a pattern of Python's re",
            next_step="Write patterns in single quotes: TOML leaves their backslashes alone.",
        ) from error
    return pattern


def _layout(value: object) -> object:
    if isinstance(value, str) and value in list(Layout):
        return Layout(value)
    near = did_you_mean(value, Layout) if isinstance(value, str) else None
    raise mistake("not a layout", expected=one_of(Layout), next_step=near)


def _allowance(value: object) -> object:
    if isinstance(value, str) and value in ALLOWANCES:
        return value
    near = did_you_mean(value, ALLOWANCES) if isinstance(value, str) else None
    raise mistake(
        "nothing of this name can be allowed", expected=one_of(ALLOWANCES), next_step=near
    )


def _draft_mode(value: object) -> object:
    if isinstance(value, str) and value in list(DraftMode):
        return DraftMode(value)
    near = did_you_mean(value, DraftMode) if isinstance(value, str) else None
    raise mistake("no mode of the draft module", expected=one_of(DraftMode), next_step=near)


def _shard_size(nbytes: int) -> int:
    if nbytes < MIN_SHARD_NBYTES:
        raise mistake(
            "shards this small are of no use",
            expected=f"at least {MIN_SHARD_NBYTES:,} bytes",
            next_step="The size is in bytes: 45_000_000_000 is 45 GB.",
        )
    return nbytes


def _expert_count(n_experts: int) -> int:
    if n_experts < 1:
        raise mistake("no expert would be left", expected="at least 1")
    return n_experts


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise mistake(
            "files cannot be named after this",
            expected="up to 100 letters, digits, dots, dashes or underscores; no mark first",
            next_step='Without a key `name`, the name is the recipe\'s file name without ".toml".',
        )
    return name


TypeName = Annotated[str, AfterValidator(_known_type)]
Pattern = Annotated[str, AfterValidator(_compiles)]
LayoutName = Annotated[Layout, BeforeValidator(_layout)]
Allowance = Annotated[str, BeforeValidator(_allowance)]
DraftModeName = Annotated[DraftMode, BeforeValidator(_draft_mode)]
ExpertCount = Annotated[int, AfterValidator(_expert_count)]
ShardSize = Annotated[int, AfterValidator(_shard_size)]
Name = Annotated[str, AfterValidator(_name)]
