"""The one model of a folder, or the several that it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.diagnosis.opened import open_model
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import read_model, shard_name
from pipeline.gguf.reader import GgufFile
from pipeline.model.form import Architecture


@dataclass(frozen=True, slots=True)
class Holding:
    """What lies in a folder: the first file of its only target, or of each model there is."""

    only: Path | None
    models: tuple[Path, ...]
    n_files: int


def holding(folder: Path) -> Holding:
    """The models of ``folder``; a set with missing or renamed shards counts as one."""
    files = sorted(folder.glob("*.gguf"))
    only = _only_whole(folder)
    if only is not None:
        return Holding(only, (only,), len(files))
    models: dict[Path, bool] = {}
    taken: set[Path] = set()
    for file in files:
        if file not in taken:
            members = _members(file)
            taken |= {member.path for member in members} | {file} | set(_namesakes(file, files))
            models[members[0].path if members else file] = _is_draft(members)
    targets = [path for path, is_draft in models.items() if not is_draft] or list(models)
    return Holding(targets[0] if len(targets) == 1 else None, tuple(models), len(files))


def _only_whole(folder: Path) -> Path | None:
    try:
        return read_model(folder).files[0].path
    except QuantmillError:
        return None


def _members(file: Path) -> tuple[GgufFile, ...]:
    try:
        return open_model(file).model.files
    except QuantmillError:
        return ()


def _namesakes(file: Path, files: Sequence[Path]) -> Iterator[Path]:
    """The files that are called shards of one set with ``file``, whatever their headers say."""
    own = shard_name(file)
    for other in files if own else ():
        name = shard_name(other)
        if own and name and (name.stem, name.count) == (own.stem, own.count):
            yield other


def _is_draft(members: tuple[GgufFile, ...]) -> bool:
    entry = members[0].key_values.get("general.architecture") if members else None
    return entry is not None and entry.value == Architecture.DFLASH
