"""A recipe written as TOML again: in full, or in a few lines for a file's metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import cast

from pipeline.model.layout import Layout
from pipeline.recipe.schema import Recipe

RECIPE_KEY = "quantmill.recipe.toml"
"""The metadata key under which a file keeps the recipe that it was made by."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

Dumped = Mapping[str, object]


def recipe_toml(recipe: Recipe) -> str:
    """``recipe`` with everything that it says, took from a parent or left to a default.

    What comes out is a recipe file that loads to an equal recipe and extends nothing.
    """
    dumped = _without_nothing(recipe.model_dump(mode="json", by_alias=True, exclude_none=True))
    return "\n".join([*_pairs(dumped), *_tables("", dumped)]).strip() + "\n"


def recipe_line(recipe: Recipe) -> str:
    """``recipe`` as briefly as a recipe file can be, for the metadata of what is made by it.

    Defaults are left out, the mainline layout among them, since a file shows its own; and of paths
    all but the name: what folders someone has is nobody's business. It loads as any recipe does.
    """
    lean = recipe.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, exclude={"source"}
    )
    shown = _without_nothing(_without_usual(_named_only(lean)))
    return "".join(f"{key}={_value(value, tight=True)}\n" for key, value in shown.items())


_NOTHING: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("allow", "override", "graft", "candidates"), ([],)),
    "optional": (False,),
}
"""What says nothing where it stands; other lists do: one without types means all candidates."""


def _without_nothing(table: Dumped) -> dict[str, object]:
    """``table`` less what is empty in it, which is the same as not said."""
    found: dict[str, object] = {}
    for key, value in table.items():
        kept = value
        if isinstance(value, dict):
            kept = _without_nothing(value)
        elif _is_table(value):
            kept = [_without_nothing(one) for one in cast("list[Dumped]", value)]
        if kept not in _NOTHING.get(key, ({}, "")):
            found[key] = kept
    return found


def _without_usual(dumped: dict[str, object]) -> dict[str, object]:
    """``dumped`` without a layout that a reader takes for granted."""
    output = dumped.get("output")
    if not isinstance(output, dict) or output.get("layout") != Layout.MAINLINE:
        return dumped
    return {**dumped, "output": {key: one for key, one in output.items() if key != "layout"}}


_PATHS = (("imatrix", "file"), ("experts", "keep"))


def _named_only(dumped: dict[str, object]) -> dict[str, object]:
    """``dumped`` with the last part of each path alone."""
    found = dict(dumped)
    for table, key in _PATHS:
        inner = found.get(table)
        if isinstance(inner, dict) and key in inner:
            found[table] = {**inner, key: PurePath(str(inner[key])).name}
    grafts = found.get("graft")
    if isinstance(grafts, list):
        found["graft"] = [{**one, "from": PurePath(one["from"]).name} for one in grafts]
    return found


def _pairs(table: Dumped) -> Iterator[str]:
    for key, value in table.items():
        if not _is_table(value):
            yield f"{_key(key)} = {_value(value)}"


def _tables(prefix: str, table: Dumped) -> Iterator[str]:
    for key, value in table.items():
        path = f"{prefix}{_key(key)}"
        if isinstance(value, dict):
            pairs = list(_pairs(value))
            if pairs:
                yield from ("", f"[{path}]", *pairs)
            yield from _tables(f"{path}.", value)
        elif _is_table(value):
            assert isinstance(value, list)
            for one in value:
                yield from ("", f"[[{path}]]", *_pairs(one))


def _is_table(value: object) -> bool:
    """Whether ``value`` stands below a header of its own."""
    return isinstance(value, dict) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    )


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _value(value: object, *, tight: bool = False) -> str:
    """A value on one line; ``tight`` leaves out every blank."""
    comma, equals = (",", "=") if tight else (", ", " = ")
    if isinstance(value, dict):
        pairs = (f"{_key(k)}{equals}{_value(v, tight=tight)}" for k, v in value.items())
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + comma.join(_value(one, tight=tight) for one in value) + "]"
    return next(write(value) for kind, write in _SCALARS if isinstance(value, kind))


def _text(text: object) -> str:
    """A string: in single quotes where it has backslashes, which stay single there."""
    plain = str(text)
    if "\\" in plain and "'" not in plain and not _CONTROL.search(plain):
        return f"'{plain}'"
    # JSON's escapes are TOML's, but for the one control character that JSON lets stand.
    return json.dumps(plain, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(number: object) -> str:
    return f"{number:_}" if isinstance(number, int) else repr(number)


_SCALARS: tuple[tuple[type, Callable[[object], str]], ...] = (
    (str, _text),
    (bool, lambda flag: "true" if flag else "false"),
    (int, _number),
    (float, _number),
)
"""The kinds of values that stand for themselves; truth values count as numbers in Python."""
