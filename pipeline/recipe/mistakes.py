"""Mistakes in a recipe file, said in the words of someone who writes TOML.

pydantic finds them; its own sentences speak of models, tuples and instances, which a recipe's
author never wrote, so every kind of mistake has its sentence here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from itertools import pairwise
from pathlib import Path

from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.errors import RecipeError

OWN = "recipe"
"""pydantic's error type of the mistakes that this project's own rules find."""

LISTS = ("override", "graft")
"""The tables of a recipe of which there may be several."""

_MOST_SHOWN = 80

_KINDS = {
    "string_type": ("not text", "text in quotes"),
    "int_type": ("not a whole number", "a whole number without quotes, such as 45_000_000_000"),
    "int_from_float": ("not a whole number", "a whole number, such as 45_000_000_000"),
    "float_type": ("not a number", "a number without quotes, such as 1.0"),
    "bool_type": ("not true or false", "true or false, without quotes"),
}
"""pydantic's error type -> (what is wrong with the value, what is asked for)."""


def mistake(what: str, *, expected: str, next_step: str | None = None) -> PydanticCustomError:
    """The error a validator raises; `describe` turns it into a `RecipeError`."""
    return PydanticCustomError(
        OWN, "{what}", {"what": what, "expected": expected, "next_step": next_step}
    )


def one_of(words: Iterable[str]) -> str:
    """The allowed words, as an error names them."""
    listed = list(words)
    return listed[0] if len(listed) == 1 else "one of " + ", ".join(listed)


def did_you_mean(word: str, allowed: Iterable[str]) -> str | None:
    """A sentence that offers the closest allowed word, or nothing."""
    close = difflib.get_close_matches(word, list(allowed), n=1)
    return f"Did you mean {close[0]}?" if close else None


def describe(path: Path, error: ErrorDetails, keys: Mapping[str, Sequence[str]]) -> RecipeError:
    """One finding of pydantic about the recipe at ``path``.

    Args:
        path: The recipe file.
        error: The finding.
        keys: The keys each table knows; the file's own are under the empty name.
    """
    loc, kind = error["loc"], error["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, loc, keys)
    if kind == "missing":
        return _missing(path, loc, keys)
    context = error.get("ctx", {})
    if kind == OWN:
        what, expected = context["what"], context["expected"]
    elif kind in ("model_type", "tuple_type"):
        what, expected = _wrong_shape(loc, is_table=kind == "model_type")
    else:
        what, expected = _KINDS.get(kind, (error["msg"], None))
    return RecipeError(
        f"{_place(loc)}: {what}",
        file=path,
        expected=expected,
        found=_shown(error["input"]),
        next_step=context.get("next_step"),
    )


def _unknown_key(
    path: Path, loc: Sequence[int | str], keys: Mapping[str, Sequence[str]]
) -> RecipeError:
    key, table = str(loc[-1]), ".".join(step for step in loc[:-1] if isinstance(step, str))
    close = did_you_mean(key, keys[table])
    # A key below the header of another table is the commonest slip in TOML.
    homes = [name for name, known in keys.items() if key in known and name != table]
    belongs = "to the top of the file, above every [table]"
    if homes and homes[0]:
        belongs = f"in [[{homes[0]}]]" if homes[0] in LISTS else f"in [{homes[0]}]"
    return RecipeError(
        f"unknown key {_place(loc)}",
        file=path,
        expected=one_of(keys[table]),
        next_step=f"The key {key} belongs {belongs}." if homes else close,
    )


def _missing(
    path: Path, loc: Sequence[int | str], keys: Mapping[str, Sequence[str]]
) -> RecipeError:
    steps = {
        "roles": "Every role must get a type.",
        "override": "An override is a `type` and what it is for.",
        "graft": "A graft is what is taken and where it is taken `from`.",
    }
    if len(loc) == 1:
        what, expected = f"the table [{loc[0]}] is missing", ", ".join(keys[str(loc[0])])
    else:
        what = f"the key {_place(loc)} is missing"
        expected = "a path or a label" if loc[0] == "graft" else "a type"
    return RecipeError(what, file=path, expected=expected, next_step=steps.get(str(loc[0])))


def _wrong_shape(loc: Sequence[int | str], *, is_table: bool) -> tuple[str, str]:
    key = ".".join(step for step in loc if isinstance(step, str))
    if is_table:
        line = f"[[{key}]]" if key in LISTS else f"[{key}]"
        return "not a table", f"a table: keys below a line {line}"
    if key in LISTS:
        return "not a list of tables", f"tables, each below a line [[{key}]]"
    return "not a list", "a list in brackets"


def _place(loc: Sequence[int | str]) -> str:
    """``roles.routed``, or ``override 2, type``: people count from 1."""
    place = str(loc[0])
    for before, step in pairwise(loc):
        if isinstance(step, int):
            place += f" {step + 1}"
        else:
            place += f"{', ' if isinstance(before, int) else '.'}{step}"
    return place


def _shown(value: object) -> str:
    # Dates are the one kind of TOML value that JSON has no form for.
    is_date = isinstance(value, date | time)
    shown = str(value) if is_date else json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]} ..."
