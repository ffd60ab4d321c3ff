"""The user's own hub cache: what lies there whole is used in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError

from pipeline.digest import sha256
from pipeline.errors import QuantmillError
from pipeline.source.checkpoint import CONFIG_NAME, INDEX_NAME
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.content import check_content, identity
from pipeline.source.hub.proof import not_content, prove, proved
from pipeline.source.hub.snapshot import HubFile, HubSnapshot
from pipeline.source.json_object import read_json_object

_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def cached_file(snapshot: HubSnapshot, name: str, *, notes: Path) -> Path | None:
    """The file in the hub cache if it is there whole, with the right digest; else None.

    The digest is computed once; ``notes`` is a folder of ours that remembers the outcome for as
    long as size and modification time stay the same.

    Raises:
        SourceError: The snapshot has no such file, or hub and checksum list contradict each other.
        OutputError: The note cannot be written.
    """
    file = snapshot.file(name)
    found = try_to_load_from_cache(snapshot.repo, name, revision=snapshot.commit)
    if not isinstance(found, str):
        return None
    path = Path(found)
    if path.stat().st_size != file.nbytes:
        return None
    wanted = identity(file)
    note = notes / f"{sha256(str(path).encode())}.proof"
    known = proved(path, note)
    if known not in (wanted, not_content(wanted)):
        known = wanted if check_content(path, file) is None else not_content(wanted)
        prove(path, note, known)
    return path if known == wanted else None


def cached_snapshot(address: HubAddress) -> HubSnapshot | None:
    """What the hub cache holds of ``address``, if that is a whole checkpoint; asks no network."""
    try:
        folder = snapshot_download(address.repo, revision=address.revision, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    root = Path(str(folder))
    listed = {file.name: file for file in sorted(_files(root), key=lambda file: file.name)}
    if not _is_checkpoint(root, listed):
        return None
    return HubSnapshot(address.repo, root.name, address.revision, listed)


def _files(root: Path) -> Iterator[HubFile]:
    """Files whose digest the cache knows: each is a link to a blob named by its digest."""
    for path in root.rglob("*"):
        if not (path.is_symlink() and path.is_file()):
            continue
        # One step only: the blob may itself be a link to a store with other names.
        etag = path.readlink().name
        if not _ETAG.fullmatch(etag):
            continue
        name, nbytes = path.relative_to(root).as_posix(), path.stat().st_size
        is_lfs = len(etag) == 64
        yield HubFile(name, nbytes, etag if is_lfs else None, "" if is_lfs else etag)


def _is_checkpoint(root: Path, listed: dict[str, HubFile]) -> bool:
    if CONFIG_NAME not in listed:
        return False
    shards: set[object] = {name for name in listed if name.endswith(".safetensors")}
    if INDEX_NAME in listed:
        try:
            index, _ = read_json_object(root / INDEX_NAME)
        except QuantmillError:
            return False
        weight_map = index.get("weight_map")
        shards = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    return bool(shards) and all(shard in listed for shard in shards)
