"""The engram part of a `deepseek41` header, in either layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ConfigError
from pipeline.gguf.keys import KeyValue, ValueType, array, flag, i32, u32
from pipeline.model.config import CandidateConfig, EngramConfig, ModelConfig
from pipeline.model.engram.arithmetic import (
    bucket_sizes,
    layer_offsets,
    multipliers,
    row_counts,
    running_offsets,
)
from pipeline.model.layout import Layout

_PREFIX = "deepseek41."


def engram_keys(
    config: ModelConfig, token_map: NDArray[np.int32], layout: Layout
) -> tuple[KeyValue, ...]:
    """Source layers, candidate selection and hash constants, as the layout names them.

    Raises:
        ConfigError: The model has no engram tables or no candidate selection, or the token map is
            not that of this model.
    """
    if config.engram is None or config.candidate is None:
        raise ConfigError(
            "a deepseek41 file needs the engram_* and candidate_* keys of config.json"
        )
    _check_map(config, config.engram, token_map)
    sources = _source_keys(config, config.candidate)
    if layout is Layout.MAINLINE:
        return (*sources, *_mainline_keys(config.engram, token_map))
    return (
        *sources,
        *_nine_keys(config.engram, token_map),
        *_other_source_names(config, config.candidate),
        *_other_engram_names(config.engram),
    )


def _check_map(config: ModelConfig, engram: EngramConfig, token_map: NDArray[np.int32]) -> None:
    n_compressed = int(token_map.max(initial=-1)) + 1
    if (len(token_map), n_compressed) != (config.vocab_size, engram.n_compressed):
        raise ConfigError(
            "the engram token map is not that of this model",
            expected=f"{config.vocab_size:,} ids to {engram.n_compressed:,} compressed ids "
            "(vocab_size, engram_compressed_vocab_size)",
            found=f"{len(token_map):,} ids to {n_compressed:,}",
            next_step="tokenizer.json and config.json must come from the same model.",
        )


def _source_keys(config: ModelConfig, candidate: CandidateConfig) -> tuple[KeyValue, ...]:
    attention = f"{_PREFIX}attention"
    return (
        _layers(f"{attention}.kv_source_layers", config.kv_sources),
        _layers(f"{attention}.indexer.source_layers", config.index_sources),
        # Signed, because the loader takes -1 for "none".
        i32(f"{attention}.indexer.candidate_source_layer", candidate.source_layer),
        u32(f"{attention}.indexer.candidate_block_size", candidate.block_size),
        u32(f"{attention}.indexer.candidate_top_k_blocks", candidate.top_k),
    )


def _other_source_names(config: ModelConfig, candidate: CandidateConfig) -> tuple[KeyValue, ...]:
    """The same facts under the names that smalinin, WyvernTKC and kmbandy's branches read."""
    attention = f"{_PREFIX}attention"
    return (
        u32(f"{attention}.candidate_source_layer_id", candidate.source_layer),
        u32(f"{attention}.candidate_block_size", candidate.block_size),
        u32(f"{attention}.candidate_topk_blocks", candidate.top_k),
        u32(f"{attention}.candidate.source_layer", candidate.source_layer),
        u32(f"{attention}.candidate.topk_blocks", candidate.top_k),
        u32(f"{attention}.candidate.block_size", candidate.block_size),
        _layers(f"{attention}.kv_source_layer_ids", config.kv_sources),
        _layers(f"{attention}.index_source_layer_ids", config.index_sources),
        flag(f"{_PREFIX}hyper_connection.single_pass", True),
    )


def _mainline_keys(engram: EngramConfig, token_map: NDArray[np.int32]) -> tuple[KeyValue, ...]:
    sizes = bucket_sizes(engram)
    return (
        u32(f"{_PREFIX}embedding_length_per_layer_input", engram.head_dim),
        _layers(f"{_PREFIX}ple.layers", engram.layers),
        u32(f"{_PREFIX}ple.ngram_size", engram.max_ngram),
        u32(f"{_PREFIX}ple.heads_per_ngram", engram.n_heads),
        _u64s(f"{_PREFIX}ple.layer_multipliers", multipliers(engram)),
        _u64s(f"{_PREFIX}ple.head_vocab_sizes", sizes),
        _u64s(f"{_PREFIX}ple.head_offsets", running_offsets(sizes)),
        _map(token_map),
        # The raw id: this loader maps it itself.
        u32(f"{_PREFIX}engram.pad_token_id", engram.pad_token),
    )


def _nine_keys(engram: EngramConfig, token_map: NDArray[np.int32]) -> tuple[KeyValue, ...]:
    sizes = bucket_sizes(engram)
    return (
        _layers(f"{_PREFIX}engram.layer_ids", engram.layers),
        u32(f"{_PREFIX}engram.head_count", engram.n_heads),
        u32(f"{_PREFIX}engram.key_length", engram.head_dim),
        u32(f"{_PREFIX}engram.max_ngram_size", engram.max_ngram),
        _u64s(f"{_PREFIX}engram.multipliers", multipliers(engram)),
        _u64s(f"{_PREFIX}engram.primes", sizes),
        _u64s(f"{_PREFIX}engram.offsets", layer_offsets(sizes)),
        _map(token_map),
        # The compressed id: these loaders compare it with mapped tokens.
        u32(f"{_PREFIX}engram.pad_id", int(token_map[engram.pad_token])),
    )


def _other_engram_names(engram: EngramConfig) -> tuple[KeyValue, ...]:
    """The same facts under the names that HelloKS and kmbandy's branches read."""
    sizes = bucket_sizes(engram)
    return (
        _layers(f"{_PREFIX}engram.layers", engram.layers),
        u32(f"{_PREFIX}engram.head_dim", engram.head_dim),
        u32(f"{_PREFIX}engram.pad_token_id", engram.pad_token),
        u32(f"{_PREFIX}engram.compressed_vocab_size", engram.n_compressed),
        u32(f"{_PREFIX}engram.vocab_size", engram.vocab_size),
        array(f"{_PREFIX}engram.table_rows", ValueType.UINT32, row_counts(engram)),
        _u64s(f"{_PREFIX}engram.hash_multipliers", multipliers(engram)),
        _u64s(f"{_PREFIX}engram.head_offsets", layer_offsets(sizes)),
        _u64s(f"{_PREFIX}engram.head_bucket_sizes", sizes),
    )


def _layers(key: str, layers: Sequence[int]) -> KeyValue:
    return array(key, ValueType.INT32, layers)


def _u64s(key: str, per_layer: Sequence[Sequence[int]]) -> KeyValue:
    """All layers' numbers, one layer after the other."""
    return array(key, ValueType.UINT64, [number for layer in per_layer for number in layer])


def _map(token_map: NDArray[np.int32]) -> KeyValue:
    return array(f"{_PREFIX}engram.token_map", ValueType.INT32, token_map.tolist())
