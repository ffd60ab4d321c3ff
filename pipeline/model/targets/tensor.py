"""The target file's tensors: GGUF name, shape, and the stored matrices each is made of.

One table maps checkpoint names to GGUF names. Which layers have which tensors is not repeated
here: a row applies wherever the checkpoint has its source. Names, shapes and the F32 constraints
are those the `deepseek41` loaders ask for (llama.cpp pull request 30817 for the mainline layout,
ik_llama.cpp pull request 2455 for the fork layout).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from pipeline.errors import ConfigError
from pipeline.model.config import ModelConfig
from pipeline.model.expected.tensors import expected_tensors
from pipeline.model.layout import Layout
from pipeline.model.roles import ReadMode, Role, SubRole, read_mode_of, role_of, sub_role_of
from pipeline.source.spec import Codec, MatrixRef, TensorSpec

FP4_GROUP = 32
"""Weights of one FP4 row that share a scale."""


class Combine(StrEnum):
    """How several stored matrices become one tensor."""

    ROWS = "rows"
    """One after another: a stack of experts, or two tables in one."""
    PRODUCT = "product"
    """Elementwise product in float32: mainline's engram gate is q times k."""


@dataclass(frozen=True, slots=True)
class TargetTensor:
    """One tensor of the target file, before it is given a type.

    ``shape`` is in numpy order. ``f32_only``: loaders or their graphs accept nothing else.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    f32_only: bool
    matrices: tuple[MatrixRef, ...]
    combine: Combine = Combine.ROWS

    @property
    def role(self) -> Role:
        """Recipe role."""
        return role_of(self.name)

    @property
    def sub_role(self) -> SubRole:
        """Recipe sub-role."""
        return sub_role_of(self.name)

    @property
    def read_mode(self) -> ReadMode:
        """How one token reads it."""
        return read_mode_of(self.name)

    @property
    def n_params(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def n_cols(self) -> int:
        """Weights per row."""
        return self.shape[-1]

    @property
    def n_rows(self) -> int:
        """Number of rows, over all experts of a stack."""
        return self.n_params // self.n_cols

    @property
    def is_table(self) -> bool:
        """Whether this is an engram table, which lies alone in its shard."""
        return self.sub_role is SubRole.ENGRAM_TABLE

    @property
    def source_names(self) -> tuple[str, ...]:
        """Every stored tensor it is made of."""
        return tuple(name for matrix in self.matrices for name in matrix.source_names)


@dataclass(frozen=True, slots=True)
class _Row:
    """GGUF name and source name of one tensor of a layer (``{e}``: one matrix per expert)."""

    target: str
    source: str
    f32_only: bool = False


_GLOBAL_ROWS = (
    _Row("token_embd.weight", "embed.weight"),
    _Row("output.weight", "head.weight"),
    _Row("output_norm.weight", "norm.weight", f32_only=True),
)

_LAYER_ROWS = (
    _Row("attn_norm.weight", "attn_norm.weight", f32_only=True),
    _Row("attn_q_a.weight", "attn.wq_a.weight"),
    _Row("attn_q_a_norm.weight", "attn.q_norm.weight", f32_only=True),
    _Row("attn_q_b.weight", "attn.wq_b.weight"),
    _Row("attn_kv.weight", "attn.wkv.weight"),
    _Row("attn_kv_a_norm.weight", "attn.kv_norm.weight", f32_only=True),
    _Row("attn_sinks.weight", "attn.attn_sink", f32_only=True),
    _Row("attn_output_a.weight", "attn.wo_a.weight"),
    _Row("attn_output_b.weight", "attn.wo_b.weight"),
    _Row("attn_compressor_kv.weight", "attn.compressor.wkv.weight"),
    _Row("attn_compressor_gate.weight", "attn.compressor.wgate.weight"),
    _Row("attn_compressor_norm.weight", "attn.compressor.norm.weight", f32_only=True),
    _Row("indexer.attn_k.weight", "attn.indexer.wk.weight"),
    _Row("indexer.k_norm.weight", "attn.indexer.k_norm.weight", f32_only=True),
    _Row("indexer.attn_q_b.weight", "attn.indexer.wq_b.weight"),
    _Row("indexer.proj.weight", "attn.indexer.weights_proj.weight"),
    _Row("hc_attn_fn.weight", "hc_attn_fn"),
    _Row("hc_attn_base.weight", "hc_attn_base", f32_only=True),
    _Row("hc_attn_scale.weight", "hc_attn_scale", f32_only=True),
    _Row("hc_ffn_fn.weight", "hc_ffn_fn"),
    _Row("hc_ffn_base.weight", "hc_ffn_base", f32_only=True),
    _Row("hc_ffn_scale.weight", "hc_ffn_scale", f32_only=True),
    _Row("ffn_norm.weight", "ffn_norm.weight", f32_only=True),
    _Row("ffn_gate_inp.weight", "ffn.gate.weight"),
    _Row("exp_probs_b.bias", "ffn.gate.bias", f32_only=True),
    _Row("exp_probs_b_vl.bias", "ffn.gate.bias_vl", f32_only=True),
    _Row("ffn_gate_shexp.weight", "ffn.shared_experts.w1.weight"),
    _Row("ffn_up_shexp.weight", "ffn.shared_experts.w3.weight"),
    _Row("ffn_down_shexp.weight", "ffn.shared_experts.w2.weight"),
    _Row("ffn_gate_exps.weight", "ffn.experts.{e}.w1.weight"),
    _Row("ffn_up_exps.weight", "ffn.experts.{e}.w3.weight"),
    _Row("ffn_down_exps.weight", "ffn.experts.{e}.w2.weight"),
)

_FORK_ENGRAM_ROWS = (
    _Row("engram_embd.weight", "engram.embed.weight"),
    _Row("engram_wkv.weight", "engram.wkv.weight"),
    _Row("engram_q.weight", "engram.q_weight"),
    _Row("engram_k.weight", "engram.k_weight"),
)

_MAINLINE_ENGRAM_ROWS = (_Row("engram_kv.weight", "engram.wkv.weight"),)

MAINLINE_TABLE = "per_layer_token_embd.weight"
"""Mainline keeps the rows of every engram layer in one tensor, in layer order."""

MAINLINE_GATE = "blk.{n}.engram_gate.weight"
"""Mainline keeps the product of the engram's q and k vectors, in F32."""


