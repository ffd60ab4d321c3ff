"""The tensors of DeepSeek-V4-Flash-0731 as tables over its config.

Against V4.1: hash-routed first layers, a compressor with position embeddings in every compressed
layer, an indexer with a compressor of its own at ratio 4, a head that mixes the residual streams;
no engram, no vision. The structure digest proves the list (see `pipeline.model.expected.tensors`).
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.model.config import ModelConfig
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

INDEXED_RATIO = 4
"""The compression ratio whose layers select blocks by an indexer and pool overlapping pairs."""

_MARKOV_NAMES = ("markov_w1", "markov_w2")


def tensors(c: ModelConfig) -> Iterator[TensorSpec]:
    """Every stored tensor: globals, trunk, draft stages."""
    yield from stored("", (*global_rows(c), *_stream_head_rows(c)), c.scale_block)
    for layer, ratio in enumerate(c.layer_ratios):
        rows = (
            *_block_rows(c, c.n_experts, hashed=layer < c.n_hash_layers),
            *_compressed_rows(c, ratio),
        )
        yield from stored(f"layers.{layer}.", rows, c.scale_block)
    for stage in range(c.draft.n_stages):
        yield from stored(f"mtp.{stage}.", _stage_rows(c, stage), c.scale_block)


def _block_rows(c: ModelConfig, n_experts: int, *, hashed: bool) -> tuple[Row, ...]:
    route: Row = (
        ("ffn.gate.tid2eid", Codec.I64, (c.vocab_size, c.n_experts_used))
        if hashed
        else ("ffn.gate.bias", Codec.F32, (n_experts,))
    )
    return (
        *attention_rows(c),
        *hyper_connection_rows(c),
        ("ffn.gate.weight", Codec.BF16, (n_experts, c.hidden)),
        route,
        *expert_rows(c, n_experts),
    )


def _stream_head_rows(c: ModelConfig) -> tuple[Row, ...]:
    return (
        ("hc_head_fn", Codec.F32, (c.hc_mult, c.hc_mult * c.hidden)),
        ("hc_head_base", Codec.F32, (c.hc_mult,)),
        ("hc_head_scale", Codec.F32, (1,)),
    )


def _compressed_rows(c: ModelConfig, ratio: int) -> tuple[Row, ...]:
    if not ratio:
        return ()
    if ratio != INDEXED_RATIO:
        return _compressor_rows(c, "attn.compressor.", c.head_dim, ratio)
    return (
        *_compressor_rows(c, "attn.compressor.", c.head_dim, ratio),
        ("attn.indexer.wq_b", Codec.FP8, (c.index_heads * c.index_dim, c.q_lora)),
        ("attn.indexer.weights_proj.weight", Codec.BF16, (c.index_heads, c.hidden)),
        *_compressor_rows(c, "attn.indexer.compressor.", c.index_dim, ratio),
    )


def _compressor_rows(c: ModelConfig, prefix: str, width: int, ratio: int) -> tuple[Row, ...]:
    pooled = 2 * width if ratio == INDEXED_RATIO else width
    return (
        (f"{prefix}ape", Codec.F32, (ratio, pooled)),
        (f"{prefix}wkv.weight", Codec.BF16, (pooled, c.hidden)),
        (f"{prefix}wgate.weight", Codec.BF16, (pooled, c.hidden)),
        (f"{prefix}norm.weight", Codec.BF16, (width,)),
    )


def _stage_rows(c: ModelConfig, stage: int) -> tuple[Row, ...]:
    first = draft_input_rows(c) if stage == 0 else ()
    last: tuple[Row, ...] = ()
    if stage == c.draft.n_stages - 1:
        last = (*draft_output_rows(c, _MARKOV_NAMES), *_stream_head_rows(c))
    return (*_block_rows(c, c.draft.n_experts, hashed=False), *first, *last)
