"""Filling a shard: source rows -> decode -> quantize -> positioned write, in one pass.

A tensor is cut into row blocks, the unit of the journal, at places that depend on nothing but the
tensor and its type; a block never crosses a stored matrix (an expert keeps its own importance and
its own place in the file). A block is cut into tiles small enough for the cache. Threads take whole
blocks; every library call on the way releases the interpreter lock.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantmillError
from pipeline.gguf.committer import outlast_interrupts
from pipeline.gguf.journal import BlockRecord
from pipeline.gguf.part import ShardPart, Span
from pipeline.plan import PlannedShard, PlannedTensor, Transform
from pipeline.quant.backend import Quantizer
from pipeline.quant.guard import check_rows
from pipeline.source.reader import SourceReader
from pipeline.source.spec import MatrixRef

BLOCK_NBYTES = 16 << 20
"""Most output bytes of a row block, but for what whole scale blocks need."""

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


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``begin`` to ``end`` of one stored matrix, and where their bytes go."""

    tensor: PlannedTensor
    matrices: tuple[MatrixRef, ...]
    begin: int
    end: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Output bytes."""
        return (self.end - self.begin) * self.tensor.row_nbytes

    def __str__(self) -> str:
        return f"{self.tensor.name} ({self.matrices[0].weight} rows {self.begin}-{self.end})"


PartBlock = tuple[ShardPart, Block]
"""A block, and the part that it belongs to."""


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
        self.floats: dict[int, NDArray[np.float32]] = {}
        self.packed: NDArray[np.uint8] = np.empty(0, np.uint8)


def blocks_of(tensor: PlannedTensor) -> Iterator[Block]:
    """The row blocks of a tensor, in file order."""
    target = tensor.target
    if tensor.transform is Transform.PRODUCT:
        groups: tuple[tuple[MatrixRef, ...], ...] = (target.matrices,)
    else:
        groups = tuple((matrix,) for matrix in target.matrices)
    height = target.matrices[0].block[0]
    n_per_block = _whole_scale_blocks(max(1, BLOCK_NBYTES // tensor.row_nbytes), height)
    offset = tensor.offset
    for matrices in groups:
        n_rows = matrices[0].n_rows
        for begin in range(0, n_rows, n_per_block):
            block = Block(tensor, matrices, begin, min(begin + n_per_block, n_rows), offset)
            yield block
            offset += block.nbytes


def _whole_scale_blocks(n_rows: int, height: int) -> int:
    """``n_rows`` without a scale block begun: rows that share scales read them once."""
    return max(height, n_rows - n_rows % height)


def blocks_from(shard: PlannedShard, weight_map: Mapping[str, str], file: str) -> Iterator[Block]:
    """The row blocks of a shard that are read from one source file, in file order.

    A block reads one matrix, or factors of a product, and these lie in one file.
    """
    for tensor in shard.tensors:
        if any(weight_map[name] == file for name in tensor.target.source_names):
            for block in blocks_of(tensor):
                if weight_map[block.matrices[0].weight] == file:
                    yield block


def blocks_of_shard(shard: PlannedShard) -> list[Block]:
    """The row blocks of a whole shard, in file order."""
    return [block for tensor in shard.tensors for block in blocks_of(tensor)]


def spans_of(shard: PlannedShard) -> list[Span]:
    """The byte ranges of a shard's tensors."""
    return [Span(tensor.name, tensor.offset, tensor.nbytes) for tensor in shard.tensors]


def fill_blocks(
    part: ShardPart,
    blocks: Iterable[Block],
    source: SourceReader,
    quantizer: Quantizer,
    *,
    n_threads: int,
    events: FillEvents | None = None,
) -> None:
    """Write those of ``blocks`` that ``part`` does not hold yet; ``quantizer`` is prepared.

    Raises:
        QuantmillError: A source value cannot be decoded, a quantizer refused a row, or the disk
            failed. Blocks finished before stay journaled.
    """
    events = events or FillEvents()
    filler = _Filler(source, quantizer, events, forgets=True)
    _run_all(filler, _missing(((part, block) for block in blocks), events), n_threads)


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
    _run_all(filler, _missing(work, events), n_threads)


def _missing(work: Iterable[PartBlock], events: FillEvents) -> Iterator[PartBlock]:
    for part, block in work:
        record = part.done.get(block.offset)
        if record is not None and record.nbytes == block.nbytes:
            events.advanced(block.nbytes)
        else:
            yield part, block


