"""Where a checkpoint's bytes come from: a folder, or a hub repository that is fetched file by file.

A hub source is planned from headers alone: they lie in ``headers/`` as sparse stand-ins of true
size, the files themselves come to ``files/`` one by one, each verified before anything reads it.

    <out>/.quantmill/sources/<owner>--<name>@<revision>/pin.json     the commit, once resolved
                                                        headers/     config, index, stand-ins
                                                        files/       what has been fetched
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import SourceError
from pipeline.source.checkpoint import Checkpoint, open_checkpoint
from pipeline.source.hub.address import HubAddress, is_address, parse_address
from pipeline.source.hub.cache import cached_file
from pipeline.source.hub.checksums import read_checksums, with_checksums
from pipeline.source.hub.content import identity
from pipeline.source.hub.events import FetchEvents
from pipeline.source.hub.fetch import is_fetched
from pipeline.source.hub.headers import fetch_headers
from pipeline.source.hub.remote import HubRemote
from pipeline.source.hub.resolve import resolve
from pipeline.source.hub.snapshot import HubFile, HubSnapshot
from pipeline.source.scope import WHOLE, Scope

Stamp = list[object]


@dataclass(frozen=True, slots=True)
class Origin:
    """One source: its headers, and where each file is or will be."""

    checkpoint: Checkpoint
    snapshot: HubSnapshot | None = None
    folder: Path | None = None

    @property
    def is_remote(self) -> bool:
        """Whether files have to be fetched before they can be read."""
        return self.snapshot is not None

    @property
    def names(self) -> dict[str, object]:
        """What a document calls this source: its folder, or repository and commit."""
        if self.snapshot is None:
            return {"folder": self.checkpoint.folder.resolve().name}
        return {"repo": self.snapshot.repo, "commit": self.snapshot.commit}

    def file(self, name: str) -> HubFile:
        """What the hub says of a file."""
        assert self.snapshot is not None
        return self.snapshot.file(name)

    def target(self, name: str) -> Path:
        """Where a fetched file lies."""
        assert self.folder is not None
        return self.folder / "files" / name

    def cached(self, name: str) -> Path | None:
        """The same file in the user's own hub cache, whole and right, if it is there."""
        assert self.snapshot is not None
        assert self.folder is not None
        return cached_file(self.snapshot, name, notes=self.folder / "proofs")

    def has(self, name: str) -> bool:
        """Whether a file can be read now."""
        if not self.is_remote:
            return True
        return is_fetched(self.file(name), self.target(name)) or self.cached(name) is not None

    def path(self, name: str) -> Path:
        """Where the bytes of a file are read from."""
        if not self.is_remote:
            return self.checkpoint.files[name].path
        return self.cached(name) or self.target(name)

    def stamp(self, name: str) -> Stamp:
        """What identifies the content of a file: its digest where one is known for free.

        A local file counts by length, header digest and modification time: hashing half a
        terabyte before starting would cost more than the conversion.
        """
        source = self.checkpoint.files[name]
        if self.is_remote:
            return [name, source.nbytes, identity(self.file(name))]
        return [name, source.nbytes, source.header_sha256, source.modified_ns]


def open_origin(
    source: str,
    root: Path,
    *,
    checksums: str = "",
    scope: Scope = WHOLE,
    may_lack_shards: bool = False,
) -> Origin:
    """The origin that ``source`` names: a folder, one of its shards, or ``owner/name@revision``.

    Luigi's own process asks the hub whether a recorded branch has moved, and tells; its many task
    processes do not ask again.

    Args:
        source: What the user said.
        root: Folder for what is fetched.
        checksums: A file of sha256 sums that a hub's files must have as well; may be empty.
        scope: Which tensors are looked at: of a hub's shards, only those headers are fetched.
        may_lack_shards: Another source supplies what is missing.

    Raises:
        SourceError: Nothing there, refused, or damaged headers.
    """
    if not is_address(source):
        if checksums:
            raise SourceError(
                "a checksum list goes with a hub source",
                file=checksums,
                next_step="For a folder run sha256sum --check yourself.",
            )
        folder = Path(source)
        return Origin(open_checkpoint(folder, scope=scope, may_lack_shards=may_lack_shards))
    address = parse_address(source)
    folder = root / _folder_name(address)
    is_first = multiprocessing.parent_process() is None
    tell = _tell if is_first else lambda _: None
    snapshot, note = resolve(address, pinned=folder / "pin.json", looks=is_first, noted=tell)
    if note:
        tell(note)
    if checksums:
        listed = Path(checksums)
        snapshot = with_checksums(snapshot, read_checksums(listed), listed)
    headers, events = folder / "headers", FetchEvents(noted=tell)
    fetch_headers(HubRemote(snapshot), snapshot, headers, scope=scope, events=events)
    checkpoint = open_checkpoint(headers, scope=scope, may_lack_shards=True)
    if not may_lack_shards:
        _require_shards(snapshot, checkpoint)
    return Origin(checkpoint, snapshot, folder)


def _tell(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def _require_shards(snapshot: HubSnapshot, checkpoint: Checkpoint) -> None:
    """Refuse a repository that lacks shards which its own index names."""
    named = set(checkpoint.weight_map.values())
    lacking = sorted(named - checkpoint.files.keys())
    if lacking:
        raise SourceError(
            "the repository lacks shards that its own index names",
            file=f"{snapshot}: {lacking[0]}",
            expected=f"{len(named):,} shards",
            found=f"all but {len(lacking):,}",
            next_step="Name a second source that has them (--supplement), or another revision.",
        )


def _folder_name(address: HubAddress) -> str:
    return f"{address.repo}@{address.revision}".replace("/", "--")


def at_hand(checkpoint: Checkpoint, paths: Mapping[str, Path]) -> Checkpoint:
    """``checkpoint`` with its files read from ``paths``."""
    moved = {
        name: replace(file, path=paths[name], modified_ns=None) if name in paths else file
        for name, file in checkpoint.files.items()
    }
    return replace(checkpoint, files=moved)
