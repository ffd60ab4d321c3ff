"""A keep list and what belongs to it, put under their names: all of it or nothing of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline import files
from pipeline.digest import canonical_json
from pipeline.errors import OutputError
from pipeline.experts.keep import KeepList
from pipeline.experts.keep_json import keep_spec

SUFFIX = ".json"


def require_name(path: Path) -> None:
    """Refuse a name that leaves no room for those of the page and the pictures.

    Raises:
        OutputError: It does not end as keep lists do.
    """
    if path.suffix != SUFFIX:
        raise OutputError(f"a keep list is a file that ends in {SUFFIX}", file=path)


def publish_keep(path: Path, keep: KeepList, beside: Mapping[Path, bytes]) -> None:
    """Write ``keep`` under ``path``, after ``beside``: where the list stands, the rest does too.

    What stands there already may be the same, byte for byte. Where the list itself is, all else is
    taken for ours and brought up to date.

    Raises:
        OutputError: A file of another content stands there, or the folder cannot be written.
    """
    content = canonical_json(keep_spec(keep)) + b"\n"
    if not _holds(path, content):
        for name in (path, *beside):
            _refuse_other(name, content if name == path else beside[name])
    for name, page in beside.items():
        if not _holds(name, page):
            files.write_whole(name, page)
    if not _holds(path, content):
        files.write_whole(path, content)


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and files.read_bytes(path) == content


def _refuse_other(path: Path, content: bytes) -> None:
    if path.exists() and not _holds(path, content):
        raise OutputError(
            "another file of this name is there already",
            file=path,
            next_step="Delete it, or choose another --out.",
        )
