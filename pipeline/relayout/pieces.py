"""The engram tensors of a finished file, as the other layout holds them.

    fork                                 mainline
    blk.N.engram_embd, one per layer     per_layer_token_embd, all layers' rows in layer order
    blk.N.engram_wkv                     blk.N.engram_kv
    blk.N.engram_q, blk.N.engram_k       blk.N.engram_gate = q * k in F32

Pieces say where their bytes are, or how they are made; nothing is read here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import FormatError
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor
from pipeline.model.layout import Layout
from pipeline.model.metadata.file_facts import HashFacts
from pipeline.quant.types import TYPES, GgmlType

TABLE = "per_layer_token_embd.weight"
ENGRAM = re.compile(rf"blk\.\d+\.engram_\w+\.weight|{re.escape(TABLE)}")
"""Names of the tensors that differ between the layouts."""

_FORK_TABLES = re.compile(r"blk\.\d+\.engram_embd\.weight")
_FORK_SMALL = re.compile(r"blk\.\d+\.engram_(wkv|q|k)\.weight")
_MAINLINE_SMALL = re.compile(r"blk\.\d+\.engram_(kv|gate)\.weight")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of an input file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Product:
    """The elementwise product of stored tensors of the same shape, in F32."""

    factors: tuple[tuple[GgmlType, ByteRange], ...]


@dataclass(frozen=True, slots=True)
class Ones:
    """F32 ones: the factor that changes nothing."""


Content = tuple[ByteRange, ...] | Product | Ones
"""Input bytes one after the other, or bytes to be made."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of the output."""

    name: str
    ne: tuple[int, ...]
    type: GgmlType
    content: Content

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.type.row_nbytes(self.ne[0]) * math.prod(self.ne[1:])

    @property
    def layer(self) -> int:
        """Layer number; globals come before layer 0."""
        block = re.match(r"blk\.(\d+)\.", self.name)
        return int(block[1]) if block else -1


def engram_pieces(
    model: GgufModel, facts: HashFacts, want: Layout
) -> tuple[tuple[int, Piece], ...]:
    """The engram tensors of layout ``want``, each with the number of the shard it goes to.

    Every shard keeps at least one tensor, so numbers and names of the files stay.

    Raises:
        FormatError: A tensor is missing, or does not fit ``facts`` or the other layers'.
    """
    make = _mainline_pieces if want is Layout.MAINLINE else _fork_pieces
    return tuple(make(_Input(model), facts))


class _Input:
    """The tensors of the input by name, and what else lies in their shards."""

    def __init__(self, model: GgufModel) -> None:
        self._model = model
        self._tensors = model.tensors

    def get(self, name: str) -> tuple[int, GgufTensor]:
        """Shard number and tensor."""
        if name not in self._tensors:
            raise FormatError(
                "an engram layer that the keys name lacks a tensor",
                file=self._model.files[0].path,
                tensor=name,
            )
        return self._tensors[name]

    def range(self, name: str, begin: int = 0, nbytes: int | None = None) -> ByteRange:
        """``nbytes`` of a tensor from its byte ``begin``, all of it when not given."""
        no, tensor = self.get(name)
        path = self._model.files[no].path
        return ByteRange(path, tensor.offset + begin, tensor.nbytes if nbytes is None else nbytes)

    def renamed(self, name: str, new: str) -> tuple[int, Piece]:
        """A tensor as it is under another name, and its shard."""
        no, tensor = self.get(name)
        return no, Piece(new, tensor.ne, tensor.type, (self.range(name),))

    def only_holds(self, no: int, rule: re.Pattern[str]) -> bool:
        """Whether shard ``no`` holds nothing but tensors with names by ``rule``; never shard 0."""
        return no > 0 and all(rule.fullmatch(name) for name in self._model.files[no].tensors)


