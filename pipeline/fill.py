"""Filling shards: source rows -> decode -> quantize -> positioned write, in one pass.

Work comes in row blocks (`pipeline.blocks`). A block is cut into tiles small enough for the cache.
Threads take whole blocks; every library call on the way releases the interpreter lock.

Several files can be filled in one pass: blocks of the same source rows go together, are read and
decoded once, and what is the same in several files is quantized once.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.blocks import Block, whole_scale_blocks
from pipeline.errors import QuantmillError
from pipeline.gguf.committer import outlast_interrupts
from pipeline.gguf.journal import BlockRecord
from pipeline.gguf.part import ShardPart
from pipeline.importance.columns import Importance, no_importance
from pipeline.plan import Transform
from pipeline.quant.backend import Quantizer
from pipeline.quant.guard import check_rows, takes_importance
from pipeline.source.reader import SourceReader
from pipeline.source.spec import Codec, MatrixRef

TILE_WEIGHTS = {Transform.ENCODE: 1 << 18, Transform.PRODUCT: 1 << 18}
"""Weights decoded at a time: 1 MiB of float32, long enough that the calls around it cost little."""

BYTE_TILE_WEIGHTS = 1 << 20
"""Weights moved at a time where nothing is decoded."""

MAX_TILE_WEIGHTS = 1 << 20
"""A tile grows no further to hold whole scale blocks: 4 MiB of float32."""

MEMORY_BASE_NBYTES = 512_000_000
MEMORY_THREAD_NBYTES = 16_000_000
"""Most anonymous memory of a fill: base plus this per thread, whatever the tensor. A thread holds
one tile as float32 (two for a product), its output bytes and the stored bytes they come from."""

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block, the part that it is to be written to, and what its columns count."""

    part: ShardPart
    block: Block
    importance: Importance = no_importance


PartBlock = tuple[ShardPart, Block]
"""A block of copied rows, and the part that it belongs to."""


@dataclass(frozen=True, slots=True)
class FillEvents:
    """What a fill tells while it runs; called from worker threads."""

    advanced: Callable[[int], None] = lambda _: None
    """Output bytes written or found whole."""
    started: Callable[[int, str], None] = lambda _slot, _block: None
    """A worker slot begins a block; what it was at tells whom to blame if the library aborts."""


class _Worker(threading.local):
    """Buffers of one thread, reused for every tile."""

    def __init__(self) -> None:
        self.floats: dict[int, Floats] = {}
        self.packed: NDArray[np.uint8] = np.empty(0, np.uint8)


def fill_blocks(
    part: ShardPart,
    blocks: Iterable[Block],
    source: SourceReader,
    quantizer: Quantizer,
    *,
    n_threads: int,
    importance: Importance = no_importance,
    events: FillEvents | None = None,
) -> None:
    """Write those of ``blocks`` that ``part`` does not hold yet; ``quantizer`` is prepared.

    Raises:
        QuantmillError: A source value cannot be decoded, a quantizer refused a row, or the disk
            failed. Blocks finished before stay journaled.
    """
    groups = ((Wanted(part, block, importance),) for block in blocks)
    fill_together(groups, source, quantizer, n_threads=n_threads, events=events)


def fill_together(
    groups: Iterable[Sequence[Wanted]],
    source: SourceReader,
    quantizer: Quantizer,
    *,
    n_threads: int,
    events: FillEvents | None = None,
) -> None:
    """Write blocks to many parts where they are not yet; those of a group come of the same rows.

    Raises:
        QuantmillError: As `fill_blocks`.
    """
    events = events or FillEvents()
    filler = _Filler(source, quantizer, events, forgets=True)
    _run_all(filler, _missing(groups, events), n_threads)


def grouped(wanted: Iterable[Wanted]) -> list[list[Wanted]]:
    """Blocks of the same source rows together, in the order in which rows are wanted first."""
    groups: dict[object, list[Wanted]] = {}
    for one in wanted:
        rows = (one.block.matrices, one.block.begin, one.block.end)
        groups.setdefault(rows, []).append(one)
    return list(groups.values())