def _run_all(filler: _Filler, work: Iterator[PartBlock], n_threads: int) -> None:
    """Let ``n_threads`` pull blocks from one iterator until it ends, one fails, or Ctrl-C."""
    lock = threading.Lock()

    def pull(slot: int) -> None:
        try:
            while not filler.stopped.is_set():
                with lock:
                    pair = next(work, None)
                if pair is None:
                    return
                filler.fill(*pair, slot)
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

    def fill(self, part: ShardPart, block: Block, slot: int) -> None:
        """Write one block and hand it to the journal; leave it unfinished once `stopped` is set."""
        self._events.started(slot, str(block))
        digest = hashlib.sha256()
        row_nbytes = block.tensor.row_nbytes
        n_tile = self._tile_rows(block)
        for begin in range(block.begin, block.end, n_tile):
            if self.stopped.is_set():
                return
            out = self._packed(min(n_tile, block.end - begin), row_nbytes)
            self._make(block, begin, out)
            content = out.reshape(-1).data
            part.write(content, block.offset + (begin - block.begin) * row_nbytes)
            digest.update(content)
            self._events.advanced(content.nbytes)
        for matrix in block.matrices:
            self._source.check_unchanged(matrix)
            if self._forgets:
                self._source.forget(matrix, block.begin, block.end - block.begin)
        part.commit(BlockRecord(block.offset, block.nbytes, digest.hexdigest()))

    def _tile_rows(self, block: Block) -> int:
        matrix = block.matrices[0]
        weights = TILE_WEIGHTS.get(block.tensor.transform, BYTE_TILE_WEIGHTS)
        n_rows = max(1, weights // matrix.n_cols)
        whole = _whole_scale_blocks(n_rows, matrix.block[0])
        return whole if whole * matrix.n_cols <= MAX_TILE_WEIGHTS else n_rows

    def _make(self, block: Block, begin: int, out: NDArray[np.uint8]) -> None:
        try:
            self._transform(block, begin, out)
        except QuantmillError as error:
            error.add_note(f"while making {block.tensor.name} as {block.tensor.type.name}")
            raise

    def _transform(self, block: Block, begin: int, out: NDArray[np.uint8]) -> None:
        matrix = block.matrices[0]
        match block.tensor.transform:
            case Transform.COPY:
                self._source.copy_rows(matrix, begin, out)
            case Transform.REPACK:
                self._source.repack_rows(matrix, begin, out)
            case Transform.NARROW:
                limit = block.tensor.target.id_limit
                assert limit is not None
                self._source.narrow_rows(matrix, begin, out, limit=limit)
            case Transform.ENCODE:
                rows = self._floats(0, len(out), matrix.n_cols)
                bound = self._source.decode_rows(matrix, begin, rows)
                self._quantize(block, rows, bound, out)
            case Transform.PRODUCT:
                rows, bound = self._product(block, begin, len(out))
                self._quantize(block, rows, bound, out)

    def _product(self, block: Block, begin: int, n_rows: int) -> tuple[NDArray[np.float32], float]:
        rows = self._floats(0, n_rows, block.matrices[0].n_cols)
        factor = self._floats(1, n_rows, block.matrices[0].n_cols)
        bound = self._source.decode_rows(block.matrices[0], begin, rows)
        for matrix in block.matrices[1:]:
            bound *= self._source.decode_rows(matrix, begin, factor)
            np.multiply(rows, factor, out=rows)
        return rows, bound

    def _quantize(
        self, block: Block, rows: NDArray[np.float32], bound: float, out: NDArray[np.uint8]
    ) -> None:
        ggml_type = block.tensor.type
        assert self._quantizer is not None
        check_rows(ggml_type, rows, importance=None, bound=bound, tensor=block.tensor.name)
        self._quantizer.quantize(ggml_type, rows, out, None)

    def _floats(self, slot: int, n_rows: int, n_cols: int) -> NDArray[np.float32]:
        buffer = self._worker.floats.get(slot)
        if buffer is None or buffer.size < n_rows * n_cols:
            buffer = self._worker.floats[slot] = np.empty(n_rows * n_cols, np.float32)
        return buffer[: n_rows * n_cols].reshape(n_rows, n_cols)

    def _packed(self, n_rows: int, row_nbytes: int) -> NDArray[np.uint8]:
        if self._worker.packed.size < n_rows * row_nbytes:
            self._worker.packed = np.empty(n_rows * row_nbytes, np.uint8)
        return self._worker.packed[: n_rows * row_nbytes].reshape(n_rows, row_nbytes)
