"""The tensors of a target file: the trunk of V4.1 in either layout, or of V4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from pipeline.errors import ConfigError
from pipeline.model.config import ModelConfig
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.form import V4_TARGET, V41_FORK, V41_MAINLINE, Form
from pipeline.model.layout import Layout
from pipeline.model.targets.rows import (
    BLOCK_ROWS,
    F32,
    ROUTED_ENTRIES,
    STREAM_HEAD_ROWS,
    Row,
    is_stored,
    tensor_of,
)
from pipeline.model.targets.tensor import Combine, TargetTensor, matrix_ref
from pipeline.source.spec import TensorSpec

_GLOBAL_ROWS = (
    Row("token_embd.weight", "embed.weight"),
    Row("output.weight", "head.weight"),
    Row("output_norm.weight", "norm.weight", F32),
    *STREAM_HEAD_ROWS,
)

_ENGRAM_ROWS: Mapping[Layout | None, tuple[Row, ...]] = {
    Layout.FORK: (
        Row("engram_embd.weight", "engram.embed.weight"),
        Row("engram_wkv.weight", "engram.wkv.weight"),
        Row("engram_q.weight", "engram.q_weight"),
        Row("engram_k.weight", "engram.k_weight"),
    ),
    Layout.MAINLINE: (Row("engram_kv.weight", "engram.wkv.weight"),),
    None: (),
}

MAINLINE_TABLE = "per_layer_token_embd.weight"
"""Mainline keeps the rows of every engram layer in one tensor, in layer order."""

MAINLINE_GATE = "blk.{n}.engram_gate.weight"
"""Mainline keeps the product of the engram's q and k vectors, in F32."""

_OF_EXPERTS = frozenset(
    row.target for row in BLOCK_ROWS if "{e}" in row.source or row.source in ROUTED_ENTRIES
)


def has_entry_per_expert(target: TargetTensor) -> bool:
    """Whether ``target`` is cut when experts are: a stack, the router or a bias of it."""
    return not target.is_draft and target.name.split(".", 2)[-1] in _OF_EXPERTS


def target_form(config: ModelConfig, layout: Layout) -> Form:
    """The form of ``config``'s target file; ``layout`` is a choice for V4.1 only.

    Raises:
        ConfigError: The model has no file in this layout.
    """
    if config.family == "v4.1" and config.engram is not None:
        return V41_FORK if layout is Layout.FORK else V41_MAINLINE
    if config.family == "v4" and layout is Layout.MAINLINE:
        return V4_TARGET
    if config.family == "v4":
        raise ConfigError(
            "a V4 file has one layout, that of llama.cpp",
            expected=Layout.MAINLINE,
            found=layout,
            next_step="Say --layout mainline, or leave the layout out.",
        )
    raise ConfigError("a V4.1 model without engram layers has no target file that loads")


Keep = tuple[tuple[int, ...], ...]
"""For every layer the experts that stay, ascending: the new number of each is its place."""


@lru_cache(maxsize=4)
def target_tensors(
    config: ModelConfig, layout: Layout, keep: Keep | None = None
) -> tuple[TargetTensor, ...]:
    """Every tensor of the target file in model order: globals, then layer by layer.

    With ``keep`` the expert stacks, the router and its biases hold the kept experts alone; nothing
    else changes.

    Raises:
        ConfigError: The model has no file in this layout.
    """
    form = target_form(config, layout)
    specs = {spec.name: spec for spec in expected_tensors(config)}
    return tuple(_all_tensors(config, form.layout, specs, keep))


def cut_model(config: ModelConfig, keep: Keep | None) -> ModelConfig:
    """``config`` as the model of the kept experts, who have every layer's router choose."""
    if keep is None:
        return config
    assert not config.n_hash_layers
    return replace(config, n_experts=len(keep[0]))


def _all_tensors(
    config: ModelConfig, layout: Layout | None, specs: Mapping[str, TensorSpec], keep: Keep | None
) -> Iterator[TargetTensor]:
    engram_layers = config.engram.layers if config.engram else ()
    for row in _GLOBAL_ROWS:
        if is_stored(row, specs):
            yield tensor_of(row, specs, config)
    if layout is Layout.MAINLINE:
        yield _joined_table(config, specs)
    for layer in range(config.n_layers):
        prefix = f"layers.{layer}."
        for row in (*BLOCK_ROWS, *_ENGRAM_ROWS[layout]):
            if is_stored(row, specs, prefix):
                kept = keep[layer] if keep else None
                yield tensor_of(row, specs, config, prefix=prefix, layer=layer, keep=kept)
        if layer in engram_layers and layout is Layout.MAINLINE:
            yield _gate(config, specs, layer)


def _joined_table(config: ModelConfig, specs: Mapping[str, TensorSpec]) -> TargetTensor:
    assert config.engram is not None
    matrices = tuple(
        matrix_ref(specs[f"layers.{layer}.engram.embed.weight"], config)
        for layer in config.engram.layers
    )
    n_rows = sum(matrix.n_rows for matrix in matrices)
    return TargetTensor(
        MAINLINE_TABLE, None, (n_rows, config.engram.head_dim), only_type=None, matrices=matrices
    )


def _gate(config: ModelConfig, specs: Mapping[str, TensorSpec], layer: int) -> TargetTensor:
    factors = [specs[f"layers.{layer}.engram.{factor}_weight"] for factor in "qk"]
    return TargetTensor(
        MAINLINE_GATE.format(n=layer),
        layer,
        factors[0].shape,
        only_type=F32,
        matrices=tuple(matrix_ref(spec, config) for spec in factors),
        combine=Combine.PRODUCT,
    )