def copy_blocks(
    work: Iterable[PartBlock],
    source: SourceReader,
    *,
    n_threads: int,
    events: FillEvents | None = None,
) -> None:
    """Write blocks of copied rows to several parts, each to its own, where they are not yet.

    They are begun in the order given, so that blocks of the same source rows side by side read them
    from the drive once. What was read stays in the page cache: forgetting it is the caller's.

    Raises:
        QuantmillError: Reading or writing failed. Blocks finished before stay journaled.
    """
    events = events or FillEvents()
    filler = _Filler(source, None, events, forgets=False)
    groups = ((Wanted(part, block),) for part, block in work)
    _run_all(filler, _missing(groups, events), n_threads)


def _missing(groups: Iterable[Sequence[Wanted]], events: FillEvents) -> Iterator[Sequence[Wanted]]:
    for group in groups:
        missing = [one for one in group if not _is_done(one)]
        events.advanced(sum(one.block.nbytes for one in group if one not in missing))
        if missing:
            yield missing


def _is_done(wanted: Wanted) -> bool:
    record = wanted.part.done.get(wanted.block.offset)
    return record is not None and record.nbytes == wanted.block.nbytes


def _run_all(filler: _Filler, work: Iterator[Sequence[Wanted]], n_threads: int) -> None:
    """Let ``n_threads`` pull groups from one iterator until it ends, one fails, or Ctrl-C."""
    lock = threading.Lock()

    def pull(slot: int) -> None:
        try:
            while not filler.stopped.is_set():
                with lock:
                    group = next(work, None)
                if group is None:
                    return
                filler.fill(group, slot)
        except BaseException:
            filler.stopped.set()
            raise

    pool = ThreadPoolExecutor(n_threads, thread_name_prefix="fill")
    futures: list[Future[None]] = []

    def start() -> None:
        futures.extend(pool.submit(pull, slot) for slot in range(n_threads))

    try:
        outlast_interrupts(start)  # a pool does not know the thread that it was just starting
        for future in as_completed(futures):
            future.result()
    finally:
        filler.stopped.set()
        outlast_interrupts(pool.shutdown)


@dataclass(slots=True)
class _Made:
    """Bytes that are the same in several files: made once, written to each."""

    wanted: list[Wanted]
    weights: Floats | None
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    @property
    def block(self) -> Block:
        """One of the equal blocks."""
        return self.wanted[0].block


def _made_of(group: Sequence[Wanted]) -> list[_Made]:
    """What has to be made for a group: once for each type, and for each way of weighing."""
    made: dict[object, _Made] = {}
    for one in group:
        tensor = one.block.tensor
        is_weighted = tensor.is_encoded and takes_importance(tensor.type)
        weights = one.importance(tensor.target) if is_weighted else None
        row = None if weights is None else weights[one.block.no]
        kind = (tensor.transform, tensor.type, None if row is None else row.tobytes())
        made.setdefault(kind, _Made([], row)).wanted.append(one)
    return list(made.values())


def _share(part: ShardPart, ranges: Iterable[tuple[int, int, int]], at: int) -> bool:
    for fd, offset, nbytes in ranges:
        if not part.share(fd, offset, nbytes, at):
            return False
        at += nbytes
    return True


