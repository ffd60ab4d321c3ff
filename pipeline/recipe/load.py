"""A recipe file and those it extends: raw tables, read and merged before anything is checked."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

from pipeline import files
from pipeline.errors import RecipeError
from pipeline.recipe.paths import RawTable as RawTable
from pipeline.recipe.paths import as_seen_from

FindParent = Callable[[str, Path], Path | None]
"""The file that a word after `extends` means in the recipe at a path, or nothing."""

EXTENDS = "extends"

OWN_KEYS = ("name", "description")
"""What a recipe says of itself alone: not handed on."""

_JOINED = ("override", "graft")
"""Lists whose first entry that fits wins: the child's stand before the parent's."""


@dataclass(frozen=True, slots=True)
class RawFile:
    """One recipe file as it stands, without its `extends`."""

    path: Path
    table: RawTable


def beside(word: str, child: Path) -> Path | None:
    """The recipe that lies beside ``child`` under this name, with or without ``.toml``."""
    paths = (child.parent / word, child.parent / f"{word}.toml")
    return next((path for path in paths if path.is_file()), None)


def read_chain(content: bytes, path: Path, find: FindParent = beside) -> tuple[RawFile, ...]:
    """The recipe that ``content`` holds, then its parent, that one's parent, and so on.

    Raises:
        SourceError: A parent cannot be read.
        RecipeError: A file is no TOML, a parent is missing, or a recipe extends itself.
    """
    chain: list[RawFile] = []
    while True:
        table = _toml(content, path)
        word = table.pop(EXTENDS, None)
        chain.append(RawFile(path, table))
        if word is None:
            return tuple(chain)
        path = _parent(word, chain, find)
        content = files.read_bytes(path)


def merged(chain: Sequence[RawFile]) -> dict[str, object]:
    """One table of all: a child's keys win, its overrides and grafts stand before the parent's.

    Paths count from the folder of the first.
    """
    handed_on = (
        {key: value for key, value in _seen(raw, chain[0]).items() if key not in OWN_KEYS}
        for raw in chain[1:]
    )
    return reduce(_over, handed_on, dict(chain[0].table))


def _seen(parent: RawFile, child: RawFile) -> RawTable:
    return as_seen_from(parent.table, parent.path.parent, child.path.parent)


def _parent(word: object, chain: Sequence[RawFile], find: FindParent) -> Path:
    child = chain[-1].path
    if not isinstance(word, str) or not word:
        raise RecipeError(
            "extends: not the name of a recipe",
            file=child,
            expected="one name or path in quotes",
            found=repr(word),
        )
    path = find(word, child)
    if path is None:
        raise RecipeError(
            "the recipe that this one extends is not there",
            file=child,
            expected="a recipe that comes along, by name, or a file beside this one",
            found=repr(word),
        )
    seen = [raw.path.resolve() for raw in chain]
    if path.resolve() in seen:
        circle = [*(raw.path.name for raw in chain[seen.index(path.resolve()) :]), path.name]
        raise RecipeError(
            "recipes extend each other in a circle",
            file=child,
            found=" -> ".join(circle),
            next_step="Take `extends` out of one of them.",
        )
    return path


def _over(child: RawTable, parent: RawTable) -> dict[str, object]:
    found = dict(parent)
    for key, value in child.items():
        found[key] = _one_over(key, value, parent.get(key))
    return found


def _one_over(key: str, value: object, inherited: object) -> object:
    if isinstance(value, dict) and isinstance(inherited, dict):
        return _over(value, inherited)
    if key in _JOINED and isinstance(value, list) and isinstance(inherited, list):
        return value + [_may_go_unused(entry) for entry in inherited]
    return value


def _may_go_unused(entry: object) -> object:
    """An inherited entry: that the child's leave nothing for it is no mistake."""
    return {"optional": True, **entry} if isinstance(entry, dict) else entry


def _toml(content: bytes, path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(
            "the recipe is not UTF-8 text",
            file=path,
            offset=error.start,
            found=f"byte 0x{content[error.start]:02x}",
            next_step="Save it as UTF-8.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(
            "the recipe is not valid TOML",
            file=path,
            found=str(error),
            next_step="Names of types are text and stand in quotes; see https://toml.io.",
        ) from error


def frozen(value: object) -> object:
    """TOML lists as tuples, which is what the strict schema asks for."""
    if isinstance(value, Mapping):
        return {key: frozen(inner) for key, inner in value.items()}
    return tuple(frozen(inner) for inner in value) if isinstance(value, list) else value
