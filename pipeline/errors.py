"""Every error this project raises on purpose: one small tree.

A message says what is wrong, where (file, tensor, byte offset), what was expected and found, and
what to do next. The classes say which part of the job noticed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self


class QuantmillError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: The broken rule, in one sentence.
        file: The file it was found in.
        tensor: The tensor it was found in.
        offset: Byte offset in ``file``.
        expected: What the rule asks for.
        found: What is there.
        next_step: What the reader can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        file: Path | str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.offset = offset
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self.message())

    def message(self) -> str:
        """The whole sentence: rule, places, next step."""
        places = [
            ("file", self.file),
            ("tensor", self.tensor),
            ("offset", self.offset),
            ("expected", self.expected),
            ("found", self.found),
        ]
        parts = [self.what, *(f"{label} {value}" for label, value in places if value is not None)]
        message = "; ".join(parts)
        return f"{message}. {self.next_step}" if self.next_step else message

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process boundaries (task children), where the default would lose the places.
        return (_rebuild, (type(self), self.__dict__))

    @classmethod
    def from_state(cls, state: dict[str, object]) -> Self:
        """An error as it was in another process."""
        error = cls.__new__(cls)
        error.__dict__.update(state)
        error.args = (error.message(),)
        return error


def _rebuild(kind: type[QuantmillError], state: dict[str, object]) -> QuantmillError:
    return kind.from_state(state)


class SourceError(QuantmillError):
    """The checkpoint is damaged, incomplete, or its parts disagree."""


class ConfigError(SourceError):
    """config.json lacks a key, or a value contradicts another."""


class DecodeError(SourceError):
    """A stored value cannot be decoded (NaN, infinite, scale byte 255)."""


class FormatError(QuantmillError):
    """A GGUF file breaks the format, or a header cannot be written."""


class TypeRuleError(QuantmillError):
    """A ggml type does not fit a tensor (row width, F32-only, missing imatrix)."""


class QuantizeError(QuantmillError):
    """A quantizer library is missing, refuses a type, or returned a wrong size."""


class RecipeError(QuantmillError):
    """A recipe is not valid, or does not fit the model."""


class PlanError(QuantmillError):
    """The model cannot be laid out as asked."""


class OutputError(QuantmillError):
    """The output folder, disk or an unfinished part stands in the way."""


class VerifyError(QuantmillError):
    """A finished file is not what its plan says."""


class EngramError(VerifyError):
    """An engram table does not fit its hash buckets."""


class Problems(QuantmillError):
    """Several errors found in one pass, reported together.

    Args:
        title: What was checked.
        problems: The errors, in the order in which they were found.
        most: How many are printed in full.
    """

    def __init__(self, title: str, problems: Sequence[QuantmillError], *, most: int = 20) -> None:
        self.problems = tuple(problems)
        shown = [f"  - {problem}" for problem in self.problems[:most]]
        if len(self.problems) > most:
            shown.append(f"  - and {len(self.problems) - most:,} more")
        count = f"{len(self.problems):,} problem{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join([f"{title}: {count}", *shown]))


def raise_problems(title: str, problems: Sequence[QuantmillError]) -> None:
    """Raise what was found: one error as itself, several as `Problems`, none not at all."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise Problems(title, problems)