class _Filler:
    """Turns blocks into written, journaled bytes; one instance serves all threads."""

    def __init__(
        self,
        source: SourceReader,
        quantizer: Quantizer | None,
        events: FillEvents,
        *,
        forgets: bool,
    ) -> None:
        self._source = source
        self._quantizer = quantizer
        self._events = events
        self._forgets = forgets
        self._worker = _Worker()
        self.stopped = threading.Event()

    def fill(self, group: Sequence[Wanted], slot: int) -> None:
        """Write a group and hand it to the journals; leave it unfinished once `stopped` is set."""
        first = group[0].block
        self._events.started(slot, str(first))
        made = _made_of(group)
        is_there = self._is_shared(made)
        n_tile = min(self._tile_rows(one.block) for one in made)
        for begin in range(first.begin, first.end, n_tile):
            if self.stopped.is_set():
                return
            self._fill_tile(made, begin, min(n_tile, first.end - begin), is_there=is_there)
        for matrix in first.matrices:
            self._source.check_unchanged(matrix)
            if self._forgets:
                self._source.forget(matrix, first.begin, first.end - first.begin)
        for one in made:
            for wanted in one.wanted:
                block = wanted.block
                record = BlockRecord(block.offset, block.nbytes, one.digest.hexdigest())
                wanted.part.commit(record)

    def _is_shared(self, made: Sequence[_Made]) -> bool:
        """Take over what is copied from a finished file, where file systems can share it.

        It is read all the same, for its digest; but a copy that shares extents takes no space.
        """
        first = made[0].block
        matrix = first.matrices[0]
        is_copy = all(one.block.tensor.transform is Transform.COPY for one in made)
        if not is_copy or matrix.codec is not Codec.GGML:
            return False
        ranges = self._source.ranges(matrix, first.begin, first.end - first.begin)
        return all(
            _share(wanted.part, ranges, wanted.block.offset)
            for one in made
            for wanted in one.wanted
        )

    def _fill_tile(self, made: Sequence[_Made], begin: int, n_rows: int, *, is_there: bool) -> None:
        decoded = _Decoded(self._source, self._worker, begin, n_rows)
        for one in made:
            row_nbytes = one.block.tensor.row_nbytes
            out = self._packed(n_rows, row_nbytes)
            self._make(one, decoded, out)
            content = out.reshape(-1).data
            for wanted in one.wanted:
                block = wanted.block
                if not is_there:
                    wanted.part.write(content, block.offset + (begin - block.begin) * row_nbytes)
                self._events.advanced(content.nbytes)
            one.digest.update(content)

    def _tile_rows(self, block: Block) -> int:
        matrix = block.matrices[0]
        weights = TILE_WEIGHTS.get(block.tensor.transform, BYTE_TILE_WEIGHTS)
        n_rows = max(1, weights // matrix.n_cols)
        whole = whole_scale_blocks(n_rows, matrix.block[0])
        return whole if whole * matrix.n_cols <= MAX_TILE_WEIGHTS else n_rows

    def _make(self, made: _Made, decoded: _Decoded, out: NDArray[np.uint8]) -> None:
        try:
            self._transform(made, decoded, out)
        except QuantmillError as error:
            tensor = made.block.tensor
            error.add_note(f"while making {tensor.name} as {tensor.type.name}")
            raise

    def _transform(self, made: _Made, decoded: _Decoded, out: NDArray[np.uint8]) -> None:
        tensor, matrix = made.block.tensor, made.block.matrices[0]
        match tensor.transform:
            case Transform.COPY:
                self._source.copy_rows(matrix, decoded.begin, out)
            case Transform.REPACK:
                self._source.repack_rows(matrix, decoded.begin, out)
            case Transform.NARROW:
                limit = tensor.target.id_limit
                assert limit is not None
                self._source.narrow_rows(matrix, decoded.begin, out, limit=limit)
            case Transform.ENCODE | Transform.PRODUCT:
                assert self._quantizer is not None
                rows, bound = decoded.values(made.block)
                check_rows(
                    tensor.type, rows, importance=made.weights, bound=bound, tensor=tensor.name
                )
                self._quantizer.quantize(tensor.type, rows, out, made.weights)

    def _packed(self, n_rows: int, row_nbytes: int) -> NDArray[np.uint8]:
        if self._worker.packed.size < n_rows * row_nbytes:
            self._worker.packed = np.empty(n_rows * row_nbytes, np.uint8)
        return self._worker.packed[: n_rows * row_nbytes].reshape(n_rows, row_nbytes)


class _Decoded:
    """The values of a tile: read when first asked for, by the thread that fills it."""

    def __init__(self, source: SourceReader, worker: _Worker, begin: int, n_rows: int) -> None:
        self.begin = begin
        self._source = source
        self._worker = worker
        self._n_rows = n_rows
        self._values: tuple[Floats, float] | None = None

    def values(self, block: Block) -> tuple[Floats, float]:
        """The rows, multiplied if the block has several matrices, and a bound of their size."""
        if self._values is None:
            rows, bound = self._decode(0, block.matrices[0])
            for matrix in block.matrices[1:]:
                factor, bound_of_factor = self._decode(1, matrix)
                np.multiply(rows, factor, out=rows)
                bound *= bound_of_factor
            self._values = rows, bound
        return self._values

    def _decode(self, slot: int, matrix: MatrixRef) -> tuple[Floats, float]:
        rows = self._floats(slot, matrix.n_cols)
        return rows, self._source.decode_rows(matrix, self.begin, rows)

    def _floats(self, slot: int, n_cols: int) -> Floats:
        size, buffer = self._n_rows * n_cols, self._worker.floats.get(slot)
        if buffer is None or buffer.size < size:
            buffer = self._worker.floats[slot] = np.empty(size, np.float32)
        return buffer[:size].reshape(self._n_rows, n_cols)
