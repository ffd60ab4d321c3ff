"""The tensors of DeepSeek-V4.1-Flash as tables over its config.

Names, dtypes and shapes are those of the released shard headers; the structure digest of the
whole list (see `pipeline.model.expected.tensors`) proves it tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.model.config import EngramConfig, ModelConfig, VisionConfig
from pipeline.model.expected.rows import (
    Row,
    attention_rows,
    draft_input_rows,
    draft_output_rows,
    expert_rows,
    global_rows,
    hyper_connection_rows,
    stored,
)
from pipeline.source.spec import Codec, TensorSpec

ENGRAM_GROUP = 32
"""Columns of an engram table row that share a scale; dense matrices share theirs in rectangles."""

DELIMITERS = ("image_start", "image_end", "image_newline")
"""Embeddings of the image delimiters; the released names carry no suffix."""

_MARKOV_NAMES = ("embed", "head")


def tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    """Every stored tensor: globals, trunk, engram, draft stages, vision."""
    yield from stored("", global_rows(c), c.scale_block)
    for layer in range(c.n_layers):
        prefix = f"layers.{layer}."
        yield from stored(prefix, _block_rows(c, c.n_experts), c.scale_block)
        yield from stored(prefix, _source_rows(c, layer), c.scale_block)
    if c.engram:
        yield from _engram(c, c.engram)
    for stage in range(c.draft.n_stages):
        yield from stored(f"mtp.{stage}.", _stage_rows(c, stage), c.scale_block)
    if c.vision:
        yield from stored("", vision_rows(c.vision, c.hidden), c.scale_block)


def _block_rows(c: ModelConfig, n_experts: int) -> tuple[Row, ...]:
    return (
        *attention_rows(c),
        *hyper_connection_rows(c),
        *_router_rows(c, n_experts),
        *expert_rows(c, n_experts),
    )


def _router_rows(c: ModelConfig, n_experts: int) -> tuple[Row, ...]:
    return (
        ("ffn.gate.weight", Codec.BF16, (n_experts, c.hidden)),
        ("ffn.gate.bias", Codec.F32, (n_experts,)),
        ("ffn.gate.bias_vl", Codec.F32, (n_experts,)),
    )


def _source_rows(c: ModelConfig, layer: int) -> tuple[Row, ...]:
    """What a layer owns that the following layers read: compressed keys, index keys, queries."""
    rows: list[Row] = []
    if layer in c.kv_sources:
        rows += _kv_source_rows(c, ratio=c.compress_ratios[layer])
    if layer in c.index_sources:
        rows += (
            ("attn.indexer.weights_proj.weight", Codec.BF16, (c.index_heads, c.hidden)),
            ("attn.indexer.wq_b", Codec.FP8, (c.index_heads * c.index_dim, c.q_lora)),
        )
    return tuple(rows)


def _kv_source_rows(c: ModelConfig, *, ratio: int) -> tuple[Row, ...]:
    rows: tuple[Row, ...] = (
        ("attn.compressor.norm.weight", Codec.BF16, (c.head_dim,)),
        ("attn.compressor.wkv.weight", Codec.BF16, (c.head_dim, c.hidden)),
        ("attn.indexer.k_norm.weight", Codec.BF16, (c.index_dim,)),
        ("attn.indexer.wk.weight", Codec.BF16, (c.index_dim, c.head_dim)),
    )
    # Pooling one position needs no gate, so ratio 1 has none.
    gate: Row = ("attn.compressor.wgate.weight", Codec.BF16, (c.head_dim, c.hidden))
    return (*rows, gate) if ratio > 1 else rows


def _engram(c: ModelConfig, engram: EngramConfig) -> Iterator[TensorSpec]:
    table_width, n_streams = engram.head_dim, c.hc_mult
    dense: tuple[Row, ...] = (
        ("q_weight", Codec.BF16, (n_streams, c.hidden)),
        ("k_weight", Codec.BF16, (n_streams, c.hidden)),
        ("wkv", Codec.FP8, (c.hidden * (n_streams + 1), engram.n_columns * table_width)),
    )
    for layer, n_rows in zip(engram.layers, engram.n_rows, strict=True):
        prefix = f"layers.{layer}.engram."
        table: Row = ("embed", Codec.FP8, (n_rows, table_width))
        yield from stored(prefix, (table,), (1, ENGRAM_GROUP))
        yield from stored(prefix, dense, c.scale_block)


def _stage_rows(c: ModelConfig, stage: int) -> tuple[Row, ...]:
    first = draft_input_rows(c) if stage == 0 else ()
    last = draft_output_rows(c, _MARKOV_NAMES) if stage == c.draft.n_stages - 1 else ()
    return (*_block_rows(c, c.draft.n_experts), *first, *last)


def vision_rows(v: VisionConfig, text_hidden: int) -> tuple[Row, ...]:
    """Image encoder, aligner and delimiters, all BF16; ``text_hidden`` is the trunk's width."""
    aligner_width = v.hidden * v.downsample**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (v.hidden, 3 * v.patch**2),
        "vision.patch_embed.proj.bias": (v.hidden,),
        "vision.norm.weight": (v.hidden,),
        "aligner.w1.weight": (text_hidden, aligner_width),
        "aligner.w1.bias": (text_hidden,),
        "aligner.w2.weight": (text_hidden, text_hidden),
        "aligner.w2.bias": (text_hidden,),
    }
    block_shapes: dict[str, tuple[int, ...]] = {
        "attn.wqkv.weight": (3 * v.hidden, v.hidden),
        "attn.wqkv.bias": (3 * v.hidden,),
        "attn.wo.weight": (v.hidden, v.hidden),
        "attn.wo.bias": (v.hidden,),
        "mlp.w1.weight": (2 * v.ff, v.hidden),
        "mlp.w2.weight": (v.hidden, v.ff),
        "norm1.weight": (v.hidden,),
        "norm2.weight": (v.hidden,),
    }
    for block in range(v.n_layers):
        shapes |= {f"vision.blocks.{block}.{name}": at for name, at in block_shapes.items()}
    shapes |= dict.fromkeys(DELIMITERS, (text_hidden,))
    return tuple((name, Codec.BF16, shape) for name, shape in shapes.items())
