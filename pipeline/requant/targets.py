"""Tensors to be made, and which rows of a finished file each is made of.

    wanted                                 where the file has the other layout
    per_layer_token_embd                   the rows of every blk.N.engram_embd, in layer order
    blk.N.engram_kv                        blk.N.engram_wkv
    blk.N.engram_gate                      blk.N.engram_q times blk.N.engram_k
    blk.N.engram_embd                      its rows of per_layer_token_embd
    blk.N.engram_wkv                       blk.N.engram_kv
    blk.N.engram_q, blk.N.engram_k         nothing: only their product is stored

All else has one name in both. Every expert of a stack is a matrix of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from pipeline.errors import FormatError, raise_problems
from pipeline.gguf.model_file import GgufModel
from pipeline.gguf.reader import GgufTensor
from pipeline.model.config import ModelConfig
from pipeline.model.roles import ReadMode
from pipeline.model.targets.tensor import Combine, TargetTensor
from pipeline.model.targets.trunk import MAINLINE_TABLE, Keep
from pipeline.source.spec import Codec, MatrixRef, Picks

_OPTIONAL = re.compile(r"blk\.\d+\.exp_probs_b_vl\.bias")
"""The router's bias for image tokens, without which every loader starts."""

_BLOCK_PART = re.compile(r"(blk\.\d+\.)(\w+)\.weight")
_RENAMED: Mapping[str, str] = {"engram_kv": "engram_wkv", "engram_wkv": "engram_kv"}
_FACTORS = ("engram_q", "engram_k")

_PLAIN_CODECS: Mapping[str, Codec] = {"F32": Codec.F32, "BF16": Codec.BF16}
"""What checkpoints store, too, is read as theirs: values that are no numbers are refused."""


def carried_targets(frame: Iterable[TargetTensor], model: GgufModel) -> tuple[TargetTensor, ...]:
    """``frame`` without the optional tensors that ``model`` lacks."""
    names = model.tensors.keys()
    return tuple(t for t in frame if t.name in names or not _OPTIONAL.fullmatch(t.name))


def stored_targets(
    wanted: Sequence[TargetTensor], model: GgufModel, config: ModelConfig, keep: Keep | None
) -> tuple[TargetTensor, ...]:
    """``wanted``, made of what ``model`` holds.

    Args:
        wanted: Tensors of a target or a draft, with their shapes after a cut.
        model: The file.
        config: The model in it, before a cut.
        keep: The experts that stay; nothing where all do, or of a draft.

    Raises:
        FormatError: A tensor is missing or has another shape; several raise `Problems`.
    """
    stored = _Stored(model, config, keep)
    made: list[TargetTensor] = []
    problems: list[FormatError] = []
    for target in wanted:
        try:
            made.append(stored.made(target))
        except FormatError as error:
            problems.append(error)
    raise_problems(f"tensors of {model.files[0].path}", problems)
    return tuple(made)


