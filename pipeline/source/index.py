"""The index of a checkpoint: which shard holds which tensor, as its writer says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from pipeline.digest import sha256
from pipeline.errors import SourceError
from pipeline.source.json_object import read_json_object, shown
from pipeline.source.scope import Scope

INDEX_NAME = "model.safetensors.index.json"
SHARD_SUFFIX = ".safetensors"
_MAX_NAME_NBYTES = 255


@dataclass(frozen=True, slots=True)
class Index:
    """Tensor name -> shard name, the sum of all tensors' bytes if given, the file's digest."""

    weight_map: Mapping[str, str]
    total_size: int | None
    sha256: str

    def of(self, scope: Scope) -> Mapping[str, str]:
        """What ``weight_map`` says of the tensors of ``scope``."""
        if not scope.only:
            return self.weight_map
        return {name: file for name, file in self.weight_map.items() if scope.covers(name)}


def read_index(folder: Path) -> Index | None:
    """The index in ``folder``; None where there is none.

    Raises:
        SourceError: Damaged, or a shard's name is not a plain one.
    """
    path = folder / INDEX_NAME
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
            expected=f"a file name that ends in {SHARD_SUFFIX}",
            found=shown(name),
        )
    return Index(weight_map, _total_size(index, path), sha256(text))


def _is_shard_name(name: str) -> bool:
    # A name with a folder in it could make us read anywhere; an unprintable one, print anything.
    is_plain = name.isprintable() and name == PurePath(name).name
    return is_plain and name.endswith(SHARD_SUFFIX) and len(name.encode()) <= _MAX_NAME_NBYTES


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
