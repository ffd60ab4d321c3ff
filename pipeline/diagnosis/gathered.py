"""Which files make up a model, for sets of shards that lack some or whose names are wrong.

Loaders find shards by name alone (``-%05d-of-%05d.gguf``) and hold ``split.no`` against it; here
the number in the header counts, since names are what people change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.diagnosis import commands
from pipeline.diagnosis.finding import Finding, Mend, Severity, counted, listed
from pipeline.errors import QuantmillError
from pipeline.gguf.model_file import (
    SPLIT_COUNT,
    SPLIT_NO,
    SPLIT_TENSORS_COUNT,
    shard_file_name,
    shard_name,
)
from pipeline.gguf.reader import RawHeader, read_header

_NUMBERING = re.compile(
    r"[-._ ]*(part|shard|split)?[-._ ]*\d+([-._ ]*of[-._ ]*\d+)?$", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The headers at hand by shard number (from 0), in order, and what is wrong with the set."""

    shards: Mapping[int, RawHeader]
    count: int
    findings: tuple[Finding, ...]


def gather(header: RawHeader) -> Gathered:
    """The set of shards that the file of ``header`` belongs to.

    Raises:
        FormatError: The header of another shard is broken.
    """
    named = shard_name(header.path)
    count = _number(header, SPLIT_COUNT) or (named.count if named else 1)
    if count == 1 and named is None:
        return Gathered({0: header}, 1, ())
    stem = named.stem if named else _NUMBERING.sub("", header.path.stem) or header.path.stem
    shards = dict(sorted(_members(header, stem, count).items()))
    right = {no: header.path.with_name(shard_file_name(stem, no, count)) for no in range(count)}
    return Gathered(shards, count, tuple(_findings(shards, right)))


def _members(header: RawHeader, stem: str, count: int) -> dict[int, RawHeader]:
    """Shard number -> header: those with the right name first, then others of the folder."""
    found: dict[int, RawHeader] = {}
    for path in _candidates(header.path, stem, count):
        other = header if path == header.path else _peek(path)
        no = None if other is None else _shard_no(other)
        if other is not None and no is not None and no < count:
            agrees = all(
                _number(other, key) in (None, _number(header, key))
                for key in (SPLIT_COUNT, SPLIT_TENSORS_COUNT)
            )
            if agrees and no not in found:
                found[no] = other
    found.setdefault(_shard_no(header) or 0, header)
    return found


def _candidates(path: Path, stem: str, count: int) -> Iterator[Path]:
    """Files that may belong to the set of ``path``: of the right names, then of the same stem."""
    right = [path.with_name(shard_file_name(stem, no, count)) for no in range(count)]
    yield from (file for file in right if file.is_file())
    for file in sorted(path.parent.glob("*.gguf*")):
        name = shard_name(file)
        is_of_other_set = name is not None and (name.stem, name.count) != (stem, count)
        if file not in right and (file == path or not is_of_other_set) and file.is_file():
            yield file


def _peek(path: Path) -> RawHeader | None:
    try:
        return read_header(path)
    except QuantmillError:
        return None


def _shard_no(header: RawHeader) -> int | None:
    """The number that the header states; a file that states none is a whole model."""
    return _number(header, SPLIT_NO)


def _number(header: RawHeader, key: str) -> int | None:
    entry = header.key_values.get(key)
    return entry.value if entry is not None and isinstance(entry.value, int) else None


def _findings(shards: Mapping[int, RawHeader], right: Mapping[int, Path]) -> Iterator[Finding]:
    wrong = {header.path: right[no] for no, header in shards.items() if header.path != right[no]}
    if wrong:
        names = [path.name for path in wrong]
        yield Finding(
            Severity.STOPS,
            f"{counted(len(wrong), 'shard')} of {len(right):,} not named as loaders want them",
            tuple(names),
            Mend("Give them the names that their own numbers ask for:", tuple(_moves(wrong))),
            "invalid split file name",
        )
    missing = [right[no].name for no in right if no not in shards]
    if missing:
        yield Finding(
            Severity.STOPS,
            f"{counted(len(missing), 'shard')} of {len(right):,} missing",
            (listed(missing),),
            Mend("Fetch them from where the others came from, into the same folder."),
            "failed to load GGUF split",
        )


def _moves(wrong: Mapping[Path, Path]) -> Sequence[str]:
    """Renames in an order in which no file stands in another's way."""
    if not any(new in wrong for new in wrong.values()):
        return [commands.move(old, new) for old, new in wrong.items()]
    aside = {old: old.with_name(f"{old.name}.aside") for old in wrong}
    return [
        *(commands.move(old, aside[old]) for old in wrong),
        *(commands.move(aside[old], new) for old, new in wrong.items()),
    ]
