r"""Rules of the form ``pattern=type``, as three tools take them.

- llama.cpp's ``llama-quantize --tensor-type a=b`` and ``--tensor-type-file``: rules apart by blanks
  or line feeds, the name before the first ``=``, types in either case (``tools/quantize``).
- ik_llama.cpp's ``llama-quantize --custom-q "a=b,c=d"``: rules apart by commas, types as ggml
  spells them (``examples/quantize``).
- Thireus' GGUF-Tool-Suite ``.recipe`` files: one anchored rule a line, comments behind ``#``.

In all of them a pattern is searched in GGUF names and the first that is found wins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.errors import QuantmillError, RecipeError, raise_problems
from pipeline.quant.types import TYPES, GgmlType
from pipeline.recipe.mistakes import did_you_mean


class Dialect(StrEnum):
    """The tool that rules are written for."""

    LLAMA = "llama"
    IK = "ik"
    THIREUS = "thireus"


@dataclass(frozen=True, slots=True)
class Rule:
    """A type for the tensors in whose name ``pattern`` is found; ``line`` counts from 1."""

    pattern: str
    type: GgmlType
    line: int = 0


_FLAGS = frozenset({"--tensor-type", "--custom-q"})
"""Options whose values are rules, where a whole command line was pasted."""

_APART = re.compile(r",(?![^{}]*\})(?![^\[\]]*\])|\s+")
"""Between rules: blanks, or a comma that does not belong to the pattern (``{1,3}``)."""

_REPACKED = re.compile(r"_R(4|8|16)$")
"""Ending of ik types whose rows lie interleaved; a file is made in the plain ones."""

_CLASSES = {"[:digit:]": "0-9", "[:alpha:]": "a-z", "[:alnum:]": "a-z0-9"}
"""What C++'s expressions may hold inside brackets and Python's may not."""


def read_rules(text: str, *, name: str = "rules") -> tuple[Rule, ...]:
    """The rules in ``text``, written for whichever of the tools.

    Args:
        text: A file, the value of an option, or options with their values.
        name: How messages call it.

    Raises:
        RecipeError: Something in it is no rule, or there is none at all.
        Problems: Several of these.
    """
    rules: list[Rule] = []
    problems: list[QuantmillError] = []
    for number, word in _words(text):
        try:
            rules.append(_rule(word, number, name))
        except RecipeError as error:
            problems.append(error)
    if not rules and not problems:
        problems.append(
            RecipeError("there is no rule in it", file=name, expected="lines such as pattern=type")
        )
    raise_problems(name, problems)
    return tuple(rules)


def write_rules(rules: Sequence[Rule], dialect: Dialect) -> str:
    """``rules`` as ``dialect`` reads them.

    Raises:
        RecipeError: The tool does not know a type.
    """
    if dialect is Dialect.LLAMA:
        _require_mainline(rules)
    words = [f"{rule.pattern}={rule.type.planner_name}" for rule in rules]
    return (",".join(words) if dialect is Dialect.IK else "\n".join(words)) + "\n"


def _words(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.split("#", 1)[0]
        for word in _APART.split(bare):
            # What continues a line in a shell, and quotes around a rule, are none of its own.
            plain = word.strip("\"'")
            if plain and plain != "\\" and plain not in _FLAGS:
                yield number, plain


def _rule(word: str, line: int, name: str) -> Rule:
    pattern, equals, type_name = word.partition("=")
    for found, meant in _CLASSES.items():
        pattern = pattern.replace(found, meant)
    place = f"{name}, line {line}"
    if not (pattern and equals and type_name):
        raise RecipeError("not a rule", file=place, expected="pattern=type", found=repr(word))
    try:
        re.compile(pattern)
    except re.error as error:
        raise RecipeError(
            f"not a regular expression: {error}", file=place, found=repr(pattern)
        ) from error
    known = TYPES.get(_REPACKED.sub("", type_name.upper()))
    if known is None:
        raise RecipeError(
            "no ggml type has this name",
            file=place,
            found=repr(type_name),
            next_step=did_you_mean(type_name.upper(), TYPES),
        )
    return Rule(pattern, known, line)


def _require_mainline(rules: Iterable[Rule]) -> None:
    strange = sorted({rule.type.name for rule in rules if rule.type.family != "mainline"})
    if strange:
        raise RecipeError(
            "llama.cpp's llama-quantize does not know these types",
            found=", ".join(strange),
            next_step="Export for ik instead.",
        )
