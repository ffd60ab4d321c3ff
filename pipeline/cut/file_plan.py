"""The plan of a model whose files exist: what there is, in the words of what is to be made."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

from pipeline.gguf.as_source import header_bytes
from pipeline.gguf.model_file import FILE_KEYS, GgufModel, model_stem
from pipeline.gguf.reader import GgufFile, GgufTensor
from pipeline.model.config import EngramConfig, ModelConfig
from pipeline.model.contract.form import form_of
from pipeline.model.form import Form
from pipeline.model.metadata.file_config import config_of
from pipeline.model.roles import Role
from pipeline.model.targets.tensor import TargetTensor
from pipeline.model.targets.trunk import MAINLINE_TABLE
from pipeline.plan import Plan, PlannedShard, PlannedTensor, Transform
from pipeline.source.spec import Codec, MatrixRef, Picks

_KINDS = {Role.ROUTED: "experts", Role.ENGRAM: "engram"}
"""What `pipeline.plan` calls a shard, but the first, that holds tensors of one role only."""


def plan_of_file(model: GgufModel, draft: GgufModel | None = None) -> Plan:
    """``model`` as the plan that it fulfils, with the same files, names, types and places.

    Every shard exists already, and every tensor is a copy of itself.

    Args:
        model: A target or a draft, made by this project or not.
        draft: The draft beside a target: the description of a model has a part of its own for it.

    Raises:
        FormatError: It is of no form that this project knows, or a key is missing.
        SourceError: A file cannot be read.
    """
    form = form_of(model)
    config = config_of(model, form, None if draft is None else (draft, form_of(draft)))
    return Plan(
        name=model_stem(model.files[0].path),
        form=form,
        config=config,
        key_values=tuple(e for e in model.key_values.values() if e.key not in FILE_KEYS),
        shards=tuple(_shard(no, file, form, config) for no, file in enumerate(model.files)),
        shard_nbytes=max(file.nbytes for file in model.files),
    )


def model_of_plan(plan: Plan) -> GgufModel:
    """The files that a plan of `plan_of_file` is of."""
    files = [shard.existing for shard in plan.shards]
    return GgufModel(tuple(file for file in files if file is not None))


def _shard(no: int, file: GgufFile, form: Form, config: ModelConfig) -> PlannedShard:
    tensors = tuple(
        PlannedTensor(_target(tensor, form, config), tensor.type, Transform.COPY, no, tensor.offset)
        for tensor in file.tensors.values()
    )
    return PlannedShard(
        no=no,
        kind=_kind(no, form, tensors),
        file_name=file.path.name,
        header=header_bytes(file),
        tensors=tensors,
        existing=file,
    )


def _kind(no: int, form: Form, tensors: tuple[PlannedTensor, ...]) -> str:
    if form.is_draft:
        return "draft"
    roles = {tensor.target.role for tensor in tensors}
    return next((kind for role, kind in _KINDS.items() if no > 0 and roles == {role}), "dense")


def _target(tensor: GgufTensor, form: Form, config: ModelConfig) -> TargetTensor:
    block = re.match(r"blk\.(\d+)\.", tensor.name)
    whole = stored(tensor)
    is_joined = tensor.name == MAINLINE_TABLE and config.engram is not None
    return TargetTensor(
        name=tensor.name,
        layer=int(block[1]) if block else None,
        shape=tensor.shape,
        only_type=None,
        matrices=tuple(_tables(whole, config.engram)) if is_joined else (whole,),
        is_draft=form.is_draft,
    )


def stored(tensor: GgufTensor) -> MatrixRef:
    """A stored tensor as rows of its type; a stack counts as one matrix."""
    return MatrixRef(
        codec=Codec.GGML,
        weight=tensor.name,
        scale=None,
        n_rows=math.prod(tensor.shape[:-1]),
        n_cols=tensor.shape[-1],
        ggml_type=tensor.type.name,
    )


def _tables(joined: MatrixRef, engram: EngramConfig | None) -> Iterator[MatrixRef]:
    """The rows of each engram layer's table where all tables are one tensor."""
    assert engram is not None
    first = 0
    for n_rows in engram.n_rows:
        rows = Picks(range(first, first + n_rows), joined.n_rows)
        yield replace(joined, n_rows=n_rows, picks=rows)
        first += n_rows