class _Stored:
    """The tensors of a file by name."""

    def __init__(self, model: GgufModel, config: ModelConfig, keep: Keep | None) -> None:
        self._model = model
        self._tensors = model.tensors
        self._config = config
        self._keep = keep

    def made(self, target: TargetTensor) -> TargetTensor:
        """``target`` of rows of this file."""
        matrices = self._matrices(target)
        is_product = target.combine is Combine.PRODUCT and len(matrices) > 1
        combine = Combine.PRODUCT if is_product else Combine.ROWS
        return replace(target, matrices=matrices, combine=combine)

    def _matrices(self, target: TargetTensor) -> tuple[MatrixRef, ...]:
        if target.read_mode is ReadMode.SPARSE:
            return tuple(self._experts(target))
        if target.matrices[0].picks is not None:
            return (self._entries(target, target.matrices[0].picks),)
        if target.name == MAINLINE_TABLE and target.name in self._tensors:
            return tuple(map(self._rows_of_table, self._table_rows))
        if target.name in self._tensors:
            return (_whole(self._get(target.name, target.shape)),)
        return self._of_other_layout(target)

    def _experts(self, target: TargetTensor) -> Iterator[MatrixRef]:
        keep = None if target.layer is None else self._keep and self._keep[target.layer]
        n_stored = self._config.n_experts if keep else target.shape[0]
        tensor = self._get(target.name, (n_stored, *target.shape[1:]))
        n_rows, n_cols = tensor.shape[1:]
        for expert in keep or range(n_stored):
            yield _ref(tensor, n_rows, n_cols, Picks((expert,), n_stored))

    def _entries(self, target: TargetTensor, picks: Picks) -> MatrixRef:
        tensor = self._get(target.name, (picks.n_stored, *target.shape[1:]))
        return _ref(tensor, target.matrices[0].n_rows, target.matrices[0].n_cols, picks)

    def _of_other_layout(self, target: TargetTensor) -> tuple[MatrixRef, ...]:
        engram, match = self._config.engram, _BLOCK_PART.fullmatch(target.name)
        if target.name == MAINLINE_TABLE and engram is not None:
            shapes = [(n, engram.head_dim) for n in engram.n_rows]
            names = [f"blk.{layer}.engram_embd.weight" for layer in engram.layers]
            return tuple(_whole(self._get(*pair)) for pair in zip(names, shapes, strict=True))
        if match is None or target.is_draft:
            raise self._lacks(target.name)
        block, part = match.groups()
        if part == "engram_embd" and MAINLINE_TABLE in self._tensors and target.layer is not None:
            return (self._rows_of_table(target.layer),)
        if target.combine is Combine.PRODUCT:
            names = [f"{block}{factor}.weight" for factor in _FACTORS]
            return tuple(_whole(self._get(name, target.shape)) for name in names)
        if part in _FACTORS and f"{block}engram_gate.weight" in self._tensors:
            raise self._only_product(target.name)
        if part in _RENAMED:
            return (_whole(self._get(f"{block}{_RENAMED[part]}.weight", target.shape)),)
        raise self._lacks(target.name)

    @property
    def _table_rows(self) -> Mapping[int, range]:
        """The rows of each engram layer where all tables are one."""
        engram = self._config.engram
        assert engram is not None
        ends = list(accumulate(engram.n_rows, initial=0))
        rows = (range(first, end) for first, end in pairwise(ends))
        return dict(zip(engram.layers, rows, strict=True))

    def _rows_of_table(self, layer: int) -> MatrixRef:
        rows = self._table_rows[layer]
        engram = self._config.engram
        assert engram is not None
        table = self._get(MAINLINE_TABLE, (sum(engram.n_rows), engram.head_dim))
        return _ref(table, len(rows), table.shape[1], Picks(rows, table.shape[0]))

    def _get(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        if name not in self._tensors:
            raise self._lacks(name)
        no, tensor = self._tensors[name]
        if tensor.shape != shape:
            raise FormatError(
                "the tensor has another shape than the file's own keys imply",
                file=self._model.files[no].path,
                tensor=name,
                expected=shape[::-1],
                found=tensor.ne,
            )
        return tensor

    def _lacks(self, name: str) -> FormatError:
        return FormatError(
            "the file lacks a tensor",
            file=self._model.files[0].path,
            tensor=name,
            next_step="Take it from another source by a [[graft]] of the recipe.",
        )

    def _only_product(self, name: str) -> FormatError:
        return FormatError(
            "the fork layout has two factors where this file, of the mainline layout, has their "
            "product",
            file=self._model.files[0].path,
            tensor=name,
            next_step="Relayout makes a file of the fork layout of this one, without requantizing; "
            "take that as the source, or both factors from the checkpoint by a [[graft]].",
        )


def _whole(tensor: GgufTensor) -> MatrixRef:
    n_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return _ref(tensor, n_rows, tensor.shape[-1], None)


def _ref(tensor: GgufTensor, n_rows: int, n_cols: int, picks: Picks | None) -> MatrixRef:
    plain = _PLAIN_CODECS.get(tensor.type.name)
    return MatrixRef(
        codec=plain or Codec.GGML,
        weight=tensor.name,
        scale=None,
        n_rows=n_rows,
        n_cols=n_cols,
        picks=picks,
        ggml_type=None if plain else tensor.type.name,
    )
