"""Values of config.json that contradict each other: lists of the wrong length, wrong counts."""

from __future__ import annotations

from pipeline.errors import ConfigError
from pipeline.model.model_config import ModelConfig

SAME_RELEASE = "Use the config.json that was released with these shards."


def check_config(model: ModelConfig) -> None:
    """Refuse a description that no checkpoint can fit.

    Raises:
        ConfigError: A list has another length than its layers, names no possible layers, or more
            experts are used per token than there are.
    """
    _check_layer_lists(model)
    n_stages = model.draft.n_stages
    if len(model.compress_ratios) != model.n_layers + n_stages:
        raise ConfigError(
            "config.json compress_ratios must have one entry per layer and draft stage",
            expected=f"{model.n_layers + n_stages} ({model.n_layers} layers, {n_stages} stages)",
            found=len(model.compress_ratios),
            next_step=SAME_RELEASE,
        )
    if model.engram and len(model.engram.n_rows) != len(model.engram.layers):
        raise ConfigError(
            "config.json engram_num_embeddings must have one entry per engram layer",
            expected=len(model.engram.layers),
            found=len(model.engram.n_rows),
            next_step=SAME_RELEASE,
        )
    for part, counts in (("", model), (" of the draft", model.draft)):
        if counts.n_experts_used > counts.n_experts:
            raise ConfigError(
                f"config.json asks for more experts{part} per token than there are",
                expected=f"at most {counts.n_experts}",
                found=counts.n_experts_used,
                next_step=SAME_RELEASE,
            )


def _check_layer_lists(model: ModelConfig) -> None:
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
                next_step=SAME_RELEASE,
            )
    if not model.draft.target_layers:
        raise ConfigError(
            "config.json dspark_target_layer_ids names no layer for the draft to read",
            expected=f"at least one layer number below {model.n_layers}",
            found=[],
            next_step=SAME_RELEASE,
        )
