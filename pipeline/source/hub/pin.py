"""The pin of an address: the commit and files it stood for when it was first resolved, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from pipeline import files
from pipeline.errors import SourceError
from pipeline.source.hub.address import HubAddress
from pipeline.source.hub.snapshot import HubFile, HubSnapshot, checked_commit, checked_file
from pipeline.source.json_object import read_json_object, shown

PIN_VERSION = 1


def read_pin(path: Path, address: HubAddress) -> HubSnapshot | None:
    """What ``address`` was resolved to, or None where nothing is recorded.

    Raises:
        SourceError: The record is damaged, or is that of another address.
    """
    if not path.exists():
        return None
    entry, _ = read_json_object(path)
    found = (entry.get("pin"), entry.get("repo"), entry.get("revision"))
    if found != (PIN_VERSION, address.repo, address.revision):
        raise SourceError(
            "this record of a commit belongs to another address",
            file=path,
            expected=f"{address} (version {PIN_VERSION})",
            found=shown(f"{found[1]}@{found[2]} (version {found[0]})"),
            next_step="Delete it, or keep the records of different addresses apart.",
        )
    listed = entry.get("files")
    if not isinstance(listed, list):
        raise SourceError("this record of a commit is damaged", file=path, next_step="Delete it.")
    found_files = [_file(one, path) for one in listed]
    return HubSnapshot(
        address.repo,
        checked_commit(entry.get("commit"), str(path)),
        address.revision,
        {file.name: file for file in found_files},
    )


def write_pin(path: Path, snapshot: HubSnapshot) -> None:
    """Record ``snapshot`` for later runs, all at once.

    Raises:
        OutputError: The folder cannot be written.
    """
    entry = {
        "pin": PIN_VERSION,
        "repo": snapshot.repo,
        "revision": snapshot.revision,
        "commit": snapshot.commit,
        "files": [_entry(file) for file in snapshot.files.values()],
    }
    text = json.dumps(entry, indent=1, sort_keys=True, ensure_ascii=False)
    files.write_whole(path, text.encode() + b"\n")


def _entry(file: HubFile) -> dict[str, object]:
    fields = asdict(file)
    del fields["listed_sha256"]  # not the hub's word
    return fields


def _file(entry: object, path: Path) -> HubFile:
    match entry:
        case {"name": name, "nbytes": nbytes, "sha256": sha256, "blob_id": blob_id}:
            return checked_file(name, nbytes, sha256, blob_id, where=str(path))
    raise SourceError(
        "this record of a commit is damaged",
        file=path,
        found=shown(entry),
        next_step="Delete it.",
    )