@lru_cache(maxsize=4)
def target_tensors(config: ModelConfig, layout: Layout) -> tuple[TargetTensor, ...]:
    """Every tensor of the target file in model order: globals, then layer by layer.

    Raises:
        ConfigError: The model is one whose target file is not described here.
    """
    if config.family != "v4.1" or config.engram is None:
        raise ConfigError(
            "this version writes target files of DeepSeek-V4.1-Flash only",
            expected="v4.1 with engram layers",
            found=config.family,
        )
    specs = {spec.name: spec for spec in expected_tensors(config)}
    return tuple(_all_tensors(config, layout, specs))


def _all_tensors(
    config: ModelConfig, layout: Layout, specs: Mapping[str, TensorSpec]
) -> Iterator[TargetTensor]:
    assert config.engram is not None
    is_fork = layout is Layout.FORK
    for row in _GLOBAL_ROWS:
        yield _tensor(config, specs, row, None)
    if not is_fork:
        yield _joined_table(config, specs)
    engram_rows = _FORK_ENGRAM_ROWS if is_fork else _MAINLINE_ENGRAM_ROWS
    for layer in range(config.n_layers):
        for row in (*_LAYER_ROWS, *engram_rows):
            if _source_name(row, layer, expert=0) in specs:
                yield _tensor(config, specs, row, layer)
        if layer in config.engram.layers and not is_fork:
            yield _gate(config, specs, layer)


def _source_name(row: _Row, layer: int | None, *, expert: int) -> str:
    prefix = "" if layer is None else f"layers.{layer}."
    return prefix + row.source.format(e=expert)


def _tensor(
    config: ModelConfig, specs: Mapping[str, TensorSpec], row: _Row, layer: int | None
) -> TargetTensor:
    is_stack = "{e}" in row.source
    names = [_source_name(row, layer, expert=e) for e in range(config.n_experts if is_stack else 1)]
    matrices = tuple(matrix_ref(specs[name], config) for name in names)
    one = matrices[0]
    stored = specs[names[0]].shape
    shape = (one.n_rows, one.n_cols) if len(stored) > 1 else (one.n_cols,)
    return TargetTensor(
        name=row.target if layer is None else f"blk.{layer}.{row.target}",
        layer=layer,
        shape=(len(matrices), *shape) if is_stack else shape,
        f32_only=row.f32_only,
        matrices=matrices,
    )


def _joined_table(config: ModelConfig, specs: Mapping[str, TensorSpec]) -> TargetTensor:
    assert config.engram is not None
    matrices = tuple(
        matrix_ref(specs[f"layers.{layer}.engram.embed.weight"], config)
        for layer in config.engram.layers
    )
    n_rows = sum(matrix.n_rows for matrix in matrices)
    return TargetTensor(
        MAINLINE_TABLE, None, (n_rows, config.engram.head_dim), f32_only=False, matrices=matrices
    )


def _gate(config: ModelConfig, specs: Mapping[str, TensorSpec], layer: int) -> TargetTensor:
    factors = [specs[f"layers.{layer}.engram.{factor}_weight"] for factor in "qk"]
    return TargetTensor(
        MAINLINE_GATE.format(n=layer),
        layer,
        factors[0].shape,
        f32_only=True,
        matrices=tuple(matrix_ref(spec, config) for spec in factors),
        combine=Combine.PRODUCT,
    )


_CODECS = {
    "F32": Codec.F32,
    "BF16": Codec.BF16,
    "F8_E4M3": Codec.FP8,
    "I8": Codec.FP4,
    "I64": Codec.I64,
}


def matrix_ref(spec: TensorSpec, config: ModelConfig) -> MatrixRef:
    """How the matrix whose values are stored as ``spec`` is read.

    FP8 weights share a scale per ``weight_block_size`` rectangle, engram table rows and FP4 rows
    per 32 columns (DeepSeek-V4.1 ``inference/model.py`` and ``engram.py``).
    """
    codec = _CODECS[spec.dtype]
    n_cols = spec.shape[-1] * (2 if codec is Codec.FP4 else 1)
    n_rows = math.prod(spec.shape[:-1])
    blocks = {
        Codec.FP8: (1, FP4_GROUP) if ".engram.embed." in spec.name else config.scale_block,
        Codec.FP4: (1, FP4_GROUP),
    }
    block = blocks.get(codec, (1, 1))
    scale = spec.name.removesuffix(".weight") + ".scale" if codec in blocks else None
    return MatrixRef(codec, spec.name, scale, n_rows, n_cols, block)


def carried_names(targets: Sequence[TargetTensor]) -> frozenset[str]:
    """Names of the stored tensors that a target file carries."""
    return frozenset(name for target in targets for name in target.source_names)
