"""Which files of an unfinished cut are whole: one small record beside each, kept until the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline import files
from pipeline.digest import sha256, spec_digest
from pipeline.experts.keep import KeepList
from pipeline.prune.plan import PrunedFile
from pipeline.source.checkpoint import Checkpoint

FORMAT_VERSION = 1
"""Raised by hand whenever the same plan and source would give other bytes."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a whole file; ``modified_ns`` is when it was last written to."""

    spec: str
    nbytes: int
    modified_ns: int
    sha256: str


def file_spec(file: PrunedFile, keep: KeepList, source: Checkpoint) -> str:
    """Digest of everything that the bytes of ``file`` depend on."""
    stamps = [
        [name, one.nbytes, one.header_sha256, one.modified_ns]
        for name in file.source_names
        for one in [source.files[name]]
    ]
    changes = [sha256(file.header), [list(ids) for ids in keep.layers]] if file.header else None
    return spec_digest(
        {"format": FORMAT_VERSION, "name": file.name, "changes": changes, "sources": stamps}
    )


@dataclass(frozen=True, slots=True)
class Records:
    """The records in ``folder``, of files that lie in ``target``."""

    folder: Path
    target: Path

    def record(self, name: str, spec: str) -> FileRecord | None:
        """The record of a file that is whole; nothing while it is not, or where it was touched."""
        record = self._read(name)
        stamp = files.stamp(self.target / name)
        if record is None or record.spec != spec or stamp != (record.nbytes, record.modified_ns):
            return None
        return record

    def save(self, name: str, spec: str, digest: str) -> None:
        """Record a file that has its name by now."""
        nbytes, modified_ns = files.stamp(self.target / name) or (0, 0)
        record = FileRecord(spec, nbytes, modified_ns, digest)
        content = json.dumps(asdict(record), indent=1).encode()
        files.write_whole(self._path(name), content)

    def revive(self, name: str, spec: str, listed: Mapping[str, FileRecord]) -> bool:
        """Take a file for whole again, by a record of it or a finished list, if its bytes are so.

        Args:
            name: The file.
            spec: What it has to be.
            listed: What a finished output lists, by name.
        """
        path = self.target / name
        known = [one for one in (self._read(name), listed.get(name)) if one and one.spec == spec]
        stamp = files.stamp(path)
        if not known or stamp is None or stamp[0] != known[0].nbytes:
            return False
        if files.sha256_of(path) != known[0].sha256:
            return False
        self.save(name, spec, known[0].sha256)
        return True

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _read(self, name: str) -> FileRecord | None:
        path = self._path(name)
        if not path.exists():
            return None
        try:
            return FileRecord(**json.loads(files.read_bytes(path)))
        except (ValueError, TypeError):
            return None
