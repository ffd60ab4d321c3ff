"""Which models can be observed: those whose forward pass `pipeline.forward` computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.errors import ConfigError, raise_problems
from pipeline.experts.routing import routing_of
from pipeline.model.config import ModelConfig

_FAMILY = "v4.1"


def require_observable(config: ModelConfig, said: Mapping[str, object]) -> None:
    """Refuse a model that cannot lose experts, or whose forward pass is another.

    Args:
        config: The model.
        said: Its config.json, for a rule that `ModelConfig` does not carry.

    Raises:
        PlanError: Its first layers choose experts by token id.
        ConfigError: A rule of its forward pass is not the one that is computed here; several raise
            `Problems`.
    """
    routing_of(config)
    if config.family != _FAMILY:
        raise _unknown("family", _FAMILY, config.family)
    raise_problems("the forward pass of this model", [*_rules(config, said), *_sources(config)])


def _rules(config: ModelConfig, said: Mapping[str, object]) -> Iterator[ConfigError]:
    text = said.get("text_config")
    rules: dict[str, tuple[object, object]] = {
        "scoring_func": ("sqrtsoftplus", config.scoring_func),
        "rope_scaling.rope_type": ("yarn", config.rope_scaling.kind),
        "num_key_value_heads": (1, config.n_kv_heads),
        # The release's code has a temperature of the router; its config.json does not.
        "gate_temp": (1, text.get("gate_temp", 1) if isinstance(text, dict) else 1),
    }
    for key, (known, found) in rules.items():
        if known != found:
            yield _unknown(key, known, found)


def _unknown(key: str, known: object, found: object) -> ConfigError:
    return ConfigError(
        f"an observation does not know this model's {key}",
        expected=known,
        found=found,
        next_step="Import saliency that another tool has measured.",
    )


def _sources(config: ModelConfig) -> Iterator[ConfigError]:
    """Layers that read compressed rows which no earlier layer makes."""
    for layer, ratio in enumerate(config.layer_ratios):
        rows = [source for source in config.kv_sources if source <= layer]
        picks = [source for source in config.index_sources if source <= layer]
        if ratio and not (rows and picks and config.layer_ratios[rows[-1]] == ratio):
            yield ConfigError(
                f"layer {layer} reads compressed rows that no layer makes for it",
                expected=f"a kv source of ratio {ratio} and an index source at or before it",
                found=f"kv sources {rows}, index sources {picks}",
            )
