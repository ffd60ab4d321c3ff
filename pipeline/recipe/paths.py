"""Paths that a recipe says: they count from the folder of the file in which they stand."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath

from pipeline.source.hub.address import is_address

RawTable = Mapping[str, object]

_Tells = Callable[[Path, str], bool]


def source_from(folder: Path, word: str) -> str:
    """The source that a recipe in ``folder`` means: what lies there, or a hub's address."""
    return word if _is_address(folder, word) else str(folder / word)


def as_seen_from(table: RawTable, here: Path, there: Path) -> RawTable:
    """``table`` of a recipe in the folder ``here``, as one in ``there`` has to say it.

    What breaks the schema is left as it is, for those who check it.
    """
    way = os.path.relpath(here.resolve(), there.resolve())
    if way == os.curdir:
        return table
    found = dict(table)
    for name in _PATHS.keys() & table.keys():
        said = table[name]
        entries = said if isinstance(said, list) else [said]
        moved = [_moved(entry, *_PATHS[name], here, way) for entry in entries]
        found[name] = moved if isinstance(said, list) else moved[0]
    return found


def _moved(entry: object, key: str, is_no_path: _Tells, here: Path, way: str) -> object:
    """One table whose path is led to ``here`` by ``way``."""
    word = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(word, str) or not word:
        return entry
    return entry if is_no_path(here, word) else {**entry, key: str(PurePath(way, word))}


def _never(folder: Path, word: str) -> bool:
    del folder, word
    return False


def _is_address(folder: Path, word: str) -> bool:
    return not _exists(folder / word) and is_address(word)


def _is_label(folder: Path, word: str) -> bool:
    """Whether the command line has to say what ``word`` is."""
    is_bare = PurePath(word).name == word
    return (is_bare and not _exists(folder / word)) or _is_address(folder, word)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no path at all
        return False


_PATHS: Mapping[str, tuple[str, _Tells]] = {
    "imatrix": ("file", _never),
    "experts": ("keep", _never),
    "source": ("path", _is_address),
    "graft": ("from", _is_label),
}
"""Table -> the key that holds a path, and what tells that it holds something else."""
