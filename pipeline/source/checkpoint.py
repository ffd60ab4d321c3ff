"""A checkpoint folder: config.json, the index, and every shard's header. Weights stay unread."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.digest import sha256
from pipeline.errors import SourceError, raise_problems
from pipeline.source.header import SourceFile, SourceTensor, read_source_file
from pipeline.source.index import INDEX_NAME as INDEX_NAME
from pipeline.source.index import SHARD_SUFFIX, Index, read_index
from pipeline.source.json_object import read_json_object
from pipeline.source.scope import WHOLE, Scope

CONFIG_NAME = "config.json"
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
"""Shard names as the hub writes them: ``model-00001-of-00048.safetensors``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's small files and headers say.

    ``files`` is keyed by file name and sorted by it. ``weight_map`` gives each tensor's file name:
    as the index says, or as the headers say where there is no index (``index_sha256`` None).
    ``total_size`` is the index's own sum of tensor bytes. A checkpoint of which only a part is
    looked at (`Scope`) has just that part in ``files`` and ``weight_map``, and no total.
    """

    folder: Path
    config: Mapping[str, object]
    config_sha256: str
    index_sha256: str | None
    files: Mapping[str, SourceFile]
    weight_map: Mapping[str, str]
    total_size: int | None

    def locate(self, name: str) -> tuple[SourceFile, SourceTensor]:
        """The file that holds tensor ``name``, and its place there.

        Raises:
            SourceError: No such tensor, or not in the file that the index says.
        """
        file = self.files.get(self.weight_map.get(name, ""))
        tensor = None if file is None else file.tensors.get(name)
        if file is None or tensor is None:
            raise SourceError(
                "the checkpoint has no such tensor",
                file=self.folder if file is None else file.path,
                tensor=name,
                next_step="Check that config.json and the shards belong together.",
            )
        return file, tensor

    def path(self, name_of_file: str) -> Path:
        """Where the file of that name lies."""
        return self.folder / name_of_file


def open_checkpoint(
    path: Path, *, scope: Scope = WHOLE, may_lack_shards: bool = False
) -> Checkpoint:
    """The checkpoint in folder ``path``, or in the folder of the shard ``path``.

    Args:
        path: A folder, or one of its shards.
        scope: Which tensors are looked at. With an index no other shards than theirs are opened;
            without one, those that are there.
        may_lack_shards: Shards that the index names may be absent: another source has them.

    Raises:
        SourceError: No such folder, config.json missing or damaged, index damaged, no shard.
        Problems: Several shards are missing or damaged, each with its own message.
    """
    folder = _folder(path)
    config, config_text = read_json_object(_required(folder / CONFIG_NAME))
    index = read_index(folder)
    names = _shard_names(folder, index, scope)
    absent = {name for name in names if not (folder / name).exists()}
    files, problems = _read_shards(folder, [name for name in names if name not in absent], scope)
    unneeded = _unneeded(absent, files, index, scope)
    if not may_lack_shards:
        problems += [_missing(folder / name) for name in absent - unneeded]
    raise_problems(f"shards of {folder}", sorted(problems, key=lambda problem: problem.file or ""))
    described = Checkpoint(folder, config, sha256(config_text), None, files, {}, None)
    if index is None:
        holding = {name: file for name, file in files.items() if file.tensors}
        return replace(described, files=holding, weight_map=_map_of_headers(holding))
    listed = index.of(scope)
    weight_map = {name: file for name, file in listed.items() if file not in unneeded}
    is_whole = len(weight_map) == len(index.weight_map)
    return replace(
        described,
        index_sha256=index.sha256,
        weight_map=weight_map,
        total_size=index.total_size if is_whole else None,
    )


def _folder(path: Path) -> Path:
    folder = path.parent if path.is_file() else path
    if not folder.is_dir():
        raise SourceError(
            "no checkpoint here",
            file=path,
            expected="a folder with config.json and safetensors shards, or one of its shards",
        )
    return folder


def _required(path: Path) -> Path:
    if not path.exists():
        raise SourceError(
            f"the checkpoint has no {path.name}",
            file=path,
            next_step="Copy it from the release that the shards come from.",
        )
    return path


def _shard_names(folder: Path, index: Index | None, scope: Scope) -> list[str]:
    """The shards to open, sorted: every one that is named or there, or those of ``scope``."""
    if index and scope.only:
        return sorted(set(index.of(scope).values()))
    present = {file.name for file in folder.glob(f"[!.]*{SHARD_SUFFIX}")}
    if index:
        named = set(index.weight_map.values())
    else:
        named = set() if scope.only else _numbered_siblings(present)
    if not present | named:
        raise SourceError(
            "the checkpoint has no shard",
            file=folder,
            expected=f"files that end in {SHARD_SUFFIX}",
            next_step="Download the weights, or name the folder that holds them.",
        )
    return sorted(present | named)


def _numbered_siblings(present: set[str]) -> set[str]:
    """Shards that the numbered names of ``present`` speak of: all we know without an index."""
    matches = [match for name in present if (match := _NUMBERED.fullmatch(name))]
    return {
        f"{stem}-{number:05}-of-{count}{SHARD_SUFFIX}"
        for stem, count in {(match[1], match[3]) for match in matches}
        for number in range(1, int(count) + 1)
    }


def _read_shards(
    folder: Path, names: Sequence[str], scope: Scope
) -> tuple[dict[str, SourceFile], list[SourceError]]:
    """The tensors of ``scope`` in every shard that can be read, and what is wrong with others."""
    files: dict[str, SourceFile] = {}
    problems: list[SourceError] = []
    for name in names:
        try:
            files[name] = _read_shard(folder / name, scope)
        except SourceError as error:
            problems.append(error)
    return files, problems


def _read_shard(path: Path, scope: Scope) -> SourceFile:
    file = read_source_file(path)
    if not scope.only:
        return file
    return replace(file, tensors={n: t for n, t in file.tensors.items() if scope.covers(n)})


def _missing(path: Path) -> SourceError:
    return SourceError(
        "a shard is missing",
        file=path,
        next_step="Fetch it into the checkpoint's folder; the other shards can stay.",
    )


def _unneeded(
    absent: set[str], files: Mapping[str, SourceFile], index: Index | None, scope: Scope
) -> set[str]:
    """Absent shards of an optional module, of which nothing at all is there.

    Without an index any absent shard may be one; the agreement check then tells what is missing.
    """
    held = (name for file in files.values() for name in file.tensors)
    if not absent or not scope.optional or any(map(scope.may_lack, held)):
        return set()
    listed = index.weight_map if index else {}
    return absent - {file for name, file in listed.items() if not scope.may_lack(name)}


def _map_of_headers(files: Mapping[str, SourceFile]) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for name, file in files.items():
        for tensor in file.tensors:
            weight_map.setdefault(tensor, name)
    return weight_map
