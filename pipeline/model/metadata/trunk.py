"""Metadata that every model file has: what it is, and sizes and constants of its layers.

The same keys serve `deepseek41`, `deepseek4` and `dflash`, each under its own architecture.
"""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.gguf.keys import KeyValue, ValueType, array, f32, flag, text, u32
from pipeline.model.config import ModelConfig

_QUANTIZATION_VERSION = 2
GATING_FUNCS = {"sqrtsoftplus": 4}
"""config.json ``scoring_func`` -> llama.cpp's ``llama_expert_gating_func_type``.

The loaders of these architectures accept no other.
"""


def general_keys(architecture: str, name: str, file_type: int) -> tuple[KeyValue, ...]:
    """The keys any GGUF model file starts with."""
    return (
        text("general.architecture", architecture),
        text("general.type", "model"),
        text("general.name", name),
        text("general.license", "mit"),
        u32("general.file_type", file_type),
        u32("general.quantization_version", _QUANTIZATION_VERSION),
    )


def trunk_keys(architecture: str, config: ModelConfig) -> tuple[KeyValue, ...]:
    """Sizes and constants of the layers, under ``architecture``; the same keys serve V4 and V4.1.

    Raises:
        ConfigError: A rope scaling or an expert scoring that llama.cpp has no value for.
    """
    return (
        *_size_keys(architecture, config),
        *_attention_keys(f"{architecture}.attention", config),
        *_rope_keys(f"{architecture}.rope", config),
        *_expert_keys(architecture, config),
        u32(f"{architecture}.hyper_connection.count", config.hc_mult),
        u32(f"{architecture}.hyper_connection.sinkhorn_iterations", config.hc_iterations),
        f32(f"{architecture}.hyper_connection.epsilon", config.hc_eps),
        u32(f"{architecture}.hash_layer_count", config.n_hash_layers),
    )


def _size_keys(prefix: str, config: ModelConfig) -> tuple[KeyValue, ...]:
    return (
        u32(f"{prefix}.block_count", config.n_layers),
        u32(f"{prefix}.context_length", config.context),
        u32(f"{prefix}.embedding_length", config.hidden),
        u32(f"{prefix}.vocab_size", config.vocab_size),
    )


def _attention_keys(prefix: str, config: ModelConfig) -> tuple[KeyValue, ...]:
    ratios = config.compress_ratios[: config.n_layers]
    return (
        u32(f"{prefix}.head_count", config.n_heads),
        u32(f"{prefix}.head_count_kv", config.n_kv_heads),
        u32(f"{prefix}.key_length", config.head_dim),
        u32(f"{prefix}.value_length", config.head_dim),
        f32(f"{prefix}.layer_norm_rms_epsilon", config.rms_eps),
        u32(f"{prefix}.q_lora_rank", config.q_lora),
        u32(f"{prefix}.sliding_window", config.sliding_window),
        u32(f"{prefix}.output_group_count", config.o_groups),
        u32(f"{prefix}.output_lora_rank", config.o_lora),
        array(f"{prefix}.compress_ratios", ValueType.INT32, ratios),
        f32(f"{prefix}.compress_rope_freq_base", config.compress_rope_theta),
        u32(f"{prefix}.indexer.head_count", config.index_heads),
        u32(f"{prefix}.indexer.key_length", config.index_dim),
        u32(f"{prefix}.indexer.top_k", config.index_top_k),
    )


def _rope_keys(prefix: str, config: ModelConfig) -> tuple[KeyValue, ...]:
    scaling = config.rope_scaling
    if scaling.kind != "yarn":
        raise ConfigError("this rope scaling has no GGUF form", expected="yarn", found=scaling.kind)
    return (
        u32(f"{prefix}.dimension_count", config.rope_dim),
        f32(f"{prefix}.freq_base", config.rope_theta),
        text(f"{prefix}.scaling.type", scaling.kind),
        f32(f"{prefix}.scaling.factor", scaling.factor),
        u32(f"{prefix}.scaling.original_context_length", scaling.original_context),
        f32(f"{prefix}.scaling.yarn_beta_fast", scaling.beta_fast),
        f32(f"{prefix}.scaling.yarn_beta_slow", scaling.beta_slow),
    )


def _expert_keys(prefix: str, config: ModelConfig) -> tuple[KeyValue, ...]:
    gating = GATING_FUNCS.get(config.scoring_func)
    if gating is None:
        raise ConfigError(
            "this expert scoring has no GGUF form",
            expected=", ".join(GATING_FUNCS),
            found=config.scoring_func,
        )
    clamps = [config.swiglu_limit] * config.n_layers
    return (
        u32(f"{prefix}.expert_count", config.n_experts),
        u32(f"{prefix}.expert_used_count", config.n_experts_used),
        u32(f"{prefix}.expert_shared_count", config.n_shared_experts),
        u32(f"{prefix}.expert_feed_forward_length", config.expert_ff),
        u32(f"{prefix}.expert_gating_func", gating),
        f32(f"{prefix}.expert_weights_scale", config.weights_scale),
        flag(f"{prefix}.expert_weights_norm", config.norm_weights),
        array(f"{prefix}.swiglu_clamp_exp", ValueType.FLOAT32, clamps),
        array(f"{prefix}.swiglu_clamp_shexp", ValueType.FLOAT32, clamps),
    )
