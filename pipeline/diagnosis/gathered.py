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
    stem = named.stem if named else _NUMBERING.sub("", header.path.stem) or header.path.stem
    count = _count(header, stem)
    if count == 1 and named is None:
        return Gathered({0: header}, 1, ())
    shards = dict(sorted(_members(header, stem, count).items()))
    right = {no: header.path.with_name(shard_file_name(stem, no, count)) for no in range(count)}
    return Gathered(shards, count, tuple(_findings(shards, right)))


def _count(header: RawHeader, stem: str) -> int:
    """Shards of the set: as names say where all of these files lie there, else as headers say.

    Shards but the first may leave it out.
    """
    said, named = _number(header, SPLIT_COUNT), shard_name(header.path)
    if named is not None:
        names = (shard_file_name(stem, no, named.count) for no in range(named.count))
        if said is None or all(header.path.with_name(name).is_file() for name in names):
            return named.count
    elif said is None and _number(header, SPLIT_NO) is not None:
        others = (_peek(path) for path in _candidates(header.path, stem, 0))
        counts = (_number(other, SPLIT_COUNT) for other in others if other is not None)
        said = next((count for count in counts if count is not None), None)
    return said or 1


def _members(header: RawHeader, stem: str, count: int) -> dict[int, RawHeader]:
    """Shard number -> header: those with the right name first, then others of the folder."""
    found: dict[int, RawHeader] = {}
    for path in _candidates(header.path, stem, count):
        other = header if path == header.path else _peek(path)
        no = None if other is None else _number(other, SPLIT_NO)
        if other is None or no is None or not 0 <= no < count or no in found:
            continue
        is_named = path.name == shard_file_name(stem, no, count)
        if is_named or _agree(header, other, count):
            found[no] = other
    found.setdefault(_number(header, SPLIT_NO) or 0, header)
    return found


def _agree(header: RawHeader, other: RawHeader, count: int) -> bool:
    """Whether two shards may be of one set; what one of them leaves out is no disagreement."""
    totals = {_number(one, SPLIT_TENSORS_COUNT) for one in (header, other)} - {None}
    return _number(other, SPLIT_COUNT) in (None, count) and len(totals) <= 1


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
    yield from _count_findings(shards, len(right))
    lacking = [path for no, path in right.items() if no not in shards]
    at_hand = {header.path for header in shards.values()}
    broken = [path.name for path in lacking if path.is_file() and path not in at_hand]
    if broken:
        yield Finding(
            Severity.STOPS,
            f"{counted(len(broken), 'shard')} of {len(right):,} with a header that is damaged or "
            "of another set",
            (listed(broken),),
            Mend("Fetch them again, from where the others came from."),
            "failed to read magic, key-value pairs or tensor info",
        )
    missing = [path.name for path in lacking if path.name not in broken]
    if missing:
        yield Finding(
            Severity.STOPS,
            f"{counted(len(missing), 'shard')} of {len(right):,} missing",
            (listed(missing),),
            Mend("Fetch them from where the others came from, into the same folder."),
            "failed to load GGUF split",
        )


def _count_findings(shards: Mapping[int, RawHeader], count: int) -> Iterator[Finding]:
    """Headers that state another number of shards than there are by all names."""
    said = {header.path: _number(header, SPLIT_COUNT) for header in shards.values()}
    wrong = {path: number for path, number in said.items() if number not in (None, count)}
    if wrong:
        yield Finding(
            Severity.STOPS,
            f"{SPLIT_COUNT} says {next(iter(wrong.values()))}, the set has "
            f"{counted(count, 'shard')}",
            tuple(path.name for path in wrong),
            Mend(
                "Set the number right where it stands; nothing else in the file changes:",
                tuple(commands.set_key(path, SPLIT_COUNT, count) for path in wrong),
            ),
            "invalid split file name",
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
