"""What loaders demand of a header: every key they need, with its exact value type, for each form.

Written down from the loaders, not from the writer, so that a test or a verifier can hold a header
against it. Sources: llama.cpp src/models/deepseek41.cpp and PR #28696, ik_llama.cpp PR #2455,
HelloKS/llama.cpp 18ac4655 for V4.1; llama.cpp PR #24162 for V4; PR #25784 and the drafts published
by JigSawPT and smalinin for `dflash`. Each key dropped and each type changed once in a running
engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from pipeline.gguf.keys import ValueType
from pipeline.model.form import V4_DRAFT, V4_TARGET, V41_DRAFT, V41_FORK, V41_MAINLINE, Form

KeyType = tuple[ValueType, ValueType | None]
"""Value type and, for an array, the type of its elements."""

_U32: KeyType = (ValueType.UINT32, None)
_I32: KeyType = (ValueType.INT32, None)
_F32: KeyType = (ValueType.FLOAT32, None)
_BOOL: KeyType = (ValueType.BOOL, None)
_STR: KeyType = (ValueType.STRING, None)
_I32S: KeyType = (ValueType.ARRAY, ValueType.INT32)
_U32S: KeyType = (ValueType.ARRAY, ValueType.UINT32)
_U64S: KeyType = (ValueType.ARRAY, ValueType.UINT64)
_F32S: KeyType = (ValueType.ARRAY, ValueType.FLOAT32)
_STRS: KeyType = (ValueType.ARRAY, ValueType.STRING)

_ANY_MODEL: Mapping[str, KeyType] = {
    "general.architecture": _STR,
    "general.name": _STR,
    "general.file_type": _U32,
    "general.quantization_version": _U32,
    "tokenizer.ggml.model": _STR,
    "tokenizer.ggml.pre": _STR,
    "tokenizer.ggml.tokens": _STRS,
    "tokenizer.ggml.token_type": _I32S,
    "tokenizer.ggml.merges": _STRS,
    "tokenizer.ggml.bos_token_id": _U32,
    "tokenizer.ggml.eos_token_id": _U32,
    "tokenizer.ggml.padding_token_id": _U32,
    "tokenizer.ggml.add_bos_token": _BOOL,
    "tokenizer.ggml.add_eos_token": _BOOL,
    "tokenizer.chat_template": _STR,
}

_BLOCKS: Mapping[str, KeyType] = {
    "block_count": _U32,
    "context_length": _U32,
    "embedding_length": _U32,
    "vocab_size": _U32,
    "attention.head_count": _U32,
    "attention.head_count_kv": _U32,
    "attention.key_length": _U32,
    "attention.value_length": _U32,
    "attention.layer_norm_rms_epsilon": _F32,
    "attention.q_lora_rank": _U32,
    "attention.sliding_window": _U32,
    "attention.output_group_count": _U32,
    "attention.output_lora_rank": _U32,
    "attention.compress_ratios": _I32S,
    "attention.compress_rope_freq_base": _F32,
    "attention.indexer.head_count": _U32,
    "attention.indexer.key_length": _U32,
    "attention.indexer.top_k": _U32,
    "rope.dimension_count": _U32,
    "rope.freq_base": _F32,
    "rope.scaling.type": _STR,
    "rope.scaling.factor": _F32,
    "rope.scaling.original_context_length": _U32,
    "rope.scaling.yarn_beta_fast": _F32,
    "rope.scaling.yarn_beta_slow": _F32,
    "expert_count": _U32,
    "expert_used_count": _U32,
    "expert_shared_count": _U32,
    "expert_feed_forward_length": _U32,
    "expert_gating_func": _U32,
    "expert_weights_scale": _F32,
    "expert_weights_norm": _BOOL,
    "swiglu_clamp_exp": _F32S,
    "swiglu_clamp_shexp": _F32S,
    "hyper_connection.count": _U32,
    "hyper_connection.sinkhorn_iterations": _U32,
    "hyper_connection.epsilon": _F32,
    "hash_layer_count": _U32,
}
"""All architectures. Some have a default in the loader, but it is wrong here and silent."""

_SOURCES: Mapping[str, KeyType] = {
    "deepseek41.attention.kv_source_layers": _I32S,
    "deepseek41.attention.indexer.source_layers": _I32S,
    "deepseek41.attention.indexer.candidate_source_layer": _I32,
    "deepseek41.attention.indexer.candidate_block_size": _U32,
    "deepseek41.attention.indexer.candidate_top_k_blocks": _U32,
}

NINE_KEYS: Mapping[str, KeyType] = {
    "deepseek41.engram.layer_ids": _I32S,
    "deepseek41.engram.head_count": _U32,
    "deepseek41.engram.key_length": _U32,
    "deepseek41.engram.max_ngram_size": _U32,
    "deepseek41.engram.pad_id": _U32,
    "deepseek41.engram.multipliers": _U64S,
    "deepseek41.engram.primes": _U64S,
    "deepseek41.engram.offsets": _U64S,
    "deepseek41.engram.token_map": _I32S,
}
"""Engram keys without which no loader of the fork layout starts."""

UNION_KEYS: Mapping[str, KeyType] = {
    **_SOURCES,
    "deepseek41.attention.candidate_source_layer_id": _U32,
    "deepseek41.attention.candidate_block_size": _U32,
    "deepseek41.attention.candidate_topk_blocks": _U32,
    "deepseek41.attention.candidate.source_layer": _U32,
    "deepseek41.attention.candidate.topk_blocks": _U32,
    "deepseek41.attention.candidate.block_size": _U32,
    "deepseek41.attention.kv_source_layer_ids": _I32S,
    "deepseek41.attention.index_source_layer_ids": _I32S,
    "deepseek41.engram.layers": _I32S,
    "deepseek41.engram.head_dim": _U32,
    "deepseek41.engram.pad_token_id": _U32,
    "deepseek41.engram.compressed_vocab_size": _U32,
    "deepseek41.engram.vocab_size": _U32,
    "deepseek41.engram.table_rows": _U32S,
    "deepseek41.engram.hash_multipliers": _U64S,
    "deepseek41.engram.head_offsets": _U64S,
    "deepseek41.engram.head_bucket_sizes": _U64S,
    "deepseek41.hyper_connection.single_pass": _BOOL,
}
"""What one branch or another reads beside the nine keys, under its own name."""

MAINLINE_KEYS: Mapping[str, KeyType] = {
    **_SOURCES,
    "deepseek41.embedding_length_per_layer_input": _U32,
    "deepseek41.ple.layers": _I32S,
    "deepseek41.ple.ngram_size": _U32,
    "deepseek41.ple.heads_per_ngram": _U32,
    "deepseek41.ple.layer_multipliers": _U64S,
    "deepseek41.ple.head_vocab_sizes": _U64S,
    "deepseek41.ple.head_offsets": _U64S,
    "deepseek41.engram.token_map": _I32S,
    "deepseek41.engram.pad_token_id": _U32,
}
"""Engram and source keys of mainline llama.cpp. No other ``engram.*`` key may stand beside them."""

_DRAFT: Mapping[str, KeyType] = {
    "dflash.block_size": _U32,
    "dflash.target_layers": _I32S,
    "tokenizer.ggml.mask_token_id": _U32,
}

_V41_FLAGS: Mapping[str, KeyType] = {
    "dflash.hyper_connection.single_pass": _BOOL,
    "dflash.dsv41_semantics": _BOOL,
}
"""How mainline and how forks tell a V4.1 draft from a V4 one."""

_OF_FORM: Mapping[Form, Mapping[str, KeyType]] = {
    V41_MAINLINE: MAINLINE_KEYS,
    V41_FORK: {**NINE_KEYS, **UNION_KEYS},
    V4_TARGET: {},
    V41_DRAFT: {**_DRAFT, **_V41_FLAGS},
    V4_DRAFT: _DRAFT,
}

_SPARE_IN_DRAFTS = (
    "vocab_size",
    "attention.compress_ratios",
    "attention.compress_rope_freq_base",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "swiglu_clamp_shexp",
    "hash_layer_count",
)
"""A draft's layers see a sliding window only, with plain rope, and compress nothing."""

_SPARE_DRAFT_KEYS = frozenset(f"dflash.{name}" for name in _SPARE_IN_DRAFTS)

_SPARE: Mapping[Form, Set[str]] = {
    V41_MAINLINE: frozenset(),
    V41_FORK: UNION_KEYS.keys(),
    V4_TARGET: frozenset({"deepseek4.vocab_size"}),
    V41_DRAFT: _SPARE_DRAFT_KEYS | {"dflash.dsv41_semantics"},
    V4_DRAFT: _SPARE_DRAFT_KEYS,
}


def required_keys(form: Form) -> Mapping[str, KeyType]:
    """Every key that the first shard of a file of this form must hold, with its type."""
    blocks = {f"{form.architecture}.{name}": kind for name, kind in _BLOCKS.items()}
    return {**_ANY_MODEL, **blocks, **_OF_FORM[form]}


def spare_keys(form: Form) -> Set[str]:
    """Those of `required_keys` that some loaders, or all, do without: other makers leave them out.

    One file is to suit every loader, so ours have them all.
    """
    return _SPARE[form]
