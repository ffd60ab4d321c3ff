"""A checkpoint folder: config.json, the index, and every shard's header. Weights stay unread."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from pipeline.digest import sha256
from pipeline.errors import SourceError, raise_problems
from pipeline.source.header import SourceFile, SourceTensor, read_source_file
from pipeline.source.json_object import read_json_object, shown

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_MAX_NAME_NBYTES = 255
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
"""Shard names as the hub writes them: ``model-00001-of-00048.safetensors``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint's small files and headers say.

    ``files`` is keyed by file name and sorted by it. ``weight_map`` gives each tensor's file name:
    as the index says, or as the headers say where there is no index (``index_sha256`` None).
    ``total_size`` is the index's own sum of tensor bytes.
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


@dataclass(frozen=True, slots=True)
class _Index:
    weight_map: Mapping[str, str]
    total_size: int | None
    sha256: str


def open_checkpoint(path: Path, *, may_lack_shards: bool = False) -> Checkpoint:
    """The checkpoint in folder ``path``, or in the folder of the shard ``path``.

    Args:
        path: A folder, or one of its shards.
        may_lack_shards: Shards that the index names may be absent: another source has them.

    Raises:
        SourceError: No such folder, config.json missing or damaged, index damaged, no shard.
        Problems: Several shards are missing or damaged, each with its own message.
    """
    folder = _folder(path)
    config, config_text = read_json_object(_required(folder / CONFIG_NAME))
    index = _read_index(folder / INDEX_NAME)
    names = _shard_names(folder, index)
    if may_lack_shards:
        names = [name for name in names if (folder / name).exists()]
    files = _read_shards(folder, names)
    return Checkpoint(
        folder=folder,
        config=config,
        config_sha256=sha256(config_text),
        index_sha256=None if index is None else index.sha256,
        files=files,
        weight_map=_map_of_headers(files) if index is None else index.weight_map,
        total_size=None if index is None else index.total_size,
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


def _read_index(path: Path) -> _Index | None:
    if not path.exists():
        return None
    index, text = read_json_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError("the index has no weight_map", file=path, found=shown(weight_map))
    plain: set[str] = set()
    for tensor, name in weight_map.items():
        if isinstance(name, str) and (name in plain or _is_shard_name(name)):
            plain.add(name)
            continue
        raise SourceError(
            "the index must give a plain shard name for every tensor",
            file=path,
            tensor=shown(tensor),
            expected=f"a file name that ends in {_SUFFIX}",
            found=shown(name),
        )
    return _Index(weight_map, _total_size(index, path), sha256(text))


def _is_shard_name(name: str) -> bool:
    # A name with a folder in it could make us read anywhere; an unprintable one, print anything.
    is_plain = name.isprintable() and name == PurePath(name).name
    return is_plain and name.endswith(_SUFFIX) and len(name.encode()) <= _MAX_NAME_NBYTES


def _total_size(index: Mapping[str, object], path: Path) -> int | None:
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers give the sum as 510286023000.0.
    if isinstance(size, float) and size.is_integer():
        size = int(size)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 0):
        raise SourceError(
            "the index has a total_size that is no count of bytes", file=path, found=shown(size)
        )
    return size


def _shard_names(folder: Path, index: _Index | None) -> Sequence[str]:
    """Every shard the index names and every one that lies in the folder, sorted."""
    present = {file.name for file in folder.glob(f"[!.]*{_SUFFIX}")}
    named = _numbered_siblings(present) if index is None else set(index.weight_map.values())
    if not present | named:
        raise SourceError(
            "the checkpoint has no shard",
            file=folder,
            expected=f"files that end in {_SUFFIX}",
            next_step="Download the weights, or name the folder that holds them.",
        )
    return sorted(present | named)


def _numbered_siblings(present: set[str]) -> set[str]:
    """Shards that the numbered names of ``present`` speak of: all we know without an index."""
    matches = [match for name in present if (match := _NUMBERED.fullmatch(name))]
    return {
        f"{stem}-{number:05}-of-{count}{_SUFFIX}"
        for stem, count in {(match[1], match[3]) for match in matches}
        for number in range(1, int(count) + 1)
    }


def _read_shards(folder: Path, names: Sequence[str]) -> dict[str, SourceFile]:
    files: dict[str, SourceFile] = {}
    problems: list[SourceError] = []
    for name in names:
        try:
            files[name] = _read_shard(folder / name)
        except SourceError as error:
            problems.append(error)
    raise_problems(f"shards of {folder}", problems)
    return files


def _read_shard(path: Path) -> SourceFile:
    if not path.exists():
        raise SourceError(
            "a shard is missing",
            file=path,
            next_step="Fetch it into the checkpoint's folder; the other shards can stay.",
        )
    return read_source_file(path)


def _map_of_headers(files: Mapping[str, SourceFile]) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for name, file in files.items():
        for tensor in file.tensors:
            weight_map.setdefault(tensor, name)
    return weight_map
