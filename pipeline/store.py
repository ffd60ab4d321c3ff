"""Where finished shards lie: one folder per spec digest, so that equal work is done once.

    <root>/<digest>/shard.gguf     the file (with .part and .journal beside it while unfinished)
    <root>/<digest>/record.json    written just before the shard gets its name: digests, errors
    <root>/<digest>/errors-<source file>.json    what was measured where sources are let go early
    <root>/<digest>/now            what each worker is at, for the report of a crashed one

A spec holds just what the bytes depend on. Threads, paths and names stay out of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from pipeline import files
from pipeline.digest import sha256, spec_digest
from pipeline.errors import OutputError
from pipeline.gguf.journal import read_journal
from pipeline.gguf.part import ShardDigests
from pipeline.measure import TensorError, read_error
from pipeline.plan import PlannedShard, PlannedTensor
from pipeline.quant.dequant import decoders_of
from pipeline.quant.types import TYPES, GgmlType
from pipeline.source.spec import Picks

FORMAT_VERSION = 1
"""Raised by hand whenever the same plan and source would give other bytes."""

_NOW_NBYTES = 256


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What is known of a whole shard: its spec, length, digests and measured errors.

    ``modified_ns`` is when the file was last written to. A file that was touched since is not taken
    for whole before it has been hashed again.
    """

    spec: str
    nbytes: int
    modified_ns: int
    file_sha256: str
    tensors: dict[str, str]
    errors: tuple[TensorError, ...]


def shard_spec(
    shard: PlannedShard,
    sources: Sequence[Sequence[object]],
    version_of: Callable[[Iterable[GgmlType]], str],
    *,
    importance: Sequence[object] | None = None,
) -> str:
    """Digest of everything the bytes of ``shard`` depend on.

    Args:
        shard: The planned shard.
        sources: What identifies the content of each source file that it reads.
        version_of: Name and version of the libraries that write these types.
        importance: What identifies the importance matrix, for a shard that is made with one.
    """
    encoded = {tensor.type for tensor in shard.tensors if tensor.is_encoded}
    decoded = {
        TYPES[matrix.ggml_type]
        for tensor in shard.tensors
        for matrix in tensor.target.matrices
        if tensor.is_encoded and matrix.ggml_type is not None
    }
    return spec_digest(
        {
            "format": FORMAT_VERSION,
            "header": sha256(shard.header),
            "tensors": [_origin(tensor) for tensor in shard.tensors],
            "sources": [list(stamp) for stamp in sources],
            "quantizer": version_of(encoded) if encoded else None,
            **({} if importance is None else {"importance": list(importance)}),
            **({"decoder": decoders_of(decoded)} if decoded else {}),
        }
    )


def _origin(tensor: PlannedTensor) -> list[object]:
    """What is done to which stored matrices: the header says only what comes of it."""
    stored = [
        [m.codec.value, m.weight, m.scale, m.n_rows, m.n_cols, *m.block, *_picked(m.picks)]
        for m in tensor.target.matrices
    ]
    return [tensor.name, tensor.transform.value, stored]


def _picked(picks: Picks | None) -> list[object]:
    """What is taken of a stored matrix; nothing where all of it is."""
    if picks is None:
        return []
    if isinstance(picks.entries, range):
        return [f"{picks.entries.start} to {picks.entries.stop}"]
    return [list(picks.entries)]


@lru_cache(maxsize=64)
def _journaled(journal: Path, spec: str, nbytes: int, modified_ns: int) -> frozenset[int]:
    """Luigi asks often; a journal is read again only when it has changed."""
    del nbytes, modified_ns
    return frozenset(read_journal(journal, spec, mend=False))


