"""Checksum lists as sha256sum writes them, and what they add to the hub's own digests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pipeline import files
from pipeline.errors import SourceError, raise_problems
from pipeline.source.hub.snapshot import HubFile, HubSnapshot
from pipeline.source.json_object import shown

_PLAIN = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_TAGGED = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_ESCAPED = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "r": "\r", "\\": "\\"}


def read_checksums(path: Path) -> dict[str, str]:
    """File name -> sha256 of a list in the form of ``sha256sum`` or ``sha256sum --tag``.

    A leading ``./`` is left out. Empty lines and lines that begin with ``#`` are skipped; a line
    that begins with a backslash has its name escaped (GNU coreutils, "cksum output modes").

    Raises:
        SourceError: Unreadable, not text, a line of another form, or a file with two digests.
    """
    try:
        text = files.read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise SourceError("the checksum list is not UTF-8 text", file=path) from error
    listed: dict[str, str] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, digest = _entry(line, number, path)
        if listed.setdefault(name, digest) != digest:
            raise SourceError(
                "the checksum list gives a file two digests",
                file=path,
                expected=f"{shown(name)}: {listed[name]}",
                found=f"{digest} in line {number}",
            )
    return listed


def with_checksums(snapshot: HubSnapshot, listed: Mapping[str, str], origin: Path) -> HubSnapshot:
    """``snapshot`` whose files must have the digests of ``listed`` too; other names are ignored.

    Raises:
        SourceError: The hub gives another sha256 for a file.
        Problems: For several.
    """
    problems = [
        _contradiction(file, listed[name], snapshot, origin)
        for name, file in snapshot.files.items()
        if file.sha256 is not None and listed.get(name, file.sha256) != file.sha256
    ]
    raise_problems(f"checksum list {origin}", problems)
    joined = {
        name: replace(file, listed_sha256=listed.get(name, file.listed_sha256))
        for name, file in snapshot.files.items()
    }
    return replace(snapshot, files=joined)


def _entry(line: str, number: int, path: Path) -> tuple[str, str]:
    if plain := _PLAIN.fullmatch(line):
        escaped, digest, name = plain.groups()
    elif tagged := _TAGGED.fullmatch(line):
        escaped, name, digest = tagged.groups()
    else:
        raise SourceError(
            "the checksum list has a line of another form",
            file=path,
            expected="64 hexadecimal digits, two spaces, a file name",
            found=f"line {number}: {shown(line)}",
            next_step="Make it with `sha256sum`.",
        )
    if escaped:
        name = _ESCAPED.sub(lambda match: _ESCAPES.get(match[1], match[0]), name)
    return name.removeprefix("./"), digest.lower()


def _contradiction(file: HubFile, digest: str, snapshot: HubSnapshot, origin: Path) -> SourceError:
    return SourceError(
        "the checksum list and the hub contradict each other",
        file=f"{snapshot}: {file.name}",
        expected=f"sha256 {digest} ({origin})",
        found=f"sha256 {file.sha256} (the hub)",
        next_step="Check that the list belongs to this revision.",
    )
