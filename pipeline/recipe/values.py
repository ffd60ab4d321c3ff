"""What single values of a recipe may be: types, patterns, names, sizes, allowances."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from pipeline.model.layout import Layout
from pipeline.model.roles import TARGET_ROLES, SubRole
from pipeline.quant.types import TYPES
from pipeline.recipe.mistakes import did_you_mean, mistake, one_of

ALLOWANCES = {
    "below_bf16": "engram q/k, hyper-connection mixing and router matrices below BF16",
    "larger_than_fp4": "FP4 experts to another type that is no smaller than MXFP4",
}
"""What a recipe may be allowed by name, because published files did it."""

_NO_ENCODER = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "F8_E4M3"})
"""Types that ggml computes with or stores but never quantizes to."""

WRITABLE_TYPES = tuple(name for name in TYPES if name not in _NO_ENCODER)
"""The types this version can write: mainline's by ggml, ik's by ik_llama.cpp's own library."""

MAINLINE_TYPES = tuple(name for name in WRITABLE_TYPES if TYPES[name].family == "mainline")
"""Those of them that ggml writes and every engine reads."""

AS_IN_SOURCE = "source"
"""What stands for a type where a tensor keeps the one it has in the source."""

_OUTSIDE_TARGETS = frozenset(
    {SubRole.DRAFT_INPUT, SubRole.MARKOV, SubRole.CONFIDENCE, SubRole.DRAFT, SubRole.VISION}
)

TARGET_SUB_ROLES = tuple(one for one in SubRole if one not in _OUTSIDE_TARGETS)
"""The sub-roles of a target file."""

MIN_SHARD_NBYTES = 1 << 20


class DraftMode(StrEnum):
    """What becomes of the MTP/DSpark module."""

    KEEP = "keep"
    """A file of its own beside the target."""
    DROP = "drop"
    ONLY = "only"
    """Its file and no target; nothing but its shards is read."""


class Granularity(StrEnum):
    """What gets one type of its own when a budget is spent."""

    SUB_ROLE = "sub_role"
    LAYERS = "layers"
    """A sub-role in a few layers that follow each other."""
    TENSOR = "tensor"


def _known_type(name: str) -> str:
    known = TYPES.get(name.upper())
    if known is None:
        raise mistake(
            "no ggml type has this name",
            expected=one_of(WRITABLE_TYPES),
            next_step=did_you_mean(name.upper(), WRITABLE_TYPES),
        )
    return known.name


def _known_or_source(name: str) -> str:
    return AS_IN_SOURCE if name.lower() == AS_IN_SOURCE else _known_type(name)


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


def _word_of(kind: type[StrEnum], what: str) -> BeforeValidator:
    """A validator that takes one of the words of ``kind``."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        near = did_you_mean(value, kind) if isinstance(value, str) else None
        raise mistake(what, expected=one_of(kind), next_step=near)

    return BeforeValidator(check)


def _name_in(words: Collection[str], what: str) -> BeforeValidator:
    """A validator that takes one of ``words``."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in words:
            return value
        near = did_you_mean(value, words) if isinstance(value, str) else None
        raise mistake(what, expected=one_of(words), next_step=near)

    return BeforeValidator(check)


def _shard_size(nbytes: int) -> int:
    if nbytes < MIN_SHARD_NBYTES:
        raise mistake(
            "shards this small are of no use",
            expected=f"at least {MIN_SHARD_NBYTES:,} bytes",
            next_step="The size is in bytes: 45_000_000_000 is 45 GB.",
        )
    return nbytes


def _positive(number: int) -> int:
    if number < 1:
        raise mistake("too small a number", expected="at least 1")
    return number


def _not_negative(number: float) -> float:
    # NaN and infinity are numbers in TOML.
    if not 0 <= number < math.inf:
        raise mistake("not a sensible number", expected="0 or more, and finite")
    return number


def _not_empty(text: str) -> str:
    if not text:
        raise mistake("empty", expected="text, or no such key")
    return text


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
TypeOrSource = Annotated[str, AfterValidator(_known_or_source)]
Pattern = Annotated[str, AfterValidator(_compiles)]
RoleName = Annotated[str, _name_in(TARGET_ROLES, "no role of a target")]
SubRoleName = Annotated[str, _name_in(TARGET_SUB_ROLES, "no sub-role of a target")]
LayoutName = Annotated[Layout, _word_of(Layout, "not a layout")]
Allowance = Annotated[str, _name_in(ALLOWANCES, "nothing of this name can be allowed")]
DraftModeName = Annotated[DraftMode, _word_of(DraftMode, "no mode of the draft module")]
GranularityName = Annotated[Granularity, _word_of(Granularity, "no granularity of a budget")]
ExpertCount = Annotated[int, AfterValidator(_expert_count)]
ShardSize = Annotated[int, AfterValidator(_shard_size)]
Positive = Annotated[int, AfterValidator(_positive)]
NotNegative = Annotated[int, AfterValidator(_not_negative)]
Factor = Annotated[float, AfterValidator(_not_negative)]
Text = Annotated[str, AfterValidator(_not_empty)]
Name = Annotated[str, AfterValidator(_name)]