@dataclass(frozen=True, slots=True)
class ShardStore:
    """The folder of finished shards."""

    root: Path

    def folder(self, spec: str) -> Path:
        """The folder of one spec."""
        return self.root / spec[:16]

    def part(self, spec: str) -> Path:
        """The unfinished shard file of one spec."""
        return self.folder(spec) / "shard.gguf.part"

    def path(self, spec: str) -> Path:
        """The shard file of one spec."""
        return self.folder(spec) / "shard.gguf"

    def record(self, spec: str) -> ShardRecord | None:
        """The record of a whole shard; nothing while it is unfinished, damaged or another's."""
        record = self._read_record(spec)
        if record is None:
            return None
        if record.spec != spec or files.stamp(self.path(spec)) != (
            record.nbytes,
            record.modified_ns,
        ):
            return None
        return record

    def revive(self, spec: str) -> bool:
        """Take a shard that was touched for whole again if its bytes are still those recorded."""
        record, path = self._read_record(spec), self.path(spec)
        if record is None or record.spec != spec or not path.exists():
            return False
        stamp = files.stamp(path)
        if stamp is None or stamp[0] != record.nbytes:
            return False
        if files.sha256_of(path) != record.file_sha256:
            return False
        self._write_record(replace(record, modified_ns=stamp[1]))
        return True

    def journaled(self, spec: str) -> frozenset[int]:
        """Offsets of the blocks of an unfinished shard that are whole."""
        path = self.path(spec)
        journal = path.with_name(path.name + ".journal")
        if not path.with_name(path.name + ".part").exists() or not journal.exists():
            return frozenset()
        state = journal.stat()
        return _journaled(journal, spec, state.st_size, state.st_mtime_ns)

    def _read_record(self, spec: str) -> ShardRecord | None:
        path = self.folder(spec) / "record.json"
        if not path.exists():
            return None
        try:
            entry = json.loads(files.read_bytes(path))
            errors = tuple(read_error(error) for error in entry.pop("errors"))
            return ShardRecord(**entry, errors=errors)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None

    def _write_record(self, record: ShardRecord) -> None:
        content = json.dumps(asdict(record), indent=1, sort_keys=True).encode()
        files.write_whole(self.folder(record.spec) / "record.json", content)

    def save(
        self,
        spec: str,
        unnamed: Path,
        digests: ShardDigests,
        errors: tuple[TensorError, ...] = (),
    ) -> ShardRecord:
        """Record what is known of a shard that was read back whole and is to be named next."""
        # Another worker may have named the same file meanwhile.
        nbytes, modified = files.stamp(unnamed) or files.stamp(self.path(spec)) or (0, 0)
        record = ShardRecord(spec, nbytes, modified, digests.file_sha256, digests.spans, errors)
        self._write_record(record)
        return record

    def save_errors(self, spec: str, file: str, errors: tuple[TensorError, ...]) -> None:
        """Keep what was measured of the part of a shard that comes from one source file."""
        content = json.dumps([asdict(error) for error in errors], indent=1).encode()
        files.write_whole(self._errors_of(spec, file), content)

    def has_errors(self, spec: str, file: str) -> bool:
        """Whether the part that comes from a source file was measured."""
        return self._errors_of(spec, file).exists()

    def errors(self, spec: str, file: str) -> tuple[TensorError, ...]:
        """What was measured of that part."""
        entries = json.loads(files.read_bytes(self._errors_of(spec, file)))
        return tuple(read_error(entry) for entry in entries)

    def _errors_of(self, spec: str, file: str) -> Path:
        return self.folder(spec) / f"errors-{file}.json"

    def note(self, spec: str, slot: int, block: str) -> None:
        """Leave word of what a worker begins; survives the process.

        A disk that refuses it is no reason to stop: the block itself will tell.
        """
        line = block.encode()[: _NOW_NBYTES - 1].ljust(_NOW_NBYTES - 1) + b"\n"
        path = self.folder(spec) / "now"
        with suppress(OutputError), files.writing(path, create=True) as fd:
            files.write_exact(fd, memoryview(line), slot * _NOW_NBYTES, path)

    def notes(self, spec: str) -> tuple[str, ...]:
        """What the workers of an unfinished shard were last at."""
        path = self.folder(spec) / "now"
        if not path.exists():
            return ()
        lines = files.read_bytes(path).decode(errors="replace").splitlines()
        return tuple(line.strip("\0 ") for line in lines if line.strip("\0 "))

    def forget_notes(self, spec: str) -> None:
        """Drop the notes of an earlier process."""
        files.remove(self.folder(spec) / "now")

    def tidy(self, spec: str) -> None:
        """Drop what was kept of a whole shard only while it was made."""
        self.forget_notes(spec)
        files.remove(self.folder(spec) / "shard.gguf.journal")
