"""Writing one shard of a model without some of its experts, in several selections at a time.

The model's bytes pass by once: blocks of all selections are begun in the order of what they read,
and tensors leave the page cache when the last of them has them. Before that they are hashed, so
that what was not cut is held against the model by another path than the one that copied it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from pipeline.blocks import Block, blocks_of, spans_of
from pipeline.errors import SourceError, VerifyError, raise_problems
from pipeline.fill import FillEvents, PartBlock, copy_blocks
from pipeline.gguf.digests import running_digests, tensor_digest
from pipeline.gguf.part import ShardDigests, ShardPart
from pipeline.plan import PlannedShard, PlannedTensor
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.reader import SourceReader

GROUP_NBYTES = 1 << 28
"""Small tensors pass together up to this many bytes, so that threads do not wait for each."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One selection's form of a shard, and the part that it is written to."""

    shard: PlannedShard
    part: ShardPart


def write_cuts(
    whole: PlannedShard,
    cuts: Sequence[Cut],
    source: Checkpoint,
    *,
    n_threads: int,
    listed: str | None = None,
    events: FillEvents | None = None,
) -> list[ShardDigests]:
    """Fill all ``cuts`` of the finished shard ``whole`` and read them back.

    Args:
        whole: The shard as it is in the model.
        cuts: What it is to become; the tensors are the same ones, some with fewer experts.
        source: The model as `pipeline.gguf.as_source` presents it.
        n_threads: Threads that copy, and threads that hash what was written.
        listed: Hex sha256 of the finished shard, where its makers tell it: it is then hashed whole.
        events: Told how it goes.

    Returns:
        The digests of each cut.

    Raises:
        SourceError: The shard is not what it is listed as, or cannot be read.
        VerifyError: What was written is not what was to be written.
        OutputError: The disk failed.
    """
    passing = _Passing(whole, cuts, listed)
    with SourceReader(source) as reader, ThreadPoolExecutor(1, "passing") as beside:
        hashing: Future[None] | None = None
        for tensors in _groups(whole.tensors):
            work = (pair for tensor in tensors for pair in side_by_side(tensor, cuts))
            copy_blocks(work, reader, n_threads=n_threads, events=events)
            if hashing is not None:
                hashing.result()
            hashing = beside.submit(passing.leave, tensors, reader)
        if hashing is not None:
            hashing.result()
    passing.end(cuts)
    digests = [cut.part.read_back(spans_of(cut.shard), n_threads=n_threads) for cut in cuts]
    for cut, one in zip(cuts, digests, strict=True):
        passing.check(cut, one)
    return digests


def _groups(tensors: Sequence[PlannedTensor]) -> Iterator[list[PlannedTensor]]:
    """Tensors that pass together: a large one alone, small ones in file order."""
    group: list[PlannedTensor] = []
    nbytes = 0
    for tensor in tensors:
        if group and nbytes + tensor.nbytes > GROUP_NBYTES:
            yield group
            group, nbytes = [], 0
        group.append(tensor)
        nbytes += tensor.nbytes
    if group:
        yield group


def side_by_side(tensor: PlannedTensor, cuts: Sequence[Cut]) -> Iterator[PartBlock]:
    """The blocks of all cuts of a tensor, in the order of the rows that they begin to read."""
    placed = [
        (_first_row(block), no, (cut.part, block))
        for no, cut in enumerate(cuts)
        for planned in cut.shard.tensors
        if planned.name == tensor.name
        for block in blocks_of(planned)
    ]
    placed.sort(key=lambda item: item[:2])
    return (pair for _, _, pair in placed)


def _first_row(block: Block) -> int:
    """Which row of the stored tensor a block begins with."""
    matrix = block.matrices[0]
    if matrix.picks is None:
        return block.begin
    entries = matrix.picks.entries
    n_rows = matrix.n_rows // len(entries)
    # The one row of a vector is made of all its entries.
    return entries[block.begin // n_rows] * n_rows + block.begin % n_rows if n_rows else 0


class _Passing:
    """The tensors of a finished shard while their bytes are at hand."""

    def __init__(self, whole: PlannedShard, cuts: Sequence[Cut], listed: str | None) -> None:
        assert whole.existing is not None
        self._file = whole.existing
        self._whole = {tensor.name: tensor.target for tensor in whole.tensors}
        self._staying = {tensor.name for cut in cuts for tensor in self._same(cut)}
        self._listed = listed
        self._running = running_digests(self._file.path, list(self._file.tensors.values()))
        self._digests: dict[str, str] = {}

    def leave(self, tensors: Sequence[PlannedTensor], reader: SourceReader) -> None:
        """Hash tensors where that tells anything, and let them leave the page cache."""
        for tensor in tensors:
            self._hash(tensor)
            for matrix in tensor.target.matrices:
                reader.forget(matrix, 0, matrix.n_rows)

    def _hash(self, tensor: PlannedTensor) -> None:
        if self._listed is not None:
            self._digests.update([next(self._running)])
        elif tensor.name in self._staying:
            stored = self._file.tensors[tensor.name]
            self._digests[tensor.name] = tensor_digest(self._file.path, stored)

    def end(self, cuts: Sequence[Cut]) -> None:
        """Hold the finished shard against its listed digest, and drop the parts if it differs.

        Raises:
            SourceError: It is another one.
        """
        if self._listed is None:
            return
        _, found = next(self._running)
        if found != self._listed:
            for cut in cuts:
                cut.part.discard()
            raise SourceError(
                "the file has another digest than its SHA256SUMS lists",
                file=self._file.path,
                expected=self._listed,
                found=found,
                next_step="Fetch or make it again; its damage would be carried on.",
            )

    def check(self, cut: Cut, digests: ShardDigests) -> None:
        """Hold what was not cut against the model, and drop the part if it differs.

        Raises:
            VerifyError: It differs.
        """
        problems = [
            VerifyError(
                "a tensor that keeps all its bytes has other bytes than in the model",
                file=cut.part.part,
                tensor=tensor.name,
                expected=self._digests[tensor.name],
                found=digests.spans[tensor.name],
                next_step="Run the same command again; check the disk if it happens twice.",
            )
            for tensor in self._same(cut)
            if digests.spans[tensor.name] != self._digests[tensor.name]
        ]
        if problems:
            cut.part.discard()
        raise_problems(f"what was written to {cut.part.part}", problems)

    def _same(self, cut: Cut) -> list[PlannedTensor]:
        return [t for t in cut.shard.tensors if t.target == self._whole[t.name]]
