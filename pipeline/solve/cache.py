"""Measured losses on disk, so that the next question about the same weights costs nothing.

One small JSON file per tensor, named by the digest of all that its losses depend on: an interrupted
run goes on at the tensor where it stopped, and a changed source, sample or importance matrix has
files of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline import files
from pipeline.digest import spec_digest

Sums = tuple[float, float]
"""Sum of squared errors and of squares, weighted."""


@dataclass(frozen=True, slots=True)
class ErrorCache:
    """Losses under ``folder``."""

    folder: Path

    def read(self, identity: object, versions: Mapping[str, str]) -> dict[str, Sums]:
        """What is known of a tensor, by type, where the quantizer was the same.

        A file that is no such JSON counts as none.
        """
        entries = self._entries(identity)
        found = {name: _sums(entries.get(name), by) for name, by in versions.items()}
        return {name: sums for name, sums in found.items() if sums is not None}

    def write(
        self, identity: object, versions: Mapping[str, str], losses: Mapping[str, Sums]
    ) -> None:
        """Keep ``losses``, beside what is known of other types."""
        entries = {
            name: {"by": versions[name], "squared_error": error, "squared_norm": norm}
            for name, (error, norm) in losses.items()
        }
        content = json.dumps({**self._entries(identity), **entries}, indent=1, sort_keys=True)
        files.write_whole(self._path(identity), content.encode() + b"\n")

    def _path(self, identity: object) -> Path:
        return self.folder / f"{spec_digest(identity)}.json"

    def _entries(self, identity: object) -> dict[str, object]:
        path = self._path(identity)
        if not path.exists():
            return {}
        try:
            entries = json.loads(files.read_bytes(path))
        except ValueError:
            return {}
        return entries if isinstance(entries, dict) else {}


def _sums(entry: object, by: str) -> Sums | None:
    """The sums of an entry, if it is one, of the quantizer ``by``."""
    if not isinstance(entry, dict) or entry.get("by") != by:
        return None
    error, norm = entry.get("squared_error"), entry.get("squared_norm")
    if not isinstance(error, float) or not isinstance(norm, float):
        return None
    return (error, norm) if math.isfinite(error) and math.isfinite(norm) else None
