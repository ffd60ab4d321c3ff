"""The model's own description: config.json read into named, typed, checked fields.

V4.1-Flash nests the language model under ``text_config``; V4-Flash-0731 is flat. Both become one
`ModelConfig`, so that what differs between the models is data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.model.config_checks import SAME_RELEASE, check_config
from pipeline.model.config_keys import ConfigKeys
from pipeline.model.model_config import CandidateConfig as CandidateConfig
from pipeline.model.model_config import DraftConfig as DraftConfig
from pipeline.model.model_config import EngramConfig as EngramConfig
from pipeline.model.model_config import ModelConfig as ModelConfig
from pipeline.model.model_config import RopeScaling as RopeScaling
from pipeline.model.model_config import VisionConfig as VisionConfig

ARCHITECTURES = {"DeepseekV41ForCausalLM": "v4.1", "DeepseekV4ForCausalLM": "v4"}
"""config.json ``architectures[0]`` -> the model family as this project names it."""

DRAFT_PREFIX = "mtp."
"""How the names of the draft module's stored tensors begin; the number of their stage follows."""

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
    "topk_method": "noaux_tc",
    "gate_temp": 1,
}
"""Values of the language model that the GGUF architectures stand for."""

_DRAFT_KEYS_OF_BOTH = (
    "dspark_target_layer_ids",
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_markov_rank",
)
_DRAFT_KEYS = {
    "v4.1": (
        "num_nextn_predict_layers",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
        *_DRAFT_KEYS_OF_BOTH,
    ),
    "v4": _DRAFT_KEYS_OF_BOTH,
}
"""Keys without which a draft cannot be described; V4 counts its experts with the trunk's."""


def read_config(
    config: Mapping[str, object], *, file: Path | None = None, stored: Iterable[str] = ()
) -> ModelConfig:
    """The architecture that a parsed config.json describes.

    Args:
        config: The parsed file.
        file: Where it lies, for messages.
        stored: Names of the tensors that lie beside it: a key of the draft that is missing is told
            with what there is of a draft.

    Raises:
        ConfigError: Unknown architecture, missing key, wrong kind of value, or values that
            contradict each other (`pipeline.model.config_checks`).
    """
    try:
        model = _read(config, stored)
        check_config(model)
    except ConfigError as error:
        raise error.from_state(error.__dict__ | {"file": file and str(file)}) from None
    return model


def _read(config: Mapping[str, object], stored: Iterable[str]) -> ModelConfig:
    top = ConfigKeys(config)
    names = top.get("architectures", list)
    family = ARCHITECTURES.get(names[0] if names else "")
    if family is None:
        raise ConfigError(
            "this architecture is not one this project converts",
            expected=" or ".join(ARCHITECTURES),
            found=names,
        )
    nested = "text_config." if "text_config" in top else ""
    text = top.inner("text_config") if nested else top
    _check_fixed(top, text)
    lacking = [nested + key for key in _DRAFT_KEYS[family] if key not in text]
    if lacking:
        _refuse_nameless_draft(lacking, stored)
    return _model(family, top, text)


def _refuse_nameless_draft(lacking: Sequence[str], stored: Iterable[str]) -> None:
    names = [name for name in stored if name.startswith(DRAFT_PREFIX)]
    if names:
        n_stages = len({name.split(".")[1] for name in names})
        raise ConfigError(
            f"config.json lacks {', '.join(lacking)}, but the checkpoint holds a draft",
            expected=f"keys that describe {n_stages:,} stages",
            found=f"{len(names):,} tensors {DRAFT_PREFIX}*",
            next_step=SAME_RELEASE,
        )


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
    for amplitude in ("attention_factor", "mscale"):
        scaling.fixed(amplitude, 1)
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