def _mainline_pieces(model: _Input, facts: HashFacts) -> Iterator[tuple[int, Piece]]:
    """The engram of the mainline layout, each piece with the number of its shard.

    The joined table takes the first table's place. A shard that only held another layer's table is
    free then and takes the small tensors, so that the number of files stays.
    """
    names = [f"blk.{layer}.engram_embd.weight" for layer in facts.layers]
    home = model.get(names[0])[0]
    yield home, _joined_table(model, names, facts)
    free = {
        layer: model.get(name)[0]
        for layer, name in zip(facts.layers, names, strict=True)
        if model.get(name)[0] != home and model.only_holds(model.get(name)[0], _FORK_TABLES)
    }
    for layer in facts.layers:
        projection = model.renamed(
            f"blk.{layer}.engram_wkv.weight", f"blk.{layer}.engram_kv.weight"
        )
        for own, piece in (projection, _gate(model, layer)):
            # A shard of small engram tensors must not be emptied by filling another one.
            other = own if model.only_holds(own, _FORK_SMALL) else min(free.values(), default=own)
            yield free.get(layer, other), piece


def _joined_table(model: _Input, names: Sequence[str], facts: HashFacts) -> Piece:
    tables = [model.get(name)[1] for name in names]
    types = {table.type.name for table in tables}
    if len(types) > 1:
        raise FormatError(
            "the engram tables have different types and cannot become one table",
            tensor=" and ".join(names),
            expected="one type",
            found=" and ".join(sorted(types)),
            next_step="Make the model again in this layout from the checkpoint.",
        )
    ranges = []
    for table, n_rows in zip(tables, facts.n_rows, strict=True):
        _check_table(table, facts.width, n_rows)
        # Rows beyond the buckets are never read, and would move the next layer's rows.
        ranges.append(model.range(table.name, 0, n_rows * table.type.row_nbytes(facts.width)))
    return Piece(TABLE, (facts.width, sum(facts.n_rows)), tables[0].type, tuple(ranges))


def _gate(model: _Input, layer: int) -> tuple[int, Piece]:
    """Exact where both factors came from BF16: 8 + 8 bits of mantissa fit in 24."""
    names = [f"blk.{layer}.engram_{factor}.weight" for factor in "qk"]
    (own, q), (_, k) = map(model.get, names)
    if q.ne != k.ne:
        raise FormatError(
            "the engram's q and k have different shapes",
            tensor=names[0],
            expected=k.ne,
            found=q.ne,
        )
    product = Product(((q.type, model.range(q.name)), (k.type, model.range(k.name))))
    return own, Piece(f"blk.{layer}.engram_gate.weight", q.ne, TYPES["F32"], product)


def _fork_pieces(model: _Input, facts: HashFacts) -> Iterator[tuple[int, Piece]]:
    """The engram of the fork layout; the places are those that `_mainline_pieces` leaves."""
    home, table = model.get(TABLE)
    _check_table(table, facts.width, sum(facts.n_rows))
    row_nbytes = table.type.row_nbytes(facts.width)
    taken = _small_shards(model, facts.layers[1:])
    begin = 0
    for layer, n_rows in zip(facts.layers, facts.n_rows, strict=True):
        name, nbytes = f"blk.{layer}.engram_embd.weight", n_rows * row_nbytes
        rows = (model.range(TABLE, begin, nbytes),)
        yield taken.get(layer, home), Piece(name, (facts.width, n_rows), table.type, rows)
        begin += nbytes
        for own, piece in _fork_small(model, layer):
            yield 0 if own in taken.values() else own, piece


def _small_shards(model: _Input, layers: Sequence[int]) -> Mapping[int, int]:
    """Shards that hold small engram tensors only, by layer: each can take that layer's table."""
    homes = {layer: model.get(f"blk.{layer}.engram_kv.weight")[0] for layer in layers}
    return {layer: no for layer, no in homes.items() if model.only_holds(no, _MAINLINE_SMALL)}


def _fork_small(model: _Input, layer: int) -> Iterator[tuple[int, Piece]]:
    yield model.renamed(f"blk.{layer}.engram_kv.weight", f"blk.{layer}.engram_wkv.weight")
    own, q = model.renamed(f"blk.{layer}.engram_gate.weight", f"blk.{layer}.engram_q.weight")
    yield own, q
    # Only the product of q and k is ever used.
    yield own, Piece(f"blk.{layer}.engram_k.weight", q.ne, TYPES["F32"], Ones())


def _check_table(table: GgufTensor, width: int, n_rows: int) -> None:
    if len(table.ne) != 2 or table.ne[0] != width or table.ne[1] < n_rows:
        raise FormatError(
            "the engram table does not fit its buckets",
            tensor=table.name,
            expected=f"({width}, {n_rows:,})",
            found=table.ne,
        )
