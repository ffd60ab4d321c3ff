"""Row blocks: the unit in which a shard is filled and journaled.

A tensor is cut into row blocks at places that depend on its shape alone, so that one set of source
rows fills the same block of every file that wants it, whatever its type there. A block never
crosses a stored matrix: an expert keeps its own importance and its own place in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.gguf.part import Span
from pipeline.plan import PlannedShard, PlannedTensor, Transform
from pipeline.source.spec import MatrixRef

BLOCK_WEIGHTS = 1 << 24
"""Most weights of a row block, but for what whole scale blocks need: 7 MB of Q3_K, 64 of F32."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``begin`` to ``end`` of a stored matrix, the ``no``-th of ``tensor``'s, and their place.

    A product has several matrices, and is one row range of all of them.
    """

    tensor: PlannedTensor
    matrices: tuple[MatrixRef, ...]
    no: int
    begin: int
    end: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Output bytes."""
        return (self.end - self.begin) * self.tensor.row_nbytes

    def __str__(self) -> str:
        return f"{self.tensor.name} ({self.matrices[0].weight} rows {self.begin}-{self.end})"


def blocks_of(tensor: PlannedTensor) -> Iterator[Block]:
    """The row blocks of a tensor, in file order."""
    target = tensor.target
    if tensor.transform is Transform.PRODUCT:
        groups: tuple[tuple[MatrixRef, ...], ...] = (target.matrices,)
    else:
        groups = tuple((matrix,) for matrix in target.matrices)
    height = target.matrices[0].block[0]
    n_per_block = whole_scale_blocks(max(1, BLOCK_WEIGHTS // target.n_cols), height)
    offset = tensor.offset
    for no, matrices in enumerate(groups):
        n_rows = matrices[0].n_rows
        for begin in range(0, n_rows, n_per_block):
            end = min(begin + n_per_block, n_rows)
            block = Block(tensor, matrices, no, begin, end, offset)
            yield block
            offset += block.nbytes


def whole_scale_blocks(n_rows: int, height: int) -> int:
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
