"""The model's own description: config.json read into named, typed, checked fields.

V4.1-Flash nests the language model under ``text_config``; V4-Flash-0731 is flat. Both become one
`ModelConfig`, so that what differs between the models is data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import ConfigError
from pipeline.model.config_keys import ConfigKeys

ARCHITECTURES = {"DeepseekV41ForCausalLM": "v4.1", "DeepseekV4ForCausalLM": "v4"}
"""config.json ``architectures[0]`` -> the model family as this project names it."""


MOST_LAYERS = 1024
MOST_EXPERTS = 1 << 16
"""Larger numbers are no model: every expert of every layer becomes a tensor to look for."""

FIXED: Mapping[str, object] = {
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
}
"""``quantization_config`` values that the decoder stands for."""

FIXED_TEXT: Mapping[str, object] = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""Values of the language model that the GGUF architectures stand for."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """YaRN parameters (``rope_scaling``)."""

    kind: str
    factor: float
    beta_fast: float
    beta_slow: float
    original_context: int


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """The n-gram tables: which layers hold one, how they are hashed, how many rows they have."""

    layers: tuple[int, ...]
    n_rows: tuple[int, ...]
    max_ngram: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token: int
    n_compressed: int

    @property
    def n_columns(self) -> int:
        """Rows read per token and layer: one per n-gram order (2 … max) and head."""
        return (self.max_ngram - 1) * self.n_heads


@dataclass(frozen=True, slots=True)
class CandidateConfig:
    """Two-level selection of compressed blocks (``candidate_*``)."""

    source_layer: int
    block_size: int
    top_k: int


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The MTP/DSpark module: ``n_stages`` blocks with their own experts."""

    n_stages: int
    n_experts: int
    n_experts_used: int
    block_size: int
    mask_token: int
    target_layers: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The image encoder and its aligner."""

    n_layers: int
    hidden: int
    ff: int
    patch: int
    downsample: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One checkpoint's architecture. Counts are ``n_x``; widths carry the config's own meaning."""

    family: str
    vocab_size: int
    hidden: int
    expert_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_dim: int
    q_lora: int
    o_lora: int
    o_groups: int
    n_experts: int
    n_shared_experts: int
    n_experts_used: int
    n_hash_layers: int
    scoring_func: str
    norm_weights: bool
    weights_scale: float
    swiglu_limit: float
    rms_eps: float
    sliding_window: int
    context: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_top_k: int
    candidate: CandidateConfig | None
    hc_mult: int
    hc_iterations: int
    hc_eps: float
    bos_token: int
    eos_token: int
    scale_block: tuple[int, int]
    engram: EngramConfig | None
    draft: DraftConfig
    vision: VisionConfig | None

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each of the ``n_layers`` trunk layers (0 = sliding window only)."""
        return self.compress_ratios[: self.n_layers]


def read_config(config: Mapping[str, object]) -> ModelConfig:
    """The architecture that a parsed config.json describes.

    Raises:
        ConfigError: Unknown architecture, missing key, wrong kind of value, or lists whose lengths
            do not fit the number of layers.
    """
    top = ConfigKeys(config)
    names = top.get("architectures", list)
    family = ARCHITECTURES.get(names[0] if names else "")
    if family is None:
        raise ConfigError(
            "this architecture is not one this project converts",
            expected=" or ".join(ARCHITECTURES),
            found=names,
        )
    text = top.inner("text_config") if "text_config" in top else top
    _check_fixed(top, text)
    return _checked(_model(family, top, text))


def _check_fixed(top: ConfigKeys, text: ConfigKeys) -> None:
    quantization = top.inner("quantization_config")
    for keys, fixed in ((quantization, FIXED), (text, FIXED_TEXT)):
        for key, value in fixed.items():
            keys.fixed(key, value)
    # V4.1 says it among the quantization settings, V4 at the top.
    (quantization if "expert_dtype" in quantization else top).fixed("expert_dtype", "fp4")


def _model(family: str, top: ConfigKeys, text: ConfigKeys) -> ModelConfig:
    is_v41 = family == "v4.1"
    ratios = text.ints("compress_ratios")
    n_layers = text.count("num_hidden_layers", most=MOST_LAYERS)
    return ModelConfig(
        family=family,
        vocab_size=text.count("vocab_size"),
        hidden=text.count("hidden_size"),
        expert_ff=text.count("moe_intermediate_size"),
        n_layers=n_layers,
        n_heads=text.count("num_attention_heads"),
        n_kv_heads=text.count("num_key_value_heads"),
        head_dim=text.count("head_dim"),
        rope_dim=text.count("qk_rope_head_dim"),
        q_lora=text.count("q_lora_rank"),
        o_lora=text.count("o_lora_rank"),
        o_groups=text.count("o_groups"),
        n_experts=text.count("n_routed_experts", most=MOST_EXPERTS),
        n_shared_experts=text.count("n_shared_experts"),
        n_experts_used=text.count("num_experts_per_tok"),
        n_hash_layers=text.get("num_hash_layers", int, 0),
        scoring_func=text.get("scoring_func", str),
        norm_weights=text.get("norm_topk_prob", bool),
        weights_scale=text.positive("routed_scaling_factor"),
        swiglu_limit=text.positive("swiglu_limit"),
        rms_eps=text.positive("rms_norm_eps"),
        sliding_window=text.count("sliding_window"),
        context=text.count("max_position_embeddings"),
        rope_theta=text.positive("rope_theta"),
        compress_rope_theta=text.positive("compress_rope_theta"),
        rope_scaling=_rope_scaling(text),
        compress_ratios=ratios,
        kv_sources=text.ints("kv_source_layer_ids") if is_v41 else (),
        index_sources=text.ints("index_source_layer_ids") if is_v41 else (),
        index_heads=text.count("index_n_heads"),
        index_dim=text.count("index_head_dim"),
        index_top_k=text.count("index_topk"),
        candidate=_candidate(text) if is_v41 else None,
        hc_mult=text.count("hc_mult"),
        hc_iterations=text.count("hc_sinkhorn_iters"),
        hc_eps=text.positive("hc_eps"),
        bos_token=top.get("bos_token_id", int),
        eos_token=top.get("eos_token_id", int),
        scale_block=_scale_block(top),
        engram=_engram(text) if "engram_layer_ids" in text else None,
        draft=_draft(text, is_v41=is_v41),
        vision=_vision(top) if "vision_config" in top else None,
    )


def _rope_scaling(text: ConfigKeys) -> RopeScaling:
    scaling = text.inner("rope_scaling")
    return RopeScaling(
        kind=scaling.get("rope_type" if "rope_type" in scaling else "type", str),
        factor=scaling.positive("factor"),
        beta_fast=scaling.positive("beta_fast"),
        beta_slow=scaling.positive("beta_slow"),
        original_context=scaling.count("original_max_position_embeddings"),
    )


def _scale_block(top: ConfigKeys) -> tuple[int, int]:
    block = top.inner("quantization_config").ints("weight_block_size")
    if len(block) != 2 or min(block) < 1:
        raise ConfigError(
            "config.json quantization_config.weight_block_size must be two counts", found=block
        )
    return block[0], block[1]


def _candidate(text: ConfigKeys) -> CandidateConfig:
    return CandidateConfig(
        source_layer=text.get("candidate_source_layer_id", int),
        block_size=text.count("candidate_block_size"),
        top_k=text.count("candidate_topk_blocks"),
    )


def _engram(text: ConfigKeys) -> EngramConfig:
    return EngramConfig(
        layers=text.ints("engram_layer_ids"),
        n_rows=text.ints("engram_num_embeddings"),
        max_ngram=text.count("engram_max_ngram_size"),
        vocab_size=text.count("engram_vocab_size"),
        n_heads=text.count("engram_n_heads"),
        head_dim=text.count("engram_head_dim"),
        pad_token=text.get("engram_pad_token_id", int),
        n_compressed=text.count("engram_compressed_vocab_size"),
    )


def _draft(text: ConfigKeys, *, is_v41: bool) -> DraftConfig:
    targets = text.ints("dspark_target_layer_ids")
    # V4-Flash-0731 says one stage but ships three: one per captured target layer
    # (structure digest of the released shards). Its stages reuse the trunk's expert counts.
    n_stages, experts_key, used_key = len(targets), "n_routed_experts", "num_experts_per_tok"
    if is_v41:
        n_stages = text.count("num_nextn_predict_layers", most=MOST_LAYERS)
        experts_key, used_key = f"dspark_{experts_key}", f"dspark_{used_key}"
    n_experts = text.count(experts_key, most=MOST_EXPERTS)
    n_used = text.count(used_key)
    return DraftConfig(
        n_stages=n_stages,
        n_experts=n_experts,
        n_experts_used=n_used,
        block_size=text.count("dspark_block_size"),
        mask_token=text.get("dspark_noise_token_id", int),
        target_layers=targets,
        markov_rank=text.count("dspark_markov_rank"),
    )


def _vision(top: ConfigKeys) -> VisionConfig:
    vision = top.inner("vision_config")
    return VisionConfig(
        n_layers=vision.count("num_hidden_layers", most=MOST_LAYERS),
        hidden=vision.count("hidden_size"),
        ff=vision.count("intermediate_size"),
        patch=vision.count("patch_size"),
        downsample=vision.count("downsample_ratio"),
    )


def _checked(model: ModelConfig) -> ModelConfig:
    n_blocks = model.n_layers + model.draft.n_stages
    if len(model.compress_ratios) != n_blocks:
        raise ConfigError(
            "config.json compress_ratios must have one entry per layer and draft stage",
            expected=n_blocks,
            found=len(model.compress_ratios),
        )
    listed = {
        "kv_source_layer_ids": model.kv_sources,
        "index_source_layer_ids": model.index_sources,
        "engram_layer_ids": model.engram.layers if model.engram else (),
        "dspark_target_layer_ids": model.draft.target_layers,
    }
    for key, layers in listed.items():
        if list(layers) != sorted(set(layers)) or any(n >= model.n_layers for n in layers):
            raise ConfigError(
                f"config.json {key} must be increasing layer numbers below {model.n_layers}",
                found=list(layers),
            )
    if model.engram and len(model.engram.n_rows) != len(model.engram.layers):
        raise ConfigError(
            "config.json engram_num_embeddings must have one entry per engram layer",
            expected=len(model.engram.layers),
            found=len(model.engram.n_rows),
        )
    if model.n_experts_used > model.n_experts:
        raise ConfigError(
            "config.json asks for more experts per token than there are",
            expected=f"at most {model.n_experts}",
            found=model.n_experts_used,
        )
    return model
